import json
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5_jax.checkpoint.reader import INDEX, MTP_FILE, open_checkpoint
from glm5_jax.errors import CheckpointError

TWO = {"a.weight": ("F32", (2, 3)), "b.weight": ("BF16", (4,))}


def raw_file(path, header, data=b"", length=None):
    """A file with this header (bytes, or what JSON makes of it) and this data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + raw + data)
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path):
    """The one line that opening gives."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Values.


@pytest.mark.parametrize(
    "dtype, raw, expected",
    [
        ("F32", struct.pack("<f", 1.5), np.float32(1.5)),
        ("F64", struct.pack("<d", -2.25), np.float64(-2.25)),
        ("F16", b"\x00\x3e", np.float16(1.5)),
        ("BF16", b"\xc0\x3f", ml_dtypes.bfloat16(1.5)),
        ("I64", struct.pack("<q", -7), np.int64(-7)),
        ("I32", struct.pack("<i", -7), np.int32(-7)),
        ("U8", b"\xf0", np.uint8(240)),
        ("BOOL", b"\x01", np.bool_(True)),
        ("F8_E8M0", b"\x80", ml_dtypes.float8_e8m0fnu(2.0)),
        ("F8_E5M2", b"\x3e", ml_dtypes.float8_e5m2(1.5)),
    ],
)
def test_every_dtype_reads_as_itself(tmp_path, write_shard, dtype, raw, expected):
    write_shard(tmp_path / "model.safetensors", {"x": (dtype, (1,))}, {"x": raw})
    value = open_checkpoint(tmp_path).read("x")
    assert value.dtype == expected.dtype
    assert value[0] == expected


def test_e4m3_bytes_are_always_fn(tmp_path, write_shard):
    # Read as fnuz, 0x7e would be 224 and 0x80 a NaN.
    raw = bytes([0x7E, 0x7F, 0xFF, 0x80, 0x01])
    write_shard(tmp_path / "model.safetensors", {"x": ("F8_E4M3", (5,))}, {"x": raw})
    value = open_checkpoint(tmp_path).read("x").astype(np.float32)
    assert value[0] == 448
    assert np.isnan(value[1:3]).all()
    assert value[3] == 0 and np.signbit(value[3])
    assert value[4] == 2.0**-9


def test_fp4_is_accounted_for_and_not_guessed_at(tmp_path, write_shard):
    write_shard(tmp_path / "model.safetensors", {"x": ("F4", (4,))}, {"x": b"\x21\xf0"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["x"].nbytes == 2
    with pytest.raises(CheckpointError, match="x: F4 has no array form"):
        checkpoint.read("x")


def test_scalars_and_empty_tensors_read(tmp_path, write_shard):
    tensors = {"scalar": ("F32", ()), "empty": ("F32", (0, 3))}
    write_shard(tmp_path / "model.safetensors", tensors, {"scalar": struct.pack("<f", 3)})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("scalar").shape == () and checkpoint.read("scalar") == 3
    assert checkpoint.read("empty").shape == (0, 3)


def test_part_of_a_tensor_is_read_into_place(tmp_path, write_shard):
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_shard(
        tmp_path / "model.safetensors",
        {"pad": ("U8", (3,)), "x": ("F32", (4, 3))},  # the pad makes the data unaligned
        {"pad": b"abc", "x": values.tobytes()},
    )
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.read("x"), values)
    out = np.empty((2, 3), np.float32)
    checkpoint.read_into("x", out, start=3)
    np.testing.assert_array_equal(out, values[1:3])
    with pytest.raises(ValueError, match="too many"):
        checkpoint.read_into("x", out, start=9)
    with pytest.raises(ValueError, match="contiguous float32"):
        checkpoint.read_into("x", out.astype(np.float64))
    with pytest.raises(CheckpointError, match="no tensor named y"):
        checkpoint.read("y")


def test_a_file_that_shrank_after_opening_is_an_error_of_ours(tmp_path, write_shard):
    path = tmp_path / "model.safetensors"
    write_shard(path, {"x": ("F32", (1000,))})
    checkpoint = open_checkpoint(tmp_path)
    with open(path, "r+b") as stream:
        stream.truncate(200)
    with pytest.raises(CheckpointError, match=r"model.safetensors: x"):
        checkpoint.read("x")
    with pytest.raises(CheckpointError, match="the file ends inside it"):
        checkpoint.read_into("x", np.empty(1000, np.float32))


def test_official_package_writes_what_this_reads(tmp_path):
    from safetensors.numpy import save_file

    values = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array(4, np.int64)}
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "np"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


# The index.


def test_index_is_followed_and_a_stray_file_is_not_opened(tmp_path, write):
    write(tmp_path, TWO, shards=2)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file at all")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == TWO.keys()
    assert checkpoint.stray == ("model.safetensors",)
    assert checkpoint.notices == ("model.safetensors is not in the index; not opened",)


def test_all_absent_shards_are_named_at_once(tmp_path, write):
    write(tmp_path, TWO | {"c": ("F32", (1,))}, shards=3)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    line = refusal(tmp_path)
    assert "2 of 3 files that are not there" in line
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in line


def test_mtp_side_file_outside_the_index_is_used_with_a_notice(tmp_path, write, write_shard):
    write(tmp_path, TWO)
    write_shard(tmp_path / MTP_FILE, {"mtp.weight": ("F32", (1,))})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["mtp.weight"].file == MTP_FILE
    assert checkpoint.notices == (f"{MTP_FILE} is not in the index; its 1 tensors are used",)
    assert checkpoint.stray == ()


def test_mapped_mtp_file_that_is_absent_is_named(tmp_path, write):
    write(tmp_path, TWO)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["mtp.weight"] = MTP_FILE
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert MTP_FILE in refusal(tmp_path)


def test_mtp_side_file_that_repeats_indexed_tensors_is_not_used(tmp_path, write, write_shard):
    write(tmp_path, TWO)
    write_shard(tmp_path / MTP_FILE, {"a.weight": ("F32", (1,))})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["a.weight"].shape == (2, 3)
    assert checkpoint.notices == (f"{MTP_FILE} is not used: the index has a.weight elsewhere",)


def test_one_file_without_index_opens_by_directory_or_by_name(tmp_path, write):
    write(tmp_path, TWO, index=False)
    (file,) = tmp_path.glob("*.safetensors")
    assert open_checkpoint(tmp_path).tensors == open_checkpoint(file).tensors


def test_shards_without_index_open_unless_a_tensor_is_in_two(tmp_path, write, write_shard):
    write(tmp_path, TWO, shards=2, index=False)
    assert open_checkpoint(tmp_path).tensors.keys() == TWO.keys()
    write_shard(tmp_path / "extra.safetensors", {"b.weight": ("F32", (1,))})
    line = refusal(tmp_path)
    assert "b.weight is in both extra.safetensors and model-00002-of-00002.safetensors" in line


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda m: m.update({"ghost": m["a.weight"]}), "maps ghost to model-00001-of-00002"),
        (lambda m: m.pop("a.weight"), "lacks a.weight, which model-00001-of-00002"),
        (lambda m: m.update({"a.weight": m["c"]}), "maps a.weight to model-00002-of-00002"),
        (lambda m: m.update({"a.weight": "../a.safetensors"}), "leads out of the directory"),
        (lambda m: m.update({"a.weight": "/tmp/a.safetensors"}), "leads out of the directory"),
        (lambda m: m.update({"a.weight": "x\\..\\a.safetensors"}), "leads out of the directory"),
        (lambda m: m.update({"a.weight": 3}), "'a.weight' must name a file"),
        (lambda m: m.update({"a.weight": "a\nb"}), "'a.weight' must name a file"),
        (lambda m: m.update({"a\nb": "c"}), r"'a\nb' must name a file"),
        (lambda m: m.update({"a.weight": "x" * 300}), "files that are not there"),
        (lambda m: m.update({"a.weight": "."}), "are not there: ."),
        (lambda m: m.clear(), "weight_map must be an object"),
    ],
)
def test_index_that_contradicts_its_shards_is_refused(tmp_path, write, change, says):
    write(tmp_path, TWO | {"c": ("F32", (1,))}, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    change(index["weight_map"])
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert says in refusal(tmp_path)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "not valid JSON"),
        (b"[]", "weight_map must be an object"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "key 'a' occurs twice"),
        (b"\xff{}", "not UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_malformed_index_is_refused(tmp_path, content, says):
    (tmp_path / INDEX).write_bytes(content)
    assert says in refusal(tmp_path)


def test_index_total_that_differs_is_a_notice(tmp_path, write):
    write(tmp_path, TWO)
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"]["total_size"] = 33
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).notices == (f"{INDEX} declares 33 bytes; the shards hold 32",)


def test_a_place_without_weights_says_so(tmp_path):
    assert "no .safetensors file" in refusal(tmp_path)
    assert "no such checkpoint directory" in refusal(tmp_path / "absent")


# Malformed files.

GOOD = entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    "header, data, says",
    [
        ({"x": GOOD}, b"1234567", "truncated"),
        ({"x": GOOD}, b"123456789", "1 trailing bytes"),
        ({"x": GOOD, "y": entry("F32", [1], 4, 8)}, b"12345678", "y: .*overlaps"),
        ({"x": GOOD, "y": entry("F32", [1], 12, 16)}, b"1" * 16, "y: .*leaves a hole"),
        ({"x": entry("F32", [1], 4, 8)}, b"1" * 8, "x: .*leaves a hole"),
        (b'{"x": {"dtype":"U8","shape":[1],"data_offsets":[0,1]},' * 2, b"", "not valid JSON"),
        ({"x": entry("F32", [3], 0, 8)}, b"1" * 8, "x: .*the header lies"),
        ({"x": entry("F32", [2], 8, 0)}, b"1" * 8, "x: .*the header lies"),
        ({"x": entry("F4", [3], 0, 1)}, b"1", "x: .*takes 1.5 bytes"),
        ({"x": entry("F32", [-2, -1], 0, 8)}, b"1" * 8, "x: shape must be a list of non-neg"),
        ({"x": entry("F32", [2.0], 0, 8)}, b"1" * 8, "x: shape must be"),
        ({"x": entry("F32", [True, 2], 0, 8)}, b"1" * 8, "x: shape must be"),
        ({"x": entry("F32", 2, 0, 8)}, b"1" * 8, "x: shape must be"),
        ({"x": entry("F32", [2], 0, 8.0)}, b"1" * 8, "x: data_offsets must be two integers"),
        ({"x": GOOD | {"data_offsets": [0]}}, b"1" * 8, "x: data_offsets must be two integers"),
        ({"x": entry("F8_E4M3FNUZ", [8], 0, 8)}, b"1" * 8, "x: unknown dtype 'F8_E4M3FNUZ'"),
        ({"x": entry(["F32"], [2], 0, 8)}, b"1" * 8, "x: unknown dtype"),
        ({"x": GOOD | {"extra": 1}}, b"1" * 8, "x: header entry must have exactly"),
        ({"x": {"dtype": "F32"}}, b"", "x: header entry must have exactly"),
        ({"x": "F32"}, b"", "x: header entry must have exactly"),
        ({"x\ny": GOOD}, b"1" * 8, "unprintable"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map strings to strings"),
        (b'{"x":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"1", "'shape' occ"),
        (b'{"x":1,"x":2}', b"", "'x' occurs twice"),
        (b'{"x":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"1", "NaN is not JSON"),
        (b"[]", b"", "must be a JSON object"),
        (b"{\xff}", b"", "not UTF-8"),
        (b'{"\\ud800": 1}', b"", "lone surrogate"),
        (b'{"x":' + b"[" * 100_000, b"", "not valid JSON"),
        (b"", b"", "not valid JSON"),
    ],
)
def test_malformed_file_is_refused_in_one_line_that_names_it(tmp_path, header, data, says):
    path = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=f"^{path}: .*{says}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "empty file"),
        (b"1234567", "truncated: only 7 bytes"),
        (struct.pack("<Q", 2**40) + b"{}", "header of 1099511627776 bytes is above the limit"),
        (struct.pack("<Q", 3) + b"{}", "truncated: a header of 3 bytes in a file of 10"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "Git LFS pointer / incomplete download",
        ),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content, says):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    line = refusal(tmp_path)
    assert line.startswith(f"{path}: ") and says in line


def test_order_in_the_header_needs_not_be_that_of_the_data(tmp_path):
    header = {"late": entry("U8", [2], 1, 3), "early": entry("U8", [1], 0, 1)}
    raw_file(tmp_path / "model.safetensors", header, b"abc")
    checkpoint = open_checkpoint(tmp_path)
    assert bytes(checkpoint.read("early")) == b"a"
    assert bytes(checkpoint.read("late")) == b"bc"


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_refused_or_read_consistently(tmp_path, write_shard, flips):
    path = tmp_path / "model.safetensors"
    write_shard(path, TWO | {"c": ("U8", ())}, {"a.weight": bytes(range(24))})
    content = bytearray(path.read_bytes())
    for position, value in flips:
        content[position % len(content)] = value
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(tmp_path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    end = 8 + int.from_bytes(content[:8], "little")
    for tensor in sorted(checkpoint.tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        assert tensor.offset == end
        end += tensor.nbytes
        value = checkpoint.read(tensor.name)
        assert value.shape == tensor.shape
        assert value.tobytes() == bytes(content[tensor.offset : tensor.offset + tensor.nbytes])
    assert end == len(content)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(tmp_path_factory, content):
    directory = tmp_path_factory.getbasetemp() / "noise"
    directory.mkdir(exist_ok=True)
    for body in (content, struct.pack("<Q", len(content)) + content):
        (directory / "model.safetensors").write_bytes(body)
        try:
            assert sum(t.nbytes for t in open_checkpoint(directory).tensors.values()) < len(body)
        except CheckpointError as error:
            assert "model.safetensors" in str(error)
