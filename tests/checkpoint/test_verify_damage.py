"""Any damage at all, drawn at random: it is found, or what is read is right all the same."""

import copy
import json
import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5_jax import CheckpointError, ConfigError
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.export import export
from glm5_jax.checkpoint.reader import open_checkpoint
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.tiny import make_tiny
from glm5_jax.checkpoint.verify import verify

REFUSED = (CheckpointError, ConfigError)
FEW = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
}
drawn = settings(
    max_examples=int(os.environ.get("GLM5_JAX_FUZZ", 25)),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def source(tmp_path_factory, quantizable):
    config = quantizable(**FEW) | {"vision_config": None}
    del config["text_config"]["linear_attn_config"]["kda_layers"]
    del config["text_config"]["linear_attn_config"]["full_attn_layers"]
    return make_tiny(tmp_path_factory.mktemp("damage") / "source", config, quantization="fp8")


@pytest.fixture(scope="module")
def orbax(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("damage") / "orbax"
    convert(source, out)
    return out


BYTES = ["flip", "cut", "add", "double", "other"]
ODD = [None, True, 0, -1, 1, 16, 1.5, 2**31, 2**70, "", "F32", "F8_E4M3", "U8", [], [1, 1], {}]


def damage(draw, raw, others, kinds):
    """Other bytes than those of a file: flipped, cut off, added, doubled, or another file's."""
    kind = draw(st.sampled_from(kinds))
    if kind == "flip" and raw:
        changed = bytearray(raw)
        for _ in range(draw(st.integers(1, 3))):
            changed[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(changed)
    if kind == "cut" and raw:
        return raw[: draw(st.integers(0, len(raw) - 1))]
    if kind == "double" and raw:
        return raw + raw
    if kind == "other":
        return draw(st.sampled_from(others)).read_bytes()
    if kind == "edit":
        size = int.from_bytes(raw[:8], "little")
        if size > len(raw):
            return json.dumps(edited(draw, json.loads(raw))).encode()
        header = json.dumps(edited(draw, json.loads(raw[8 : 8 + size]))).encode()
        return len(header).to_bytes(8, "little") + header + raw[8 + size :]
    return raw + draw(st.binary(min_size=1, max_size=9))


def edited(draw, value):
    """JSON of which a part is gone, is its neighbour's, or is anything at all."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(ODD))
    value = copy.copy(value)
    keys = sorted(value) if isinstance(value, dict) else range(len(value))
    key = draw(st.sampled_from(keys))
    kind = draw(st.sampled_from(["drop", "neighbour", *["deeper"] * 4]))
    if kind == "drop":
        del value[key]
    elif kind == "neighbour":
        value[key] = value[draw(st.sampled_from(keys))]
    else:
        value[key] = edited(draw, value[key])
    return value


@contextmanager
def damaged(data, directory, kinds=BYTES):
    """One file damaged, or gone: its name, whether it is, and whether it is now another one."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()
    changed = None if data.draw(st.integers(0, 9)) == 0 else damage(data.draw, whole, files, kinds)
    try:
        if changed is None:
            file.unlink()
        elif changed != whole:
            file.write_bytes(changed)
        swapped = changed != whole and changed in (f.read_bytes() for f in files if f != file)
        yield file.relative_to(directory).as_posix(), changed != whole, swapped
    finally:
        file.write_bytes(whole)


def tensors(directory):
    checkpoint = open_checkpoint(directory)
    return {
        name: (tensor.dtype, tensor.shape, checkpoint.read(name).tobytes())
        for name, tensor in checkpoint.tensors.items()
    }


def or_refused(call):
    """What a call returns, or None when it refuses in one line."""
    try:
        return call()
    except REFUSED as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return None


@drawn
@given(data=st.data())
def test_damage_to_an_orbax_directory_is_found_and_never_read_as_something_else(
    tmp_path_factory, source, orbax, data
):
    _, expected = load_leaves(source)
    out = tmp_path_factory.getbasetemp() / "exported"
    shutil.rmtree(out, ignore_errors=True)
    with damaged(data, orbax) as (name, changed, swapped):
        report = or_refused(lambda: verify(orbax))
        if report is not None:
            assert report.ok != changed, name
            assert all("\n" not in problem for problem in report.problems)
        loaded = or_refused(lambda: load_leaves(orbax))
        # A whole file in another's place has checksums that are right: `verify` alone tells.
        if loaded is not None and not swapped:
            for path, leaf in loaded[1].items():
                assert np.array_equal(leaf.view(np.uint8), expected[path].view(np.uint8)), path
        if or_refused(lambda: export(orbax, out)) is not None:
            assert tensors(out) == tensors(source)
        else:
            assert not out.exists()


@drawn
@given(data=st.data())
def test_a_damaged_source_is_refused_or_converted_as_it_is(tmp_path_factory, source, data):
    base = tmp_path_factory.getbasetemp() / "damaged"
    shutil.rmtree(base, ignore_errors=True)
    with damaged(data, source, [*BYTES, *["edit"] * 5]):
        report = or_refused(lambda: convert(source, base / "orbax"))
        if report is None:
            assert not (base / "orbax").exists()
            return
        export(base / "orbax", base / "back")
        assert tensors(base / "back") == tensors(source)
        config = (source / "config.json").read_bytes()
        assert (base / "back" / "config.json").read_bytes() == config
        assert json.loads(config)
