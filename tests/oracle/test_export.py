"""transformers loads what is exported: its own weights come back to it, FP8 through its decoder."""

import json

import ml_dtypes
import numpy as np
import pytest

import glm5_jax
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.export import export
from glm5_jax.checkpoint.quantize import quantization_config
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.numerics.oracle import oracle_model, quiet

torch = pytest.importorskip("torch", reason="the oracle extra is not installed")
modeling = pytest.importorskip(
    "transformers.models.glm5_next.modeling_glm5_next", reason="the oracle extra is not installed"
)


def assert_same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("naming", ["released", "native"])
def test_weights_that_transformers_wrote_come_back_to_it(tmp_path, random_case, naming):
    case = random_case(11)
    convert(case.directory, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "out", naming=naming, shard_bytes=50_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    # `oracle_model` refuses a tensor that is missing, unexpected or of another shape.
    assert_same_weights(oracle_model(tmp_path / "out"), oracle_model(case.directory))


@pytest.mark.parametrize("naming", ["released", "native"])
def test_a_decoded_release_is_a_checkpoint_for_transformers(tmp_path, naming):
    source = glm5_jax.make_tiny(tmp_path / "source", quantization="nvfp4_modelopt")
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "out", naming=naming, dtype="bfloat16")
    state = oracle_model(tmp_path / "out", "bfloat16").state_dict()
    _, leaves = load_leaves(source, "bfloat16")
    for layer in (1, 3):
        stored = state[f"model.language_model.layers.{layer}.mlp.experts.down_proj"]
        decoded = leaves[f"layers.{layer}.ffn.experts.down_proj"].astype(np.float32)
        assert np.array_equal(stored.float().numpy(), decoded)


def test_transformers_decodes_an_exported_fp8_checkpoint_to_our_values(tmp_path, monkeypatch):
    from transformers import FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for a package that reading on a CPU does without.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    config = json.loads(packaged_config("tiny").read_bytes())
    # It knows no partial blocks.
    config["quantization_config"] = quantization_config("fp8", (2, 2))
    source = glm5_jax.make_tiny(tmp_path / "source", config, quantization="fp8")
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "out")
    with quiet():
        model = modeling.Glm5NextForConditionalGeneration.from_pretrained(
            str(tmp_path / "out"),
            dtype=torch.bfloat16,
            quantization_config=FineGrainedFP8Config(weight_block_size=(2, 2), dequantize=True),
        )
    state = model.state_dict()
    _, leaves = load_leaves(source, "bfloat16")
    prefix = "model.language_model.layers."
    for name, leaf in {
        "3.self_attn.q_a_proj.weight": leaves["layers.3.attn.q_a_proj"],
        "3.self_attn.o_proj.weight": leaves["layers.3.attn.o_proj"],
        "0.mlp.down_proj.weight": leaves["layers.0.ffn.down_proj"],
        "2.mlp.shared_experts.up_proj.weight": leaves["layers.2.ffn.shared.up_proj"],
        "1.mlp.experts.down_proj": leaves["layers.1.ffn.experts.down_proj"],
        "4.mlp.experts.gate_up_proj": np.concatenate(
            [leaves[f"layers.4.ffn.experts.{name}_proj"] for name in ("gate", "up")], axis=1
        ),
    }.items():
        assert leaf.dtype == ml_dtypes.bfloat16
        assert np.array_equal(state[prefix + name].float().numpy(), leaf.astype(np.float32)), name
