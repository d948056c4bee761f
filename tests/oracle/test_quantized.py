"""Checkpoints that transformers wrote, in each quantised layout: its logits on the decoded weights.

Our encoders quantise what the release of the layout does. transformers is given the decoded
weights in float64, we are given the codes.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import glm5_jax
from glm5_jax.checkpoint.codecs import decode
from glm5_jax.checkpoint.layouts import RELEASED_WORDS
from glm5_jax.checkpoint.quantize import is_quantized, quantization_config, quantize
from glm5_jax.checkpoint.reader import open_checkpoint
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.numerics.choices import has_tie
from glm5_jax.numerics.oracle import oracle_logits, oracle_model, oracle_sites
from glm5_jax.specs import stored_tensors

pytest.importorskip("torch", reason="the oracle extra is not installed")
pytest.importorskip("transformers.models.glm5_next", reason="the oracle extra is not installed")

BLOCK = (8, 24)  # partial at the edges
SIZES = {"hidden_size": 32, "moe_intermediate_size": 16}  # NVFP4 groups 16 columns
LAYOUTS = list(RELEASED_WORDS)


@pytest.fixture(scope="module", params=LAYOUTS)
def judged(request, random_case, tmp_path_factory):
    """(case, directory of codes, directory of the decoded weights in float64)"""
    layout = request.param
    case = random_case(7 + LAYOUTS.index(layout), **SIZES)
    checkpoint = open_checkpoint(case.directory)
    coded, decoded, quantised = {}, {}, 0
    for spec in stored_tensors(checkpoint.config):
        value = checkpoint.read(spec.name)
        own = quantize(spec, value, layout, BLOCK)
        coded |= own
        if is_quantized(spec, layout):
            assert len(own) == len(RELEASED_WORDS[layout])
            arrays = dict(zip(RELEASED_WORDS[layout], own.values(), strict=True))
            decoded[spec.name] = decode(arrays, BLOCK, np.float64)
            quantised += 1
        else:
            decoded[spec.name] = value.astype(np.float64)
    assert quantised >= 3 * checkpoint.config.n_routed_experts
    directories = []
    for tensors in (coded, decoded):
        directory = tmp_path_factory.mktemp(layout)
        save_file(
            {name: np.ascontiguousarray(value) for name, value in tensors.items()},
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )
        shutil.copyfile(case.directory / "config.json", directory / "config.json")
        directories.append(directory)
    config = json.loads((directories[0] / "config.json").read_bytes())
    config["quantization_config"] = quantization_config(layout, BLOCK)
    (directories[0] / "config.json").write_text(json.dumps(config))
    return case, *directories


def test_float64_logits_are_transformers_on_the_decoded_weights(judged):
    case, coded, decoded = judged
    oracle = oracle_model(decoded, "float64")
    sites = oracle_sites(oracle, case.tokens, case.mask)
    assert not has_tie(sites, case.mask)
    truth = sites["final.head"][case.real]
    ours = np.asarray(glm5_jax.load(coded, dtype="float64")(case.tokens, case.mask))[case.real]
    assert np.abs(ours - truth).max() <= 1e-10 * np.abs(truth).max()
    # Quantising changed the model: what was compared is not the plain one.
    plain = case.truth["final.head"][case.real]
    assert np.abs(ours - plain).max() > 1e-3 * np.abs(plain).max()


def test_codes_in_memory_give_the_logits_of_weights_decoded_once(judged):
    case, coded, decoded = judged
    stored = np.asarray(glm5_jax.load(coded)(case.tokens, case.mask))
    once = np.asarray(glm5_jax.load(coded, dtype="float32")(case.tokens, case.mask))
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, once)
    truth = oracle_logits(oracle_model(decoded, "float64"), case.tokens, case.mask)[case.real]
    error = np.linalg.norm(stored[case.real] - truth) / np.linalg.norm(truth)
    assert error < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_own_fp8_dequantisation_gives_our_bits(dtype, tmp_path, monkeypatch):
    import torch
    from transformers import FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    from glm5_jax.numerics.oracle import oracle_module, quiet

    # It asks for a package that reading on a CPU does without.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    config = json.loads(packaged_config("tiny").read_bytes())
    # It knows no partial blocks.
    config["quantization_config"] = quantization_config("fp8", (2, 2))
    config["text_config"]["num_nextn_predict_layers"] = 0
    directory = glm5_jax.make_tiny(tmp_path / "fp8", config, quantization="fp8")
    with quiet():
        model = oracle_module().Glm5NextForConditionalGeneration.from_pretrained(
            str(directory),
            dtype=getattr(torch, dtype),
            quantization_config=FineGrainedFP8Config(weight_block_size=(2, 2), dequantize=True),
        )
    theirs = {name: value.float().numpy() for name, value in model.state_dict().items()}
    _, ours = load_leaves(directory, dtype=dtype)
    text = "model.language_model.layers."
    for path, name in {
        "layers.0.ffn.down_proj": "0.mlp.down_proj.weight",
        "layers.3.attn.q_a_proj": "3.self_attn.q_a_proj.weight",
        "layers.3.attn.q_b_proj": "3.self_attn.q_b_proj.weight",
        "layers.3.attn.kv_a_proj": "3.self_attn.kv_a_proj_with_mqa.weight",
        "layers.3.attn.o_proj": "3.self_attn.o_proj.weight",
        "layers.4.ffn.shared.up_proj": "4.mlp.shared_experts.up_proj.weight",
        "layers.4.ffn.experts.down_proj": "4.mlp.experts.down_proj",
    }.items():
        assert ours[path].dtype == dtype
        np.testing.assert_array_equal(ours[path].astype(np.float32), theirs[text + name])
    gate_up = [ours[f"layers.4.ffn.experts.{part}_proj"] for part in ("gate", "up")]
    both = np.concatenate(gate_up, axis=1).astype(np.float32)
    np.testing.assert_array_equal(both, theirs[text + "4.mlp.experts.gate_up_proj"])
