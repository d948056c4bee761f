"""convert: what lands in the Orbax directory, and what lands there when something goes wrong."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from glm5_jax import CheckpointError, load_config
from glm5_jax.checkpoint import items
from glm5_jax.checkpoint.audit import audit
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.database import open_array, pieces_of
from glm5_jax.checkpoint.export import export
from glm5_jax.checkpoint.ledger import LEDGER, read_ledger
from glm5_jax.checkpoint.manifest import write_manifest
from glm5_jax.checkpoint.match import MTP_REASON
from glm5_jax.checkpoint.orbax import stored_leaves
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.verify import verify

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "orbax_tree.json"
PREFIX = "model.language_model."
FLOAT32 = (".A_log", ".dt_bias", ".router.bias", "_hc.base", "_hc.scale")
KEPT = (".router.weight", ".conv")

PLAIN_ORBAX = """
import hashlib, json, sys
try:
    import glm5_jax
except ImportError:
    pass
else:
    sys.exit("glm5_jax can be imported here")
from orbax.checkpoint import v1 as ocp
found = {}
def walk(node, keys):
    if type(node) is dict:
        for key, value in node.items():
            walk(value, (*keys, key))
    else:
        digest = hashlib.sha256(node.tobytes()).hexdigest()
        found["|".join(keys)] = [type(node).__name__, str(node.dtype), list(node.shape), digest]
walk(ocp.load(sys.argv[1]), ())
print(json.dumps(found))
"""


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def leaf_hashes(directory):
    return {path: line.sha256 for path, line in read_ledger(directory)[1].items()}


@pytest.fixture(scope="module")
def plain(converted, tmp_path_factory):
    """What a process that has Orbax and not us restores: keys → type, dtype, shape, SHA-256."""
    return restore_plainly(converted(), tmp_path_factory.mktemp("away"))


def restore_plainly(directory, away):
    # -I and another directory keep the checkout out; the import hook keeps an installed one out.
    hook = "import sys; sys.modules['glm5_jax'] = None\n"
    command = [sys.executable, "-I", "-c", hook + PLAIN_ORBAX, str(directory)]
    done = subprocess.run(command, cwd=away, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plain_orbax_restores_the_golden_key_tree(plain):
    found = {keys: f"{dtype} {shape}" for keys, (_, dtype, shape, _) in plain.items()}
    assert {kind for kind, *_ in plain.values()} == {"ndarray"}
    assert found == json.loads(GOLDEN.read_text())


def test_plain_orbax_restores_the_bytes_of_the_safetensors_files(plain, tiny, stored):
    tensors = stored(tiny())
    layer = PREFIX + "layers.{}."

    def expect(keys, array):
        _, dtype, shape, sha256 = plain[keys]
        assert (dtype, shape, sha256) == (str(array.dtype), list(array.shape), digest(array)), keys

    expect("embed_tokens", tensors[PREFIX + "embed_tokens.weight"])
    expect("lm_head", tensors["lm_head.weight"])
    expect("layers|0|ffn|down_proj", tensors[layer.format(0) + "mlp.down_proj.weight"])
    expect(
        "layers|3|attn|indexer|ape",
        tensors[layer.format(3) + "self_attn.indexer.index_kpool_compress_ape"],
    )
    expect("layers|4|attn_hc|base", tensors[layer.format(4) + "hc_attn_base"])
    expect("mtp|eh_proj", tensors[layer.format(5) + "eh_proj.weight"])
    expect("mtp|layer|attn|kv_b_proj", tensors[layer.format(5) + "self_attn.kv_b_proj.weight"])
    for index in (0, 1, 2, 4):
        parts = [tensors[layer.format(index) + f"self_attn.{x}_conv1d.weight"] for x in "qkv"]
        expect(f"layers|{index}|attn|conv", np.concatenate(parts)[:, 0, :])
    for name in ("gate_proj", "up_proj", "down_proj"):
        for index, keys in ((2, "layers|2|ffn"), (5, "mtp|layer|ffn")):
            one = layer.format(index) + "mlp.experts.{}." + f"{name}.weight"
            expect(f"{keys}|experts|{name}", np.stack([tensors[one.format(e)] for e in range(16)]))
    vision = {name: array for name, array in tensors.items() if name.startswith("model.visual.")}
    assert len(vision) == 39
    for name, array in vision.items():
        expect(f"passthrough|{name}", array)


def test_plain_orbax_restores_arrays_of_many_chunks(tmp_path, tiny, plain, monkeypatch):
    monkeypatch.setattr(items, "PIECE_BYTES", 1000)
    monkeypatch.setattr(items, "EXPERT_BYTES", 1000)
    convert(tiny(), tmp_path / "out")
    array = open_array(tmp_path / "out", "layers.1.ffn.experts.up_proj").result()
    assert array.chunk_layout.read_chunk.shape == (1, 40, 48)
    assert len(pieces_of(open_array(tmp_path / "out", "embed_tokens").result())) == 23
    assert restore_plainly(tmp_path / "out", tmp_path) == plain
    (_, expected), (_, found) = load_leaves(tiny()), load_leaves(tmp_path / "out")
    assert all(found[path].tobytes() == expected[path].tobytes() for path in expected)


@pytest.mark.parametrize(
    "arguments", [{"naming": "native"}, {"shards": 4}, {"naming": "native", "shards": 3}]
)
def test_both_namings_one_file_or_many_become_the_same_leaves(converted, tiny, arguments):
    assert leaf_hashes(converted(tiny(**arguments))) == leaf_hashes(converted())


def test_ledger_names_every_source_with_its_hash_and_an_untransformed_leaf_hashes_like_it(
    converted, tiny, stored
):
    tensors, (header, lines) = stored(tiny(shards=4)), read_ledger(converted(tiny(shards=4)))
    index = json.loads((tiny(shards=4) / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert (header.naming, header.quantization, header.dtype) == ("released", "none", "stored")
    assert (header.layers, header.mtp, header.leaves) == (None, True, len(lines))
    named = []
    for line in lines.values():
        for source in line.sources:
            named.append(source.name)
            assert source.sha256 == digest(tensors[source.name])
            assert source.shape == tensors[source.name].shape
            assert source.file == index[source.name]
        if line.transform in ("copy", "passthrough"):
            assert line.sha256 == line.sources[0].sha256
    assert sorted(named) == sorted(tensors)
    assert {line.transform for line in lines.values()} == {"copy", "concat", "stack", "passthrough"}


def test_ledger_of_a_fused_source_tells_which_rows_of_it_were_hashed(converted, tiny, stored):
    tensors, lines = stored(tiny(naming="native")), read_ledger(converted(tiny(naming="native")))[1]
    for name, rows in (("gate_proj", (0, 40)), ("up_proj", (40, 80))):
        line = lines[f"layers.1.ffn.experts.{name}"]
        (source,) = line.sources
        assert source.name == PREFIX + "layers.1.mlp.experts.gate_up_proj"
        assert source.rows == rows
        assert source.sha256 == digest(tensors[source.name][:, slice(*rows)]) == line.sha256


def test_config_is_carried_byte_for_byte(converted, tiny):
    assert (converted() / "config.json").read_bytes() == (tiny() / "config.json").read_bytes()


# Dtypes.


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_bfloat16_keeps_the_bits_of_what_must_be_float32_and_of_router_and_conv(
    converted, tiny, source
):
    _, before = load_leaves(tiny(dtype=source), mtp=True)
    _, after = load_leaves(converted(tiny(dtype=source), dtype="bfloat16"), mtp=True)
    assert before.keys() == after.keys()
    for path, leaf in after.items():
        if path.endswith(FLOAT32 + KEPT):
            assert leaf.dtype == (np.float32 if path.endswith(FLOAT32) else before[path].dtype)
            assert leaf.tobytes() == before[path].tobytes(), path
        else:
            assert leaf.dtype == ml_dtypes.bfloat16
            assert np.array_equal(leaf, before[path].astype(ml_dtypes.bfloat16)), path


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_widening_is_exact_and_reaches_every_leaf_but_what_is_carried(converted, tiny, dtype):
    _, before = load_leaves(tiny(), mtp=True)
    directory = converted(dtype=dtype)
    for path, leaf in stored_leaves(directory).items():
        assert leaf.dtype == (ml_dtypes.bfloat16 if path.startswith("passthrough/") else dtype)
    _, after = load_leaves(directory, mtp=True)
    assert all(np.array_equal(after[path], before[path].astype(dtype)) for path in before)
    line = read_ledger(directory)[1]["layers.0.attn.q_proj"]
    assert line.dtype == dtype
    assert line.sha256 != line.sources[0].sha256


def test_rounded_float32_parameters_are_refused_unless_allowed(tmp_path, tiny, stored, write):
    tensors = stored(tiny())
    name = PREFIX + "layers.0.self_attn.A_log"
    tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    source = rewrite(tmp_path / "rounded", tensors, tiny(), write)
    with pytest.raises(CheckpointError, match=r"A_log.*allow_bf16"):
        convert(source, tmp_path / "out")
    report = convert(source, tmp_path / "out", allow_bf16=True)
    assert report.audit.accepted_bf16 == [name]
    _, kept = load_leaves(tmp_path / "out")
    assert kept["layers.0.attn.A_log"].dtype == ml_dtypes.bfloat16


def rewrite(directory, arrays, like, write):
    """A directory of these arrays with another directory's config."""
    codes = {"bfloat16": "BF16", "float32": "F32"}
    tensors = {name: (codes[array.dtype.name], array.shape) for name, array in arrays.items()}
    data = {name: array.tobytes() for name, array in arrays.items()}
    config = json.loads((like / "config.json").read_bytes())
    return write(directory, tensors, config, data=data)


# What is carried, and what stays behind.


def test_a_declined_mtp_layer_stays_behind_and_is_counted(tmp_path, tiny):
    report = convert(tiny(), tmp_path / "out", mtp=False)
    assert not [path for path in stored_leaves(tmp_path / "out") if path.startswith("mtp.")]
    (names,) = report.not_carried.values()
    assert report.not_carried.keys() == {MTP_REASON}
    assert len(names) == report.audit.counts["mtp"]
    assert all(name.startswith(PREFIX + "layers.5.") for name in names)
    assert not read_ledger(tmp_path / "out")[0].mtp


def test_a_part_holds_its_layers_and_what_lies_outside_the_layers(tmp_path, tiny):
    convert(tiny(), tmp_path / "out", layers="3-4")
    found = {path.split("/")[0] for path in stored_leaves(tmp_path / "out")}
    tops = {".".join(path.split(".")[:2]) for path in found if path.startswith("layers")}
    assert tops == {"layers.3", "layers.4"}
    assert {"embed_tokens", "norm", "lm_head"} <= found
    assert verify(tmp_path / "out").ok
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn_norm; only layers 3, 4 were conv"):
        load_leaves(tmp_path / "out")


def test_scales_of_activations_are_packed_by_kind_and_the_ledger_tells_them_apart(
    tmp_path, tiny, stored, write
):
    tensors = stored(tiny())
    one, empty, last = (PREFIX + f"layers.0.self_attn.{x}_proj.input_scale" for x in "qko")
    other = PREFIX + "layers.0.self_attn.k_proj.k_scale"
    tensors |= {
        one: np.array(7.0, np.float32),
        empty: np.empty((0, 3), np.float32),
        last: np.array([[8.0], [9.0]], np.float32),
        other: np.empty((0,), ml_dtypes.bfloat16),
    }
    convert(rewrite(tmp_path / "source", tensors, tiny(), write), tmp_path / "out")
    (pack,) = (path for path in stored_leaves(tmp_path / "out") if "scale" in path and "/" in path)
    assert pack == "passthrough/packed.input_scale.F32"
    _, lines = read_ledger(tmp_path / "out")
    listed = [(source.name, source.shape, source.sha256) for source in lines[pack].sources]
    assert listed == [
        (name, tensors[name].shape, digest(tensors[name])) for name in (one, empty, last)
    ]
    assert (lines[pack].transform, lines[pack].shape) == ("pack", (3,))
    assert lines[pack].sha256 == digest(np.array([7.0, 8.0, 9.0], np.float32))
    # An array without elements is in the ledger alone.
    assert lines["passthrough/packed.k_scale.BF16"].shape == (0,)
    assert verify(tmp_path / "out").ok


def test_one_layer_may_be_a_number(tmp_path, tiny):
    assert audit(tiny(), layers=3).complete
    convert(tiny(), tmp_path / "out", layers=3)
    header, lines = read_ledger(tmp_path / "out")
    assert header.layers == (3,)
    assert {path.split(".")[1] for path in lines if path.startswith("layers.")} == {"3"}
    with pytest.raises(CheckpointError, match="layers: 6 is not a layer"):
        audit(tiny(), layers=6)


# Sources and destinations that are refused.


def test_a_directory_of_the_other_kind_is_refused_with_the_command_for_it(
    tmp_path, tiny, converted
):
    for refused in (audit, lambda path: convert(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"an Orbax directory.*`glm5-jax export`"):
            refused(converted())
    for refused in (verify, lambda path: export(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"a safetensors directory.*`glm5-jax convert`"):
            refused(tiny())
        with pytest.raises(CheckpointError, match="it is a file"):
            refused(tiny() / "config.json")
    with pytest.raises(CheckpointError, match="a file; expected a directory"):
        audit(tiny() / "config.json")
    assert not list(tmp_path.iterdir())


def test_a_source_that_may_not_be_read_is_refused_in_one_line(tmp_path, tiny, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match=f"^{tiny()}: cannot be read: Permission denied$"):
        convert(tiny(), tmp_path / "out")


@pytest.fixture
def broken(tmp_path, tiny, stored, write):
    tensors = stored(tiny())
    del tensors[PREFIX + "layers.1.mlp.experts.3.up_proj.weight"]
    return rewrite(tmp_path / "broken", tensors, tiny(), write)


def test_an_incomplete_source_is_refused_before_anything_is_written(tmp_path, broken):
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.up_proj.*missing"):
        convert(broken, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [broken]


def test_an_existing_destination_is_refused_before_the_source_is_even_opened(tmp_path, converted):
    with pytest.raises(CheckpointError, match=r"exists already; force \(--force\) replaces it"):
        convert(tmp_path / "no source", converted())
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="not an Orbax directory; choose another"):
        convert(tmp_path / "no source", tmp_path / "file")


def test_force_replaces_an_orbax_directory_and_nothing_else(tmp_path, tiny, converted):
    out = tmp_path / "out"
    shutil.copytree(converted(), out)
    convert(tiny(seed=1), out, force=True)
    assert leaf_hashes(out) == leaf_hashes(converted(tiny(seed=1)))
    assert verify(out).ok
    assert list(tmp_path.iterdir()) == [out]
    (tmp_path / "home").mkdir()
    with pytest.raises(CheckpointError, match="not an Orbax directory; choose another"):
        convert(tiny(), tmp_path / "home", force=True)


def test_the_old_destination_stays_whole_until_the_new_one_is_complete(tmp_path, tiny, converted):
    out = tmp_path / "out"
    shutil.copytree(converted(), out)

    seen = set()

    def stop(done, total, label):
        assert label in seen or verify(out).ok
        seen.add(label)
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny(seed=1), out, force=True, progress=stop)
    assert leaf_hashes(out) == leaf_hashes(converted())
    assert verify(out).ok


def test_destinations_that_would_eat_the_source_are_refused(tmp_path, tiny):
    source = tmp_path / "models" / "source"
    shutil.copytree(tiny(), source)
    for destination in (source, tmp_path / "models", source / "orbax"):
        with pytest.raises(CheckpointError, match="the source"):
            convert(source, destination, force=True)
    assert sorted(source.iterdir()) == [source / "config.json", source / "model.safetensors"]


def test_relative_paths_and_missing_parents_are_fine(tmp_path, tiny, monkeypatch):
    shutil.copytree(tiny(), tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    report = convert("source", "new/out")
    assert report.destination == tmp_path / "new" / "out"
    assert load_config("new/out") == load_config("source")
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "out"]


def test_progress_counts_up_to_all_the_bytes(tmp_path, tiny):
    calls = []
    report = convert(tiny(), tmp_path / "out", progress=lambda *call: calls.append(call))
    counts = [done for done, _, _ in calls]
    assert counts == sorted(set(counts))
    assert calls[-1][:2] == (report.bytes, report.bytes)
    labels = list(dict.fromkeys(label for _, _, label in calls))
    assert labels == ["outside the layers", *(f"layer {i}" for i in range(5)), "mtp", "passthrough"]


def test_a_destination_that_cannot_be_made_is_refused_in_one_line(tmp_path, tiny):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written: Not a directory"):
        convert(tiny(), tmp_path / "file" / "out")


# Order.


def test_forty_five_layers_keep_their_numbers(tmp_path, config_file, write, small):
    config = config_file("tiny")
    config["text_config"] |= {
        "num_hidden_layers": 45,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
        "mlp_layer_types": ["dense"] * 45,
        "indexer_types": ["full"] * 45,
    }
    tensors = small(config=config, mtp=False, vision=False)
    data = {}
    for name, (dtype, shape) in tensors.items():
        value = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else 100
        array = np.full(shape, value, ml_dtypes.bfloat16 if dtype == "BF16" else np.float32)
        data[name] = array.tobytes()
    source = write(tmp_path / "source", tensors, config, data=data)
    convert(source, tmp_path / "out")
    for directory in (source, tmp_path / "out"):
        _, leaves = load_leaves(directory)
        order = []
        for path, leaf in leaves.items():
            first, _, rest = path.partition(".")
            index = int(rest.split(".")[0]) if first == "layers" else 100
            assert (leaf == index).all(), path
            order += [index] if index != 100 and index not in order else []
        assert order == list(range(45))
        assert "layers.44.attn.A_log" in leaves
        assert "layers.43.attn.kv_b_proj" in leaves


# Directories that were moved, damaged, or written by others.

EIGHT_DEVICES = """
import hashlib, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp
from glm5_jax import convert
source, out = sys.argv[1:]
assert jax.device_count() == 8
convert(source, out)
mesh = jax.make_mesh((8,), ("x",))
whole = ocp.load(out)["embed_tokens"]
target = jax.ShapeDtypeStruct(
    whole.shape, whole.dtype, sharding=NamedSharding(mesh, PartitionSpec("x"))
)
context = ocp.Context()
context.pytree.loading.partial_load = True
with context:
    spread = ocp.load(out, {"embed_tokens": target})["embed_tokens"]
assert len(spread.addressable_shards) == 8
assert np.array_equal(np.asarray(spread), whole)
"""


def test_written_beside_eight_devices_it_restores_on_eight_and_on_one(tmp_path, tiny, plain):
    environment = os.environ | {
        "PYTHONPATH": str(GOLDEN.parents[2]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-c", EIGHT_DEVICES, str(tiny()), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    restored = restore_plainly(tmp_path / "out", tmp_path)  # one device, no target
    assert restored == plain


def test_a_copy_restores_when_the_original_is_gone(tmp_path, converted, plain):
    for name in ("original", "copy"):
        shutil.copytree(
            converted() if name == "original" else tmp_path / "original", tmp_path / name
        )
    shutil.rmtree(tmp_path / "original")
    assert verify(tmp_path / "copy").ok
    assert restore_plainly(tmp_path / "copy", tmp_path) == plain


def test_without_its_marker_it_restores_and_without_its_tree_or_index_it_is_refused(
    tmp_path, converted
):
    copy = tmp_path / "copy"
    shutil.copytree(converted(), copy)
    (copy / "_CHECKPOINT_METADATA").unlink()
    _, expected = load_leaves(converted())
    _, found = load_leaves(copy)
    assert all(found[path].tobytes() == expected[path].tobytes() for path in expected)
    for name in ("state/_METADATA", "state/manifest.ocdbt"):
        whole = (copy / name).read_bytes()
        (copy / name).unlink()
        with pytest.raises(CheckpointError) as caught:
            load_leaves(copy)
        assert "\n" not in str(caught.value)
        (copy / name).write_bytes(whole)


def test_layers_that_another_program_stacked_are_refused(tmp_path, converted):
    """Ours are apart, by number; a tree that is scanned over has one array for all of them."""
    from orbax.checkpoint import v1 as ocp

    _, leaves = load_leaves(converted())
    stacked = np.stack([leaves[f"layers.{index}.attn.q_proj"] for index in (0, 1, 2, 4)])
    ocp.save(tmp_path / "scanned", {"layers": {"attn": {"q_proj": stacked}}})
    shutil.copyfile(converted() / "config.json", tmp_path / "scanned" / "config.json")
    with pytest.raises(CheckpointError, match="the first is embed_tokens; it was not written by"):
        load_leaves(tmp_path / "scanned")
    with pytest.raises(CheckpointError, match="has no ledger"):
        export(tmp_path / "scanned", tmp_path / "out")
    with pytest.raises(CheckpointError, match="has no ledger"):
        verify(tmp_path / "scanned")


def test_a_ledger_of_another_format_is_refused(tmp_path, converted):
    copy = tmp_path / "copy"
    shutil.copytree(converted(), copy)
    text = (copy / LEDGER).read_text()
    (copy / LEDGER).write_text(text.replace('"format":1', '"format":7', 1))
    write_manifest(copy)
    with pytest.raises(CheckpointError, match="format 7, this version reads format 1"):
        export(copy, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["stored", "float32", "float64"])
def test_nothing_is_narrowed_that_was_not_asked_for_by_name(tmp_path, tiny, converted, dtype):
    directory = converted(tiny(dtype="float32"))
    stored = {path: leaf.dtype for path, leaf in stored_leaves(directory).items()}
    _, found = load_leaves(directory, dtype=dtype, mtp=True)
    assert all(leaf.dtype.itemsize >= stored[path].itemsize for path, leaf in found.items())
    with pytest.raises(CheckpointError, match=r"dtype: expected one of .* got 'float16'"):
        load_leaves(directory, dtype="float16")
