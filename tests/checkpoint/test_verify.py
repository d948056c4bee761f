"""verify: whatever is not as it was written is found and named."""

import gc
import json
import shutil

import pytest
from orbax.checkpoint import v1 as ocp

from glm5_jax import CheckpointError
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.ledger import LEDGER, read_ledger
from glm5_jax.checkpoint.manifest import MANIFEST
from glm5_jax.checkpoint.orbax import stored_leaves
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.verify import verify

KDA = "layers.0.attn."


@pytest.fixture
def copy(tmp_path, converted):
    shutil.copytree(converted(), tmp_path / "copy")
    return tmp_path / "copy"


def files(directory):
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return [path for path in found if path.stat().st_size]


def flip(file, offset):
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 0x10
    file.write_bytes(raw)


def relist(directory, *names):
    """Make files.jsonl agree with altered files, so that what is found is found elsewhere."""
    import hashlib

    lines = []
    for text in (directory / MANIFEST).read_text().splitlines():
        entry = json.loads(text)
        if entry["file"] in names:
            raw = (directory / entry["file"]).read_bytes()
            entry |= {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        lines.append(json.dumps(entry) + "\n")
    (directory / MANIFEST).write_text("".join(lines))


def edit_ledger(directory, change):
    lines = [json.loads(text) for text in (directory / LEDGER).read_text().splitlines()]
    change(lines)
    (directory / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))
    relist(directory, LEDGER)


def test_what_was_written_is_in_order_and_every_leaf_was_compared(converted):
    for quick in (False, True):
        report = verify(converted(), quick=quick)
        assert report.ok
        assert report.problems == ()
        assert report.checked == len(read_ledger(converted())[1]) == 211


def test_a_copy_with_notes_beside_it_is_in_order(copy):
    (copy / "README.md").write_text("mine")
    assert verify(copy).ok


def one_of_each_kind(directory):
    names = [file.relative_to(directory).as_posix() for file in files(directory)]
    kinds = {name.split("/")[1].split("_")[0] if "/" in name else name: name for name in names}
    assert {
        LEDGER,
        MANIFEST,
        "config.json",
        "",
        "manifest.ocdbt",
        "d",
        "ocdbt.process",
    } <= kinds.keys()
    return list(kinds.values())


def test_a_flipped_byte_in_any_kind_of_file_is_found_and_the_file_named(copy):
    for name in one_of_each_kind(copy):
        whole = (copy / name).read_bytes()
        flip(copy / name, len(whole) // 2)
        problems = verify(copy).problems
        assert all("\n" not in line for line in problems)
        # In the list itself, the file is named whose entry was hit.
        assert problems if name == MANIFEST else any(name in line for line in problems), name
        (copy / name).write_bytes(whole)
    assert verify(copy).ok


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own loop
def test_a_flipped_byte_in_the_data_names_its_leaf(tmp_path, config_file):
    from glm5_jax.checkpoint.tiny import make_tiny

    config = config_file("tiny")
    config["vision_config"] = None
    config["text_config"] |= {
        "vocab_size": 4000,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
        "mlp_layer_types": ["dense"],
        "indexer_types": ["full"],
        "num_nextn_predict_layers": 0,
    }
    convert(make_tiny(tmp_path / "source", config), tmp_path / "out")
    out = tmp_path / "out"
    # By its value: whether two arrays share a file hangs on timing.
    _, leaves = load_leaves(tmp_path / "source")
    for name in ("embed_tokens", "lm_head"):
        stored = leaves[name].tobytes()[200_000:200_064]
        for file in out.glob("state/ocdbt.process_*/d/*"):
            if (at := file.read_bytes().find(stored)) >= 0:
                flip(file, at)
                relist(out, file.relative_to(out).as_posix())
    assert verify(out, quick=True).ok
    problems = verify(out).problems
    assert [line.partition(": ")[0] for line in problems] == ["embed_tokens", "lm_head"]
    assert all("\n" not in line and "DATA_LOSS" in line for line in problems)
    # Whoever restores it is told too.
    with pytest.raises(CheckpointError, match=r"embed_tokens.*DATA_LOSS"):
        load_leaves(out)
    with pytest.raises(ValueError, match="DATA_LOSS"):
        ocp.load(out)
    gc.collect()  # lest what Orbax leaves behind is found by another test


def test_a_missing_file_of_each_kind_is_found_and_named(copy):
    for name in one_of_each_kind(copy):
        whole = (copy / name).read_bytes()
        (copy / name).unlink()
        for quick in (True, False):
            problems = verify(copy, quick=quick).problems
            assert any(name in line for line in problems), (name, problems)
        (copy / name).write_bytes(whole)


def test_quick_sees_sizes_and_structure_and_not_bytes(copy):
    file = max(copy.glob("state/ocdbt.process_*/d/*"), key=lambda path: path.stat().st_size)
    flip(file, 100)
    assert verify(copy, quick=True).ok
    assert not verify(copy).ok
    with open(file, "ab") as stream:
        stream.write(b"x")
    (line,) = verify(copy, quick=True).problems
    assert file.name in line


def test_a_leaf_without_a_ledger_line_is_found_and_named(copy):
    edit_ledger(copy, lambda lines: lines.pop(5))
    (path,) = stored_leaves(copy).keys() - read_ledger(copy)[1].keys()
    problems = verify(copy).problems
    assert f"{path}: a leaf without a line in {LEDGER}" in problems
    assert f"{LEDGER}: has 210 leaves, 211 were written" in problems


def test_a_ledger_line_without_a_leaf_is_found_and_named(copy):
    def add(lines):
        lines.append(lines[5] | {"path": "layers.0.attn.extra"})

    edit_ledger(copy, add)
    problems = verify(copy).problems
    assert f"layers.0.attn.extra: in {LEDGER}, but not in the tree of the checkpoint" in problems


def test_two_swapped_tensors_are_both_named(tmp_path, copy, tiny, stored, write):
    tensors = stored(tiny())
    one, other = (f"model.language_model.layers.0.self_attn.{x}_proj.weight" for x in "qk")
    tensors[one], tensors[other] = tensors[other], tensors[one]
    codes = {"bfloat16": "BF16", "float32": "F32"}
    shapes = {name: (codes[array.dtype.name], array.shape) for name, array in tensors.items()}
    data = {name: array.tobytes() for name, array in tensors.items()}
    config = json.loads((tiny() / "config.json").read_bytes())
    convert(write(tmp_path / "source", shapes, config, data=data), tmp_path / "swapped")
    shutil.copyfile(copy / LEDGER, tmp_path / "swapped" / LEDGER)
    relist(tmp_path / "swapped", LEDGER)
    assert verify(tmp_path / "swapped").problems == (
        f"{KDA}q_proj: its bytes are not those that were written",
        f"{KDA}k_proj: its bytes are not those that were written",
    )


def test_a_leaf_of_another_shape_or_dtype_is_named(copy):
    def change(lines):
        lines[1]["shape"][0] += 1
        lines[2]["dtype"] = "float32"

    edit_ledger(copy, change)
    paths = list(read_ledger(copy)[1])
    for quick in (True, False):
        problems = verify(copy, quick=quick).problems
        for path in paths[:2]:
            assert any(line.startswith(f"{path}: expected") for line in problems)


def test_a_damaged_ledger_is_a_problem_that_names_the_line(copy):
    raw = (copy / LEDGER).read_bytes().splitlines(keepends=True)
    damage = [(1, b"[]\n"), (1, raw[0].replace(b"released", b"releasee")), (3, b"{}\n")]
    damage += [(4, b"\xff\n"), (5, raw[1]), (2, raw[1].replace(b'"bfloat16"', b'"bfloat1&"'))]
    damage += [(2, raw[1].replace(b'"shape":[', b'"shape":["')), (2, b'{"path":[' + raw[1][9:])]
    damage += [(2, raw[1].replace(b'"rows":null', b'"rows":[1]'))]
    damage += [(2, raw[1].replace(b'"path":"', b'"path":"\\n'))]
    for number, text in damage:
        (copy / LEDGER).write_bytes(b"".join([*raw[: number - 1], text, *raw[number:]]))
        problems = verify(copy).problems
        assert any(f"{LEDGER}: line {number}" in line for line in problems), problems


def test_a_damaged_list_of_files_is_a_problem_that_names_the_line(copy):
    raw = (copy / MANIFEST).read_bytes()
    for old, new in ((b'"file": "', b'"file": "\\n'), (b'"size": ', b'"size": "", "x": ')):
        (copy / MANIFEST).write_bytes(raw.replace(old, new, 1))
        assert f"{MANIFEST}: line 1 is damaged" in verify(copy, quick=True).problems
    (copy / MANIFEST).write_bytes(raw.replace(b'"file": "config.json"', b'"file": ["config.json"]'))
    assert any("is damaged" in line for line in verify(copy, quick=True).problems)


def test_a_tree_with_unprintable_names_is_damaged(copy):
    tree = copy / "state" / "_METADATA"
    tree.write_bytes(tree.read_bytes().replace(b'"attn"', b'"at\\n"'))
    assert any("no tree can be read" in line for line in verify(copy, quick=True).problems)


def test_what_is_no_orbax_directory_is_refused(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="no such directory"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="expected one of Orbax"):
        verify(tiny())


def test_progress_counts_up_to_all_the_bytes(converted):
    calls = []
    verify(converted(), progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1]
    assert len(calls) == 211
