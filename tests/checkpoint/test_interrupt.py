"""convert, interrupted: by a kill at any moment, a full disk, a source that changes meanwhile."""

import gc
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm5_jax import CheckpointError
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.ledger import LEDGER, read_ledger
from glm5_jax.checkpoint.restore import load_leaves
from glm5_jax.checkpoint.staging import JOURNAL, Staging, unfinished_directory
from glm5_jax.checkpoint.verify import verify

ROOT = Path(__file__).resolve().parents[2]
# Children are forked from a process that has imported everything: each has all its time to convert.
PARENT = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from orbax.checkpoint import v1 as ocp
from glm5_jax.checkpoint import convert, staging

source, out = map(Path, sys.argv[1:3])
left = staging.unfinished_directory(out)

def child(prepare=lambda: None):
    pid = os.fork()
    if pid:
        return pid
    try:
        prepare()
        convert.convert(source, out)
        os._exit(0)
    finally:
        os._exit(1)

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
"""

MOMENTS = """
def watch(owner, name, times, late):
    original, calls = getattr(owner, name), [times]
    def call(*arguments, **keywords):
        calls[0] -= 1
        if not calls[0] and not late:
            die()
        result = original(*arguments, **keywords)
        if not calls[0]:
            die()
        return result
    setattr(owner, name, call)

prepare = {
    "at the beginning": lambda: watch(staging.Staging, "_write_journal", 1, late=False),
    "between groups": lambda: watch(staging.Staging, "finish", 4, late=True),
    "inside a group": lambda: watch(staging.Staging, "claim", 4, late=True),
    # One for the journal and two for each group: its lines, and that it is complete.
    "after the ledger": lambda: watch(staging, "_append", 9, late=False),
    "writing the tree": lambda: watch(staging, "write_tree", 1, late=True),
    "merging": lambda: watch(staging, "write_manifest", 1, late=False),
    "renaming": lambda: watch(staging, "place_directory", 1, late=False),
    "renamed": lambda: watch(staging, "place_directory", 1, late=True),
    "cleaning up": lambda: watch(staging.Staging, "_drop_all_but", 2, late=True),
}[sys.argv[3]]
print(os.waitstatus_to_exitcode(os.waitpid(child(prepare), 0)[1]))
"""

AT_RANDOM = """
draw, kills, expected, before = random.Random(int(sys.argv[4])), 0, None, []

def finished():
    lines = sorted(left.glob("group-*.jsonl"))
    names = [file.stem for file in lines if file.read_bytes().endswith(staging._COMPLETE)]
    # A group that is written again has other files.
    return [(name, (left / name / "manifest.ocdbt").stat().st_mtime_ns) for name in names]

while kills < int(sys.argv[3]) or expected is None:
    started, pid = time.monotonic(), child()
    if expected is not None:
        time.sleep(draw.uniform(0, whole))
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not out.exists():
        assert status == -9, status
        kills += 1
        after = finished()
        assert after[: len(before)] == before, (before, after)
        before = after
        continue
    # Whether it was killed or not: what is at the destination is whole.
    ledger = (out / "ledger.jsonl").read_bytes()
    whole = time.monotonic() - started if expected is None else whole
    expected = expected or ledger
    assert ledger == expected
    # A rerun cleans up after a killed one; after a complete one it finds the destination taken.
    killed = (left / "journal.jsonl").exists()
    assert os.waitstatus_to_exitcode(os.waitpid(child(), 0)[1]) == (0 if killed else 1)
    shutil.rmtree(out)
    before = []
assert os.waitpid(child(), 0)[1] == 0
"""


def run(script, *arguments):
    command = [sys.executable, "-c", PARENT + script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_killed_at_random_moments_it_continues_and_ends_in_the_same_directory(
    tmp_path, tiny, converted
):
    out = tmp_path / "out"
    run(AT_RANDOM, tiny(), out, 10, time.time_ns())
    assert (out / LEDGER).read_bytes() == (converted() / LEDGER).read_bytes()
    assert verify(out).ok
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's own loop
@pytest.mark.parametrize(
    ("moment", "resumed"),
    [
        ("at the beginning", 0),
        ("between groups", 4),
        ("inside a group", None),  # those before it that were done by then
        ("after the ledger", 3),
        ("writing the tree", 8),
        ("merging", 8),
        ("renaming", 8),
    ],
)
def test_killed_it_leaves_nothing_that_restores_and_a_rerun_continues(
    tmp_path, tiny, converted, moment, resumed
):
    from orbax.checkpoint import v1 as ocp

    out = tmp_path / "out"
    assert run(MOMENTS, tiny(), out, moment) == "-9"
    left = unfinished_directory(out)
    assert list(tmp_path.iterdir()) == [left]
    groups = [path for path in sorted(left.glob("group-*")) if path.is_dir()]
    assert len(groups) >= (resumed or 0)
    unfinished = [left / "finishing"] if moment == "writing the tree" else []
    for path in (out, left, *groups[:1], *unfinished):
        with pytest.raises(Exception, match=r"."):
            ocp.load(path)
    gc.collect()  # lest what Orbax leaves behind is found by another test
    for path in (out, left):
        with pytest.raises(CheckpointError, match="unfinished conversion"):
            load_leaves(path)
    found = convert(tiny(), out).resumed
    assert found == resumed if resumed is not None else found <= 3
    assert (out / LEDGER).read_bytes() == (converted() / LEDGER).read_bytes()
    assert verify(out).ok
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("moment", ["renamed", "cleaning up"])
def test_killed_when_all_is_in_its_place_a_rerun_only_cleans_up(tmp_path, tiny, converted, moment):
    out = tmp_path / "out"
    assert run(MOMENTS, tiny(), out, moment) == "-9"
    assert sorted(tmp_path.iterdir()) == [out, unfinished_directory(out)]
    assert verify(out).ok
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tiny(seed=1), out)
    assert convert(tiny(), out).resumed == 8
    assert (out / LEDGER).read_bytes() == (converted() / LEDGER).read_bytes()
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tiny(), out)


@pytest.fixture
def interrupted(tmp_path, tiny):
    """A source and a destination whose conversion stopped after two groups."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny(), source)

    def stop(done, total, label):
        if label == "layer 1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, progress=stop)
    assert not out.exists()
    return source, out


def test_a_source_that_changed_since_is_noticed(interrupted, tiny, converted):
    source, out = interrupted
    shutil.copyfile(tiny(seed=1) / "model.safetensors", source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"source model\.safetensors \(changed since\)"):
        convert(source, out)
    report = convert(source, out, force=True)
    assert report.resumed == 0
    assert verify(out).ok
    ledger, expected = (
        {path: line.sha256 for path, line in read_ledger(directory)[1].items()}
        for directory in (out, converted(tiny(seed=1)))
    )
    assert ledger == expected


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path, tiny):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny(), source)

    shutil.copyfile(tiny(seed=1) / "model.safetensors", tmp_path / "other")

    def change(done, total, label):
        if label == "layer 1" and (tmp_path / "other").exists():
            os.replace(tmp_path / "other", source / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was converted"):
        convert(source, out, progress=change)
    assert not out.exists()
    with pytest.raises(CheckpointError, match=r"source model\.safetensors \(changed since\)"):
        convert(source, out)


def test_other_arguments_do_not_continue_what_was_begun(interrupted):
    source, out = interrupted
    with pytest.raises(CheckpointError, match=r"dtype \('stored', now 'float32'\)"):
        convert(source, out, dtype="float32")
    assert convert(source, out).resumed == 2


def test_a_damaged_journal_starts_over(interrupted, converted):
    source, out = interrupted
    (unfinished_directory(out) / JOURNAL).write_bytes(b"\xff\n")
    assert convert(source, out).resumed == 0
    assert (out / LEDGER).read_bytes() == (converted() / LEDGER).read_bytes()


def test_a_group_whose_lines_have_no_end_was_not_finished(interrupted, converted):
    source, out = interrupted
    lines = unfinished_directory(out) / "group-00001.jsonl"
    lines.write_bytes(lines.read_bytes()[:-1])
    assert convert(source, out).resumed == 1
    assert (out / LEDGER).read_bytes() == (converted() / LEDGER).read_bytes()


def test_two_conversions_do_not_write_one_destination(tmp_path, tiny, monkeypatch):
    out = tmp_path / "out"
    original = Staging.merge

    def merge(self, *arguments):
        with pytest.raises(CheckpointError, match="another convert is writing it"):
            convert(tiny(), out)
        return original(self, *arguments)

    monkeypatch.setattr(Staging, "merge", merge)
    convert(tiny(), out)
    assert verify(out).ok


@pytest.mark.parametrize("file", ["config.json", "journal", "data", LEDGER])
def test_a_full_disk_is_one_line_and_a_rerun_continues(tmp_path, tiny, converted, file):
    """No file may grow beyond a limit, which is too low for that one."""
    source, ledger = tiny(), (converted() / LEDGER).stat().st_size
    config = (source / "config.json").stat().st_size
    limit = {"config.json": config - 1, "journal": config, "data": 40_000, LEDGER: ledger - 1}[file]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written: .*continue$") as caught:
            convert(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    convert(tiny(), tmp_path / "out")
    assert (tmp_path / "out" / LEDGER).read_bytes() == (converted() / LEDGER).read_bytes()
    assert verify(tmp_path / "out").ok
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
