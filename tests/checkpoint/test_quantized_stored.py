"""What is stored decides, weight by weight, whatever the config says; the malformed is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5_jax import CheckpointError
from glm5_jax.checkpoint.audit import audit
from glm5_jax.checkpoint.codecs import decode, encode_fp8, encode_nvfp4
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.layouts import RELEASED_WORDS
from glm5_jax.checkpoint.restore import load_leaves

BF16, F32, F64 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PREFIX = "model.language_model."
LAYOUTS = tuple(RELEASED_WORDS)
DTYPES = ("bfloat16", "float32", "float64")
BLOCK = (16, 32)


def same(one, other):
    assert list(one) == list(other)
    for path, array in one.items():
        assert array.dtype == other[path].dtype and array.shape == other[path].shape, path
        assert array.tobytes() == other[path].tobytes(), path


# What is stored decides, tensor by tensor.


@pytest.fixture(scope="module")
def plain(tiny, quantizable, arrays):
    """Arrays of the model that nothing of is quantised."""
    return arrays(tiny(config=quantizable()))


Q_A = PREFIX + "layers.3.self_attn.q_a_proj.weight"


@pytest.mark.parametrize("word", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("scale", [F32, BF16, np.dtype(ml_dtypes.float8_e8m0fnu)])
@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_fp8_scales_of_every_form_multiply(plain, quantizable, place_arrays, word, scale, kind):
    coded = encode_fp8(plain[Q_A], kind, BLOCK, scale)
    values = plain | {Q_A: coded["codes"], Q_A.removesuffix("weight") + word: coded["scale"]}
    directory = place_arrays(values, quantizable())
    if kind != "block" and word == "weight_scale_inv":
        with pytest.raises(CheckpointError, match=r"weight_scale_inv: expected .*\[3, 2\]"):
            load_leaves(directory)
        return
    for dtype in DTYPES:
        _, leaves = load_leaves(directory, dtype=dtype)
        expected = decode(coded, BLOCK, dtype)
        assert leaves["layers.3.attn.q_a_proj"].tobytes() == expected.tobytes()
    error = np.abs(expected - plain[Q_A].astype(F64)).max()
    assert error < 0.07 * np.abs(plain[Q_A].astype(F64)).max()


def test_e8m0_as_bytes_is_e8m0(plain, quantizable, place_arrays):
    coded = encode_fp8(plain[Q_A], "block", BLOCK, ml_dtypes.float8_e8m0fnu)
    trees = []
    for scale in (coded["scale"], coded["scale"].view(np.uint8)):
        values = plain | {Q_A: coded["codes"], Q_A + "_scale_inv": scale}
        trees.append(load_leaves(place_arrays(values, quantizable()), dtype="bfloat16")[1])
    same(*trees)


def test_fp8_without_a_scale_that_is_known_is_refused_and_never_cast(
    plain, quantizable, place_arrays
):
    codes = plain[Q_A].astype(E4M3)
    for extra in ({}, {Q_A.removesuffix("weight") + "scale": np.float32([[1]])}):
        with pytest.raises(CheckpointError, match=r"q_a_proj\.weight_scale_inv: missing"):
            load_leaves(place_arrays(plain | {Q_A: codes} | extra, quantizable()), dtype="bfloat16")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_scales_are_counted_and_change_no_bit(
    quantized, arrays, quantizable, place_arrays, layout
):
    stem = PREFIX + "layers.2.mlp.experts.3.up_proj."
    attention = PREFIX + "layers.3.self_attn."
    names = [stem + "input_scale", stem + "input_global_scale", attention + "k_scale"]
    names.append(attention + "v_scale")
    scales = dict.fromkeys(names, np.float32([7]))
    directory = place_arrays(arrays(quantized(layout)) | scales, quantizable())
    (reason,) = (names for why, names in audit(directory).ignored.items() if "activation" in why)
    assert sorted(reason) == sorted(scales)
    for dtype in ("stored", "float32"):
        same(load_leaves(directory, dtype=dtype)[1], load_leaves(quantized(layout), dtype=dtype)[1])


def test_plain_attention_beside_quantised_experts_stays_plain(quantized):
    _, leaves = load_leaves(quantized("nvfp4_modelopt"))
    assert leaves["layers.0.attn.q_proj"].dtype == BF16
    assert leaves["layers.1.ffn.experts.up_proj.codes"].dtype == np.uint8


def test_a_tensor_that_the_config_says_is_plain_is_decoded_all_the_same(
    plain, quantizable, place_arrays
):
    coded = encode_fp8(plain[Q_A], "channel")
    values = plain | {Q_A: coded["codes"], Q_A + "_scale": coded["scale"]}
    claims = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*.q_a_proj"]}
    for claim in (claims, None):
        made = quantizable() | {"quantization_config": claim}
        _, leaves = load_leaves(place_arrays(values, made), dtype="bfloat16")
        assert leaves["layers.3.attn.q_a_proj"].tobytes() == decode(coded, None, BF16).tobytes()


def test_layouts_may_be_mixed_from_leaf_to_leaf(quantized, arrays, quantizable, place_arrays):
    values = arrays(quantized("fp8"))
    other = arrays(quantized("nvfp4_modelopt"))
    layer = PREFIX + "layers.4.mlp.experts."
    mixed = {name: value for name, value in values.items() if not name.startswith(layer)}
    mixed |= {name: value for name, value in other.items() if name.startswith(layer)}
    directory = place_arrays(mixed, quantizable())
    assert audit(directory).quantization == "mixed"
    _, leaves = load_leaves(directory, dtype="bfloat16")
    for path, array in load_leaves(quantized("fp8"), dtype="bfloat16")[1].items():
        if not path.startswith("layers.4.ffn.experts."):
            assert leaves[path].tobytes() == array.tobytes(), path
    _, experts = load_leaves(quantized("nvfp4_modelopt"), dtype="bfloat16")
    path = "layers.4.ffn.experts.down_proj"
    assert leaves[path].tobytes() == experts[path].tobytes()
    assert "layers.4.ffn.experts.down_proj.scale_2" in load_leaves(directory)[1]


@pytest.fixture(scope="module")
def uneven(quantized, arrays, plain, quantizable, place_arrays):
    """NVFP4 experts, but one is plain and one has a scale of another rank."""
    values = arrays(quantized("nvfp4_modelopt"))
    stem = PREFIX + "layers.2.mlp.experts.{}.up_proj."
    for word in ("weight_scale", "weight_scale_2"):
        del values[stem.format(3) + word]
    values[stem.format(3) + "weight"] = plain[stem.format(3) + "weight"]
    other = PREFIX + "layers.4.mlp.experts.9.up_proj.weight_scale_2"
    values[other] = values[other].reshape(1)
    return place_arrays(values, quantizable())


def test_experts_stored_in_different_ways_are_stacked_only_decoded(
    uneven, quantized, plain, tmp_path
):
    told = r"layers\.2\.ffn\.experts\.up_proj: .*experts\.0\.up_proj\.weight is nvfp4_modelopt .*"
    told += r"experts\.3\.up_proj\.weight is plain .*BF16.*dtype bfloat16"
    for refused in (lambda: load_leaves(uneven), lambda: convert(uneven, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=told) as caught:
            refused()
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    _, even = load_leaves(quantized("nvfp4_modelopt"), dtype="bfloat16")
    convert(uneven, tmp_path / "out", dtype="bfloat16")
    for directory in (uneven, tmp_path / "out"):
        _, leaves = load_leaves(directory, dtype="bfloat16")
        for path, array in leaves.items():
            if path == "layers.2.ffn.experts.up_proj":
                name = PREFIX + "layers.2.mlp.experts.3.up_proj.weight"
                assert array[3].tobytes() == plain[name].tobytes()
                array[3] = even[path][3]
            assert array.tobytes() == even[path].tobytes(), path


# Malformed.


@pytest.fixture(scope="module")
def least(config_file, tiny, arrays):
    """Layout → (arrays, config) of a model of one layer, with experts."""
    found = {}

    def make(layout):
        if layout not in found:
            config = config_file("tiny")
            config["vision_config"] = None
            config["text_config"] |= {
                "num_hidden_layers": 1,
                "layer_types": ["deepseek_sparse_attention"],
                "mlp_layer_types": ["sparse"],
                "indexer_types": ["full"],
                "num_nextn_predict_layers": 0,
                "n_routed_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 48,
            }
            config["quantization_config"] = {
                "quant_method": "fp8",
                "weight_block_size": list(BLOCK),
            }
            made = tiny(config=config, quantization=layout)
            found[layout] = arrays(made), json.loads((made / "config.json").read_bytes())
        return found[layout]

    return make


EXPERT = PREFIX + "layers.0.mlp.experts.1.down_proj."


def no_scale(values, scale, draw):
    del values[scale]


def other_shape(values, scale, draw):
    array = values[scale]
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    legal = {array.shape}
    if array.size == 1:
        legal |= {(), (1,)}
    shape = (7, *array.shape) if shape in legal else shape
    values[scale] = np.ones(shape, np.float32).astype(array.dtype)


def other_dtype(values, scale, draw):
    kinds = (np.float64, np.float16, np.int8, np.int32, ml_dtypes.float8_e5m2)
    values[scale] = np.ones(values[scale].shape, draw(st.sampled_from(kinds)))


def not_finite(values, scale, draw):
    array = values[scale] = values[scale].copy()
    at = draw(st.integers(0, array.size - 1))
    array.reshape(-1)[at] = np.nan


def narrower(values, scale, draw):
    codes = EXPERT + ("weight" if EXPERT + "weight" in values else "weight_packed")
    values[codes] = np.ascontiguousarray(values[codes][:, : -draw(st.integers(1, 5))])
    return codes


def no_codes(values, scale, draw):
    codes = EXPERT + ("weight" if EXPERT + "weight" in values else "weight_packed")
    del values[codes]
    return codes


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_malformed_weight_is_refused_in_one_line_that_names_it(least, place_arrays, data):
    layout = data.draw(st.sampled_from(LAYOUTS))
    values, config = least(layout)
    values = dict(values)
    words = [word for key, word in RELEASED_WORDS[layout].items() if key != "codes"]
    scale = EXPERT + data.draw(st.sampled_from(words))
    faults = [no_scale, other_shape, other_dtype, not_finite, narrower, no_codes]
    named = data.draw(st.sampled_from(faults))(values, scale, data.draw) or scale
    directory = place_arrays(values, config)
    dtype = data.draw(st.sampled_from(["stored", "bfloat16"]))
    with pytest.raises(CheckpointError) as caught:
        load_leaves(directory, dtype=dtype)
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["stored", "bfloat16"])
def test_a_nan_scale_stops_a_conversion_and_nothing_is_placed(
    least, place_arrays, tmp_path, layout, dtype
):
    values, config = least(layout)
    word = RELEASED_WORDS[layout]["scale"]
    scale = values[EXPERT + word].copy()
    scale.reshape(-1)[-1] = np.nan
    directory = place_arrays(values | {EXPERT + word: scale}, config)
    told = rf"experts\.1\.down_proj\.{word}: a scale must be finite, got nan"
    with pytest.raises(CheckpointError, match=told):
        convert(directory, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_nvfp4_of_a_width_that_is_no_multiple_of_16_is_refused(tiny, arrays, place_arrays):
    directory = tiny()  # experts of width 40
    values, name = arrays(directory), PREFIX + "layers.1.mlp.experts.1.down_proj.weight"
    coded = encode_nvfp4(np.ones((48, 48)))
    values[name] = coded["codes"][:, :20]
    values |= {name + "_scale": coded["scale"][:, :2], name + "_scale_2": coded["scale_2"]}
    config = json.loads((directory / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"input width 40 is not a multiple of 16"):
        load_leaves(place_arrays(values, config), dtype="bfloat16")
