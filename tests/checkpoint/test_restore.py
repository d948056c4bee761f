"""load_leaves: the same leaves from an Orbax directory and from safetensors, or one clear line."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from glm5_jax import CheckpointError, ConfigError
from glm5_jax.checkpoint import restore
from glm5_jax.checkpoint.orbax import stored_leaves
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.specs import leaves


def assert_same(one, other):
    assert list(one) == list(other)
    for path in one:
        assert one[path].dtype == other[path].dtype, path
        assert one[path].tobytes() == other[path].tobytes(), path


@pytest.mark.parametrize("dtype", ["stored", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_both_routes_give_the_same_bits_in_every_dtype(tiny, converted, source, dtype):
    directory = tiny(dtype=source)
    one, direct = load_leaves(directory, dtype=dtype, mtp=True)
    other, restored = load_leaves(converted(directory), dtype=dtype, mtp=True)
    assert one == other
    assert_same(direct, restored)


def test_casting_before_and_casting_after_conversion_are_the_same(tiny, converted):
    _, before = load_leaves(converted(tiny(dtype="float32"), dtype="bfloat16"))
    _, after = load_leaves(converted(tiny(dtype="float32")), dtype="bfloat16")
    assert_same(before, after)


def test_leaves_are_those_of_the_spec_table_in_its_order(tiny, converted):
    for directory in (tiny(), converted()):
        for mtp in (False, True):
            config, found = load_leaves(directory, mtp=mtp)
            expected = leaves(config, mtp=mtp)
            assert list(found) == list(expected)
            assert all(found[path].shape == expected[path].shape for path in expected)


def test_bfloat16_leaves_float32_what_must_be_and_router_and_conv_as_stored(tiny):
    for source, kept in (("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
        _, found = load_leaves(tiny(dtype=source), dtype="bfloat16")
        for path, leaf in found.items():
            if path.endswith(("A_log", "dt_bias", "router.bias", "_hc.base", "_hc.scale")):
                assert leaf.dtype == np.float32
            elif path.endswith(("router.weight", ".conv")):
                assert leaf.dtype == kept
            else:
                assert leaf.dtype == ml_dtypes.bfloat16


def test_the_text_model_is_restored_without_reading_anything_else(converted, monkeypatch):
    read = []
    original = restore.fill_array

    def watched(directory, wanted, *others):
        read.append(wanted)
        return original(directory, wanted, *others)

    monkeypatch.setattr(restore, "fill_array", watched)
    _, found = load_leaves(converted())
    assert sorted(read) == sorted(found)
    assert not [path for path in read if path.startswith(("mtp.", "passthrough/"))]
    assert len(stored_leaves(converted())) > len(read)


def test_plain_orbax_restores_a_part_by_partial_load(converted, tiny):
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        tree = ocp.metadata(converted()).metadata
        part = ocp.load(converted(), {"layers": {"3": tree["layers"]["3"]}})
    assert part.keys() == {"layers"}
    _, found = load_leaves(tiny())
    assert np.array_equal(
        part["layers"]["3"]["attn"]["kv_b_proj"], found["layers.3.attn.kv_b_proj"]
    )


def test_mtp_that_is_not_there_is_said_to_be_not_there(tmp_path, tiny, converted, small, write):
    without = converted(mtp=False)
    config = json.loads((tiny() / "config.json").read_bytes())
    source = write(tmp_path / "source", small(mtp=False), config)
    for directory in (without, source):
        load_leaves(directory)
        with pytest.raises(CheckpointError, match=r"MTP layer .* is not in this checkpoint"):
            load_leaves(directory, mtp=True)


def test_mtp_is_found_by_what_is_stored_though_the_config_is_silent(tmp_path, tiny):
    from glm5_jax.checkpoint.convert import convert

    source = tmp_path / "source"
    shutil.copytree(tiny(), source)
    edit_config(source, num_nextn_predict_layers=0)
    convert(source, tmp_path / "out")
    _, direct = load_leaves(source, mtp=True)
    _, restored = load_leaves(tmp_path / "out", mtp=True)
    assert "mtp.eh_proj" in direct
    assert_same(direct, restored)


def edit_config(directory, **text):
    config = json.loads((directory / "config.json").read_bytes())
    config["text_config"] |= text
    (directory / "config.json").write_text(json.dumps(config))


def test_float64_without_64_bit_jax_says_how_to_enable_it(tiny):
    assert jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(CheckpointError, match=r'jax\.config\.update\("jax_enable_x64", True\)'):
            load_leaves(tiny(), dtype="float64")
    finally:
        jax.config.update("jax_enable_x64", True)


def test_an_unknown_dtype_is_refused_with_those_that_there_are(tiny):
    with pytest.raises(CheckpointError, match="stored, bfloat16, float32, float64, got 'float16'"):
        load_leaves(tiny(), dtype="float16")


def test_a_path_that_is_no_checkpoint_is_refused_in_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load_leaves(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither an Orbax directory"):
        load_leaves(tmp_path)


@pytest.fixture
def copy(tmp_path, converted):
    shutil.copytree(converted(), tmp_path / "copy")
    return tmp_path / "copy"


def test_a_copied_directory_restores(copy, converted):
    (copy / "notes.txt").write_text("mine")
    assert_same(load_leaves(copy)[1], load_leaves(converted())[1])


def test_an_orbax_directory_without_its_config_says_so(copy):
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_leaves(copy)


def test_a_config_of_another_shape_names_the_leaf(copy):
    edit_config(copy, intermediate_size=73)
    with pytest.raises(
        CheckpointError,
        match=r"layers\.0\.ffn\.gate_proj: config\.json makes it \[73, 48\], .* has \[72, 48\]",
    ):
        load_leaves(copy)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own loop
@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA"])
def test_a_damaged_directory_is_refused_in_one_line(copy, name):
    file = copy / "state" / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    file.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        load_leaves(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)
