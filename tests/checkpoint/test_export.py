"""export: what comes back is what was converted, tensor for tensor, or one clear line."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import glm5_jax as glm
from glm5_jax import CheckpointError
from glm5_jax.checkpoint import export as exporting
from glm5_jax.checkpoint.audit import audit
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.export import export
from glm5_jax.checkpoint.ledger import LEDGER
from glm5_jax.checkpoint.manifest import write_manifest
from glm5_jax.checkpoint.match import ACTIVATION_REASON
from glm5_jax.checkpoint.reader import open_checkpoint
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.verify import verify
from glm5_jax.checkpoint.writer import parse_size

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "model.language_model."
CODES = {"bfloat16": "BF16", "float32": "F32"}
QUANTIZED = ("fp8", "nvfp4_modelopt", "nvfp4_compressed_tensors")
LAYOUTS = ("bf16", *QUANTIZED, "hf_saved", "hf_native")


def read(directory):
    """{name: (dtype, shape, bytes)}"""
    checkpoint = open_checkpoint(directory)
    return {
        name: (tensor.dtype, tensor.shape, checkpoint.read(name).tobytes())
        for name, tensor in checkpoint.tensors.items()
    }


def assert_same(one, other):
    one, other = read(one), read(other)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


def rewrite(directory, arrays, like, write):
    """A directory of these arrays with another directory's config."""
    tensors = {name: (CODES[array.dtype.name], array.shape) for name, array in arrays.items()}
    data = {name: array.tobytes() for name, array in arrays.items()}
    config = json.loads((like / "config.json").read_bytes())
    return write(directory, tensors, config, data=data, shards=2)


@pytest.fixture(scope="module")
def source(tiny, stored, write, tmp_path_factory):
    """Layout → a small checkpoint stored in it."""
    made = {}

    def make(layout):
        if layout in QUANTIZED:
            return tiny(quantization=layout, shards=3)
        if layout == "bf16":
            return tiny(shards=3)
        if layout not in made:
            # transformers writes no MTP layer, and router and convolution in float32.
            like = tiny(naming="native" if layout == "hf_native" else "released")
            arrays = {
                name: array.astype(np.float32) if widened(name) else array
                for name, array in stored(like).items()
                if ".layers.5." not in name
            }
            directory = tmp_path_factory.mktemp(layout) / "source"
            made[layout] = rewrite(directory, arrays, like, write)
        return made[layout]

    return make


def widened(name):
    return name.endswith(("conv1d.weight", "mlp.gate.weight")) and "visual" not in name


# Round trips.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_every_tensor_is_as_it_was(tmp_path, source, converted, layout):
    report = export(converted(source(layout)), tmp_path / "out", shard_bytes=200_000)
    assert_same(source(layout), tmp_path / "out")
    config = (source(layout) / "config.json").read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == config
    found = audit(tmp_path / "out")
    assert found.complete and found.total == report.tensors and found.bytes == report.bytes
    assert found.files == report.files > 3
    assert found.notices == audit(source(layout)).notices


def test_transformers_names_of_released_ones_and_back(tmp_path, tiny, converted):
    export(converted(), tmp_path / "native", naming="native")
    assert_same(tmp_path / "native", tiny(naming="native"))
    export(converted(tiny(naming="native")), tmp_path / "released", naming="released")
    assert_same(tmp_path / "released", tiny())


def test_names_under_the_short_prefix_come_back_so(tmp_path, tiny, stored, write):
    arrays = {name.replace(PREFIX, "model.", 1): array for name, array in stored(tiny()).items()}
    directory = rewrite(tmp_path / "short", arrays, tiny(), write)
    convert(directory, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "out")
    assert_same(directory, tmp_path / "out")


def test_tensors_that_a_leaf_joins_come_back_in_their_own_dtypes(tmp_path, tiny, stored, write):
    arrays = stored(tiny())
    for name in ("self_attn.q_conv1d.weight", "mlp.gate_proj.weight", "input_layernorm.weight"):
        arrays[f"{PREFIX}layers.0.{name}"] = arrays[f"{PREFIX}layers.0.{name}"].astype(np.float32)
    directory = rewrite(tmp_path / "mixed", arrays, tiny(), write)
    convert(directory, tmp_path / "orbax")
    assert load_leaves(tmp_path / "orbax")[1]["layers.0.attn.conv"].dtype == np.float32
    export(tmp_path / "orbax", tmp_path / "out")
    assert_same(directory, tmp_path / "out")


def test_packed_scales_of_activations_come_back_one_by_one(tmp_path, tiny, stored, write):
    arrays = stored(tiny())
    for index, shape in enumerate([(), (1,), (3, 2), (0, 4)]):
        scale = np.random.default_rng(index).random(shape, np.float32)
        arrays[f"{PREFIX}layers.{index}.mlp.down_proj.input_scale"] = scale
    names = [name for name in arrays if name.endswith("input_scale")]
    # Those of layers without that matrix hang on one that they have.
    for name in names[1:]:
        arrays[name.replace("mlp.down_proj", "self_attn.o_proj")] = arrays.pop(name)
    directory = rewrite(tmp_path / "scales", arrays, tiny(), write)
    assert len(audit(directory).ignored[ACTIVATION_REASON]) == 4
    convert(directory, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "out")
    assert_same(directory, tmp_path / "out")
    # They have no meaning beside weights that are no longer what they were measured for.
    report = export(tmp_path / "orbax", tmp_path / "wide", dtype="float32")
    assert len(report.left_out[ACTIVATION_REASON]) == 4
    assert not [name for name in read(tmp_path / "wide") if name.endswith("input_scale")]


def test_tokenizers_and_the_like_go_there_and_back(tmp_path, tiny):
    source = tmp_path / "source"
    shutil.copytree(tiny(), source)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "README.md"):
        (source / name).write_text(f"text of {name}")
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "out")
    for directory in (tmp_path / "orbax", tmp_path / "out"):
        for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
            assert (directory / name).read_text() == f"text of {name}"
        assert not (directory / "README.md").exists()
    (tmp_path / "orbax" / "tokenizer.json").write_text("another")
    assert verify(tmp_path / "orbax").problems[0].startswith("tokenizer.json: has 7 bytes")


def test_a_part_comes_back_in_part(tmp_path, tiny):
    convert(tiny(), tmp_path / "orbax", layers="3,5")
    export(tmp_path / "orbax", tmp_path / "out")
    whole, part = read(tiny()), read(tmp_path / "out")
    assert part == {name: tensor for name, tensor in whole.items() if name in part}
    kept = (".layers.3.", ".layers.5.")
    assert part.keys() == {
        name for name in whole if ".layers." not in name or any(layer in name for layer in kept)
    }


def test_arrays_of_many_pieces_come_back(tmp_path, source, monkeypatch):
    from glm5_jax.checkpoint import items

    monkeypatch.setattr(items, "PIECE_BYTES", 1000)
    monkeypatch.setattr(items, "EXPERT_BYTES", 1000)
    monkeypatch.setattr(exporting, "PIECE_BYTES", 5000)
    for layout in ("fp8", "hf_native"):
        out = tmp_path / layout
        convert(source(layout), out / "orbax")
        export(out / "orbax", out / "back")
        assert_same(source(layout), out / "back")
        export(out / "orbax", out / "decoded", dtype="bfloat16")
        _, expected = load_leaves(source(layout), "bfloat16")
        _, found = load_leaves(out / "decoded")
        assert all(found[path].tobytes() == expected[path].tobytes() for path in expected)


# Other dtypes.


@pytest.mark.parametrize("layout", QUANTIZED)
@pytest.mark.parametrize("naming", ["released", "native"])
def test_a_quantised_source_is_decoded_to_bfloat16(tmp_path, source, converted, layout, naming):
    export(converted(source(layout)), tmp_path / "out", dtype="bfloat16", naming=naming)
    found = audit(tmp_path / "out")
    assert found.complete and (found.naming, found.quantization) == (naming, "none")
    assert not [notice for notice in found.notices if "quantised" in notice]
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    _, decoded = load_leaves(source(layout), "bfloat16", mtp=True)
    _, leaves = load_leaves(tmp_path / "out", mtp=True)
    assert list(leaves) == list(decoded)
    assert all(leaves[path].tobytes() == decoded[path].tobytes() for path in leaves)
    # The same as decoding first and exporting what is stored then.
    convert(source(layout), tmp_path / "orbax", dtype="bfloat16")
    export(tmp_path / "orbax", tmp_path / "other", naming=naming)
    assert_same(tmp_path / "out", tmp_path / "other")


def test_dtypes_are_those_of_the_leaves(tmp_path, tiny, converted):
    export(converted(), tmp_path / "out", dtype="float32")
    config = glm.load_config(tmp_path / "out")
    assert config == replace(glm.load_config(tiny()), dtype="float32")
    _, leaves = load_leaves(tmp_path / "out", mtp=True)
    _, expected = load_leaves(tiny(), "float32", mtp=True)
    assert all(np.array_equal(leaves[path], expected[path]) for path in expected)
    assert {leaf.dtype for leaf in leaves.values()} == {np.dtype(np.float32)}
    convert(tmp_path / "out", tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "back", dtype="bfloat16")
    assert_same(tmp_path / "back", rewidened(tmp_path, tiny()))


def rewidened(tmp_path, directory):
    """A conversion to bfloat16 keeps router and convolution as they are stored: in float32."""
    from safetensors.numpy import save_file

    out = tmp_path / "expected"
    shutil.copytree(directory, out)
    checkpoint = open_checkpoint(directory)
    arrays = {name: checkpoint.read(name) for name in checkpoint.tensors}
    arrays = {n: a.astype(np.float32) if widened(n) else np.array(a) for n, a in arrays.items()}
    save_file(arrays, out / "model.safetensors")
    return out


# Refusals.


def test_quantised_experts_have_no_form_under_transformers_names(tmp_path, source, converted):
    with pytest.raises(CheckpointError, match=r"experts\.gate_proj\.codes: .*released.*bfloat16"):
        export(converted(source("fp8")), tmp_path / "out", naming="native")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"naming": "mine"}, "naming: .*'mine'"),
        ({"dtype": "int8"}, "dtype: .*'int8'"),
        ({"shard_bytes": 0}, "shard_bytes: .* 0"),
    ],
)
def test_senseless_arguments_are_one_line(tmp_path, converted, arguments, named):
    with pytest.raises(CheckpointError, match=named):
        export(converted(), tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_destinations_in_the_way_are_refused(tmp_path, converted, tiny):
    with pytest.raises(CheckpointError, match="exists already"):
        export(converted(), tiny())
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        export(converted(), tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        export(converted(), tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match="inside the source"):
        export(converted(), converted() / "out")
    (tmp_path / "empty").mkdir()
    export(converted(), tmp_path / "empty")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "file"]


def test_damage_is_named_and_nothing_is_written(tmp_path, converted):
    copy = tmp_path / "copy"
    shutil.copytree(converted(), copy)
    lines = (copy / LEDGER).read_text().splitlines(keepends=True)
    other = lines[3].replace('"sha256":"', '"sha256":"0', 1)
    changes = {
        "bytes are not those": [*lines[:3], other, *lines[4:]],
        "ledger has 210 arrays, 211": [*lines[:3], *lines[4:]],
        "expected bfloat16": [*lines[:3], lines[3].replace("[", "[2,", 1), *lines[4:]],
    }
    for named, changed in changes.items():
        (copy / LEDGER).write_text("".join(changed))
        write_manifest(copy)
        with pytest.raises(CheckpointError, match=named):
            export(copy, tmp_path / "out")
        assert list(tmp_path.iterdir()) == [copy]
    (copy / LEDGER).write_text("".join(lines))
    write_manifest(copy)
    (copy / LEDGER).write_text("".join(lines).replace("k_proj", "q_proj", 1))
    with pytest.raises(CheckpointError, match=r"ledger\.jsonl: its bytes are not those"):
        export(copy, tmp_path / "out")
    (copy / LEDGER).write_text("".join(lines))
    file = max(copy.glob("state/ocdbt.process_*/d/*"), key=lambda path: path.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="DATA_LOSS"):
        export(copy, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [copy]


def test_an_orbax_directory_of_another_config_is_refused(tmp_path, converted, config_file):
    copy = tmp_path / "copy"
    shutil.copytree(converted(), copy)
    config = config_file("tiny")
    config["text_config"]["vocab_size"] += 1
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"embed_tokens: \d+ of its \d+ elements"):
        export(copy, tmp_path / "out")


# Whole or not at all.


def test_a_failed_write_is_one_line_and_leaves_nothing(tmp_path, converted, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"out: cannot be written: No space left") as caught:
        export(converted(), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_killed_it_leaves_no_destination_and_a_rerun_starts_over(tmp_path, tiny, converted):
    code = (
        "import os, signal, sys; from glm5_jax.checkpoint.export import export;"
        "export(sys.argv[1], sys.argv[2], progress=lambda done, total, path:"
        " done > total / 2 and os.kill(os.getpid(), signal.SIGKILL))"
    )
    command = [sys.executable, "-c", code, str(converted()), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name == "out.writing"
    export(converted(), tmp_path / "out")
    assert_same(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_two_exports_do_not_write_one_destination(tmp_path, converted):
    tried = []

    def again(done, total, path):
        if tried:
            return
        tried.append(path)
        with pytest.raises(CheckpointError, match="another process is writing it"):
            export(converted(), tmp_path / "out")

    export(converted(), tmp_path / "out", progress=again)
    assert tried


def test_progress_counts_up_to_all_the_bytes(tmp_path, converted):
    calls = []
    export(converted(), tmp_path / "out", progress=lambda *call: calls.append(call))
    counts = [done for done, _, _ in calls]
    assert counts == sorted(counts)
    assert calls[-1][0] == calls[-1][1]


def test_sizes_are_read_as_they_are_written():
    assert [parse_size(x) for x in ("5GB", "500 MB", "7", "1kb", "2TB")] == [
        5 * 10**9, 5 * 10**8, 7, 1000, 2 * 10**12,
    ]  # fmt: skip
    for text in ("", "GB", "0", "-1", "1.5GB", "5GiB", "5B"):
        with pytest.raises(CheckpointError, match="size: expected"):
            parse_size(text)


def test_exported_files_are_read_by_the_safetensors_package(tmp_path, converted, tiny, stored):
    export(converted(), tmp_path / "out", shard_bytes=100_000)
    found, expected = stored(tmp_path / "out"), stored(tiny())
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == ml_dtypes.bfloat16 or "F32" for name in found)
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 10
