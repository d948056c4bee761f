"""Checkpoints in the quantised layouts: bound, loaded, converted, computed from."""

import hashlib
import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

import glm5_jax as glm
from glm5_jax import CheckpointError
from glm5_jax.checkpoint.audit import audit
from glm5_jax.checkpoint.bind import bind, read_array, read_leaf
from glm5_jax.checkpoint.codecs import decode, encode_fp8
from glm5_jax.checkpoint.layouts import RELEASED_WORDS, check_arrays
from glm5_jax.checkpoint.ledger import read_ledger
from glm5_jax.checkpoint.orbax import stored_leaves
from glm5_jax.checkpoint.quantize import is_quantized
from glm5_jax.checkpoint.reader import open_checkpoint
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.verify import verify
from glm5_jax.config import parse_config
from glm5_jax.nn.dsa import expand_latent
from glm5_jax.nn.quantized import QuantizedWeight
from glm5_jax.specs import stored_tensors

BF16, F32, F64 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PREFIX = "model.language_model."
LAYOUTS = tuple(RELEASED_WORDS)
DTYPES = ("bfloat16", "float32", "float64")
FLOAT32 = (".A_log", ".dt_bias", ".router.bias", "_hc.base", "_hc.scale")
BLOCK = (16, 32)


def released(values, layout, name):
    """The stored arrays of a quantised weight, by key; None for a plain one."""
    stem = name.removesuffix("weight")
    found = {key: values.get(stem + word) for key, word in RELEASED_WORDS[layout].items()}
    return None if any(array is None for array in found.values()) else found


def same(one, other):
    assert list(one) == list(other)
    for path, array in one.items():
        assert array.dtype == other[path].dtype and array.shape == other[path].shape, path
        assert array.tobytes() == other[path].tobytes(), path


# What the releases quantise.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_layouts_quantise_what_the_releases_do(facts, config_file, layout):
    names = facts.tensors(layout)
    scale = RELEASED_WORDS[layout]["scale"]
    expected = {name.removesuffix(scale) + "weight" for name in names if name.endswith("." + scale)}
    specs = stored_tensors(parse_config(config_file("glm5_3_flash")))
    assert {spec.name for spec in specs if is_quantized(spec, layout)} == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_made_checkpoint_is_of_its_layout_and_nothing_in_it_is_unknown(quantized, layout):
    report = audit(quantized(layout))
    assert report.complete and report.quantization == layout
    assert report.notices == []
    assert report.by_role["moe_expert"] == 5 * 16 * 3 * len(RELEASED_WORDS[layout])
    assert json.loads((quantized(layout) / "config.json").read_bytes())["quantization_config"]


def test_a_width_that_is_no_multiple_of_16_stays_plain_in_nvfp4(tiny):
    leaves = bind(*opened(tiny(quantization="nvfp4_modelopt")))
    assert leaves["layers.1.ffn.experts.gate_proj"].quantized
    assert not leaves["layers.1.ffn.experts.down_proj"].quantized  # [48, 40]


def opened(directory):
    checkpoint = open_checkpoint(directory)
    return checkpoint, checkpoint.config


def test_transformers_naming_and_unknown_layouts_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="use naming released"):
        glm.make_tiny(tmp_path / "out", naming="native", quantization="fp8")
    with pytest.raises(CheckpointError, match=r"one of none, fp8, nvfp4_modelopt, .* got 'int4'"):
        glm.make_tiny(tmp_path / "out", quantization="int4")
    assert not list(tmp_path.iterdir())


# Binding.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_leaf_is_plain_arrays_that_are_read_whole_or_by_expert(
    quantized, arrays, layout
):
    checkpoint, model = opened(quantized(layout))
    values = arrays(quantized(layout))
    name = PREFIX + "layers.2.mlp.experts.{}.down_proj.weight"
    leaf = bind(checkpoint, model)["layers.2.ffn.experts.down_proj"]
    assert leaf.quantized
    assert [array.path for array in leaf.arrays] == [
        f"layers.2.ffn.experts.down_proj.{key}" for key in RELEASED_WORDS[layout]
    ]
    for array in leaf.arrays:
        experts = [released(values, layout, name.format(e))[array.key] for e in range(16)]
        assert array.shape == (16, *experts[0].shape) and array.dtype == experts[0].dtype
        assert read_array(checkpoint, array).tobytes() == np.stack(experts).tobytes()
        some = read_array(checkpoint, array, [11, 2])
        assert some.tobytes() == np.stack([experts[11], experts[2]]).tobytes()
    whole = read_leaf(checkpoint, leaf, F32)
    for expert in range(16):
        expected = decode(released(values, layout, name.format(expert)), BLOCK, F32)
        assert whole[expert].tobytes() == expected.tobytes()
    assert read_leaf(checkpoint, leaf, F32, [7, 15]).tobytes() == whole[[7, 15]].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_leaf_is_decoded_to_the_dtype_asked_for(quantized, arrays, layout):
    values = arrays(quantized(layout))
    checkpoint, model = opened(quantized(layout))
    bound = bind(checkpoint, model)
    quantised = {path for path, leaf in bound.items() if leaf.quantized}
    assert len(quantised) >= 15
    for dtype in DTYPES:
        _, leaves = load_leaves(quantized(layout), dtype=dtype, mtp=True)
        assert list(leaves) == list(bound)
        for path in quantised:
            names = bound[path].leaf.sources
            expected = [decode(released(values, layout, n), BLOCK, dtype) for n in names]
            expected = np.stack(expected) if bound[path].transform == "stack" else expected[0]
            assert leaves[path].dtype == dtype and leaves[path].tobytes() == expected.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["stored", *DTYPES])
def test_what_must_be_float32_is_so_bit_for_bit_whatever_the_source(
    quantized, arrays, layout, dtype
):
    _, leaves = load_leaves(quantized(layout), dtype=dtype, mtp=True)
    values = arrays(quantized(layout))
    checked = 0
    for path, leaf in bind(*opened(quantized(layout))).items():
        if path.endswith(FLOAT32):
            kept = F64 if dtype == "float64" else F32
            assert leaves[path].dtype == kept
            expected = values[leaf.leaf.sources[0]].astype(kept)
            assert leaves[path].tobytes() == expected.tobytes()
            checked += 1
    assert checked == 5 * 4 + 4 * 2 + 5


# Orbax.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_orbax_tree_holds_the_stored_arrays_and_their_ledger(
    quantized, arrays, converted, layout
):
    directory, values = converted(quantized(layout)), arrays(quantized(layout))
    assert verify(directory).ok
    header, lines = read_ledger(directory)
    assert header.quantization == layout
    stored = stored_leaves(directory)
    checkpoint, model = opened(quantized(layout))
    seen = set()
    for path, leaf in bind(checkpoint, model).items():
        assert (path in stored) == (not leaf.quantized)
        for array in leaf.arrays:
            found, line = stored[array.path], lines[array.path]
            assert (found.shape, found.dtype) == (array.shape, array.dtype)
            assert line.transform == leaf.transform
            assert line.sha256 == hashlib.sha256(read_array(checkpoint, array)).hexdigest()
            for bound, told in zip(array.sources, line.sources, strict=True):
                value = values[told.name]
                assert (told.name, told.dtype) == (
                    bound.tensor.name,
                    checkpoint.tensors[told.name].dtype,
                )
                assert told.shape == value.shape
                assert told.sha256 == hashlib.sha256(value.tobytes()).hexdigest()
                seen.add(told.name)
    assert seen | {n for n in values if n.startswith("model.visual.")} == values.keys()


def test_plain_orbax_restores_plain_dicts(quantized, converted):
    from orbax.checkpoint import v1 as ocp

    tree = ocp.load(converted(quantized("nvfp4_modelopt")))
    leaf = tree["layers"]["2"]["ffn"]["experts"]["up_proj"]
    assert {key: (array.dtype.name, array.shape) for key, array in leaf.items()} == {
        "codes": ("uint8", (16, 48, 24)),
        "scale": ("float8_e4m3fn", (16, 48, 3)),
        "scale_2": ("float32", (16,)),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["stored", *DTYPES])
def test_both_routes_and_either_order_of_casting_give_the_same_bits(
    quantized, converted, layout, dtype
):
    _, direct = load_leaves(quantized(layout), dtype=dtype, mtp=True)
    same(direct, load_leaves(converted(quantized(layout)), dtype=dtype, mtp=True)[1])
    same(direct, load_leaves(converted(quantized(layout), dtype=dtype), mtp=True)[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ledger_of_a_decoded_leaf_names_its_codes_and_scales(
    quantized, arrays, converted, layout
):
    directory, values = converted(quantized(layout), dtype="bfloat16"), arrays(quantized(layout))
    assert verify(directory).ok
    line = read_ledger(directory)[1]["mtp.layer.ffn.experts.gate_proj"]
    assert (line.transform, line.dtype) == ("decode stack", "bfloat16")
    words = RELEASED_WORDS[layout].values()
    expected = [
        f"{PREFIX}layers.5.mlp.experts.{e}.gate_proj.{word}" for e in range(16) for word in words
    ]
    assert [told.name for told in line.sources] == expected
    for told in line.sources:
        assert told.sha256 == hashlib.sha256(values[told.name].tobytes()).hexdigest()
    for name in (name for line in read_ledger(directory)[1].values() for name in line.sources):
        values.pop(name.name)
    assert not values


def test_an_orbax_directory_whose_config_lost_the_block_size_is_refused(
    quantized, converted, tmp_path
):
    shutil.copytree(converted(quantized("fp8")), tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    config = json.loads(file.read_bytes())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    for dtype in ("stored", "bfloat16"):
        with pytest.raises(CheckpointError, match=r"scale: expected .*weight_block_size is not in"):
            load_leaves(tmp_path / "copy", dtype=dtype)


def test_arrays_that_do_not_make_a_weight_are_named():
    codes, scale = ((3, 8, 16), np.dtype(np.uint8)), ((3, 8, 2), E4M3)
    second = ((3,), F32)
    good = {"codes": codes, "scale": scale, "scale_2": second}
    assert not check_arrays("w", (3, 8, 32), good, None, "here")
    for change, told in (
        ({"scale_2": ((2,), F32)}, r"w\.scale_2: expected \[3\] experts, got float32 \[2\]"),
        (
            {"scale": ((3, 8, 1), E4M3)},
            r"w\.scale: expected F8_E4M3 \[8, 2\], got F8_E4M3 \[8, 1\]",
        ),
        ({"codes": ((3, 8, 16), BF16)}, r"w\.codes: expected U8 \[8, 16\], got BF16"),
        ({"global_scale": second}, "expected codes and scale, or with scale_2 or global_scale"),
    ):
        (wrong,) = check_arrays("w", (3, 8, 32), good | change, None, "here")
        assert re.search(told, str(wrong)), str(wrong)


# Computing.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_stays_quantised_has_the_logits_of_the_decoded_one(
    quantized, converted, layout
):
    tokens = np.random.default_rng(0).integers(0, 200, (2, 9))
    stored = glm.load(converted(quantized(layout)))
    assert isinstance(stored.layers[1].ffn.experts.gate_proj, QuantizedWeight)
    logits = np.asarray(stored(tokens))
    expected = np.asarray(glm.load(quantized(layout), dtype="bfloat16")(tokens))
    np.testing.assert_array_equal(logits, expected)
    assert np.isfinite(logits).all() and logits.std() > 1


def test_a_float32_checkpoint_decodes_to_float32_where_it_is_used(tiny, quantizable):
    directory = tiny(config=quantizable(), quantization="fp8", dtype="float32")
    model = glm.load(directory)
    weight = model.layers[1].ffn.experts.up_proj
    assert weight.dtype == np.float32
    _, decoded = load_leaves(directory, dtype="float32")
    np.testing.assert_array_equal(weight[3], decoded["layers.1.ffn.experts.up_proj"][3])


def test_blocks_that_straddle_heads_decode_before_the_heads_are_told_apart(
    tiny, quantizable, arrays, place_arrays
):
    # 16 key rows and 16 value rows a head in blocks of 24: 1⅓ blocks a head.
    block, text = (24, 24), {"qk_nope_head_dim": 16, "qk_head_dim": 16, "v_head_dim": 16}
    made = quantizable(**text) | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}
    }
    values = arrays(tiny(config=made))
    name = PREFIX + "layers.3.self_attn.kv_b_proj.weight"
    coded = encode_fp8(values[name] * np.exp2(np.arange(192) // 16 % 5)[:, None], "block", block)
    values |= {name: coded["codes"], name + "_scale_inv": coded["scale"]}
    directory = place_arrays(values, made)
    full = decode(coded, block, BF16).reshape(6, 32, 26)
    weight = glm.load(directory).layers[3].attn.kv_b_proj
    assert isinstance(weight, QuantizedWeight)
    np.testing.assert_array_equal(np.asarray(weight[...]).reshape(6, 32, 26), full)
    unit = np.eye(26, dtype=BF16)[None]  # of each latent channel
    keys, rest = expand_latent(unit, weight[...], heads=6, nope=16)
    np.testing.assert_array_equal(np.asarray(keys)[0].transpose(1, 2, 0), full[:, :16])
    np.testing.assert_array_equal(np.asarray(rest)[0].transpose(1, 2, 0), full[:, 16:])
