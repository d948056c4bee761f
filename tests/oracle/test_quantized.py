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
