"""convert on several processes: one directory, whoever of them is killed, and whenever."""

import errno
import fcntl
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from glm5_jax import CheckpointError
from glm5_jax.checkpoint import staging
from glm5_jax.checkpoint.company import check_process, parse_process
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.database import TREE
from glm5_jax.checkpoint.ledger import LEDGER
from glm5_jax.checkpoint.manifest import MANIFEST
from glm5_jax.checkpoint.staging import unfinished_directory
from glm5_jax.checkpoint.verify import verify

ROOT = Path(__file__).resolve().parents[2]
# Children are forked from a process that has imported everything: all begin at once.
PARENT = """
import contextlib, json, os, random, shutil, signal, sys, time
from pathlib import Path
from orbax.checkpoint import v1 as ocp
from glm5_jax.checkpoint import convert, staging

def after_claims(action):
    claim = staging.Staging.claim
    def wrapped(self, number):
        directory = claim(self, number)
        if directory:
            action()
        return directory
    staging.Staging.claim = wrapped

placed = []

def place(directory, out, original=staging.place_directory):
    placed.append(out)
    original(directory, out)

staging.place_directory = place

def child(source, out, index, count, prepare=lambda: None):
    pid = os.fork()
    if pid:
        return pid
    try:
        prepare()
        report = convert.convert(source, out, process=(index, count))
        line = json.dumps([index, report.written, report.elsewhere, len(placed)]) + "\\n"
        os.write(1, line.encode())
        os._exit(0)
    finally:
        os._exit(1)

def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

TOGETHER = """
def meet(there, index, count):
    # Nobody claims a second group before all have one: these are so small that one could take all.
    (there / str(index)).touch()
    while len(list(there.iterdir())) < count:
        time.sleep(0.01)

for number, source in enumerate(sys.argv[2:]):
    out, there = Path(sys.argv[1], str(number)), Path(sys.argv[1], f"there-{number}")
    there.mkdir()
    count = 3 if number == 0 else 2
    pids = [
        child(source, out, index, count, lambda: after_claims(lambda: meet(there, index, count)))
        for index in range(count)
    ]
    assert [status(pid) for pid in pids] == [0] * count
    shutil.rmtree(there)
"""

MOMENTS = """
def watch(owner, name, times, late):
    # Whoever comes there first is killed, the others take his place.
    original, calls = getattr(owner, name), [times]
    def die():
        with contextlib.suppress(FileExistsError):
            victim.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    def call(*arguments, **keywords):
        calls[0] -= 1
        if not calls[0] and not late:
            die()
        result = original(*arguments, **keywords)
        if not calls[0] and late:
            die()
        return result
    setattr(owner, name, call)

moments = {
    "inside a group": lambda: watch(staging.Staging, "claim", 2, late=True),
    "before the end of the lines": lambda: watch(staging, "_append", 3, late=False),
    "between groups": lambda: watch(staging.Staging, "finish", 1, late=True),
    "writing the tree": lambda: watch(staging, "write_tree", 1, late=True),
    "merging": lambda: watch(staging, "write_manifest", 1, late=False),
    "renaming": lambda: watch(staging, "place_directory", 1, late=False),
    "renamed": lambda: watch(staging, "place_directory", 1, late=True),
}
for moment, prepare in moments.items():
    out, victim = Path(sys.argv[2], moment), Path(sys.argv[2], "victim")
    pids = [child(sys.argv[1], out, index, 3, prepare=prepare) for index in range(3)]
    ends = sorted(status(pid) for pid in pids)
    assert ends == [-9, 0, 0], (moment, ends)
    victim.unlink()
"""

AT_RANDOM = """
source, out, draw = sys.argv[1], Path(sys.argv[2]), random.Random(int(sys.argv[3]))
left, before, kills = staging.unfinished_directory(out), [], 0

def finished():
    lines = sorted(left.glob("group-*.jsonl"))
    names = [file.stem for file in lines if file.read_bytes().endswith(staging._COMPLETE)]
    # A group that is written again has other files.
    return [(name, (left / name / "manifest.ocdbt").stat().st_mtime_ns) for name in names]

def slow():
    after_claims(lambda: time.sleep(0.05))

while not out.exists():
    count = draw.randint(1, 3)
    pids = [child(source, out, index, count, slow) for index in range(count)]
    if kills < 8:
        time.sleep(draw.uniform(0.05, 0.4))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    ends = [status(pid) for pid in pids]
    assert out.exists() or set(ends) == {-9}, ends
    if not out.exists():
        kills += 1
        after = finished()
        assert set(before) <= set(after), (before, after)
        before = after
if left.exists():  # all were killed when it was in its place
    assert status(child(source, out, 0, 1)) == 0
"""


def run(script, *arguments):
    """What the script prints, JSON by line."""
    command = [sys.executable, "-c", PARENT + script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_same(out, expected):
    """Nothing tells a directory from one that one process made, but how data files are named."""
    assert (out / LEDGER).read_bytes() == (expected / LEDGER).read_bytes()
    assert (out / TREE).read_bytes() == (expected / TREE).read_bytes()
    assert files_of(out) == files_of(expected)
    assert verify(out).ok


def files_of(directory):
    lines = (directory / MANIFEST).read_text().splitlines()
    files = [json.loads(line)["file"] for line in lines]
    return {Path(file).parent if "/d/" in file else Path(file) for file in files}


def test_what_several_make_is_what_one_makes(tmp_path, tiny, quantized, converted):
    from orbax.checkpoint import v1 as ocp

    layouts = ("fp8", "nvfp4_modelopt", "nvfp4_compressed_tensors")
    sources = [tiny(), tiny(naming="native"), *map(quantized, layouts)]
    reports = run(TOGETHER, tmp_path, *sources)
    for number, source in enumerate(sources):
        assert_same(tmp_path / str(number), converted(source))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["0", "1", "2", "3", "4"]
    assert set(ocp.load(tmp_path / "0")) == set(ocp.load(converted()))
    first = convert(tiny(), tmp_path / "again")
    assert (first.written, first.resumed, first.elsewhere) == (first.bytes, 0, 0)
    index, written, elsewhere, placed = zip(*reports[:3], strict=True)
    assert sorted(index) == [0, 1, 2]
    assert sum(written) == first.bytes
    assert min(written) > 0
    assert sum(elsewhere) == 2 * 8
    assert sum(placed) == 1


def test_killed_at_any_moment_the_others_go_on(tmp_path, tiny, converted):
    reports = run(MOMENTS, tiny(), tmp_path)
    assert len(reports) == 2 * 7
    for out in tmp_path.iterdir():
        assert_same(out, converted())


def test_all_killed_at_random_any_number_continues(tmp_path, tiny, converted):
    run(AT_RANDOM, tiny(), tmp_path / "out", random.randrange(2**32))
    assert_same(tmp_path / "out", converted())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize(
    ("process", "others", "arguments", "line"),
    [
        ((0, 2), (0, 2), {}, "process 0/2 is at work on it already"),
        ((0, 2), (1, 3), {}, "another convert is writing it, as process 0/2; this one is 1/3"),
        ((0, 2), None, {}, "another convert is writing it, as process 0/2; this one is 0/1"),
        (None, (1, 2), {}, "another convert is writing it, as process 0/1; this one is 1/2"),
        ((0, 2), (1, 2), {"dtype": "float32"}, r"differs .* in dtype \('stored', now 'float32'\)"),
        ((0, 2), (1, 2), {"mtp": False, "force": True}, "in leaves .*; start all of them alike"),
        ((0, 2), (1, 2), {"source": 1}, r"source directory .*source model\.safetensors"),
    ],
)
def test_processes_that_disagree_are_refused(
    tmp_path, tiny, converted, monkeypatch, process, others, arguments, line
):
    monkeypatch.setattr(staging, "LATE_SECONDS", 0)
    source = tiny(seed=arguments.pop("source", 0))
    refused = []

    def disagree(done, total, label):
        if label == "layer 1" and not refused:
            with pytest.raises(CheckpointError, match=line) as caught:
                convert(source, tmp_path / "out", process=others, **arguments)
            refused.append(str(caught.value))

    convert(tiny(), tmp_path / "out", process=process, progress=disagree)
    assert len(refused) == 1
    assert "\n" not in refused[0]
    assert_same(tmp_path / "out", converted())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_what_one_process_fails_at_another_does(tmp_path, tiny, converted):
    failed = []

    def fail(done, total, label):
        failed.append(label)
        raise KeyboardInterrupt

    def go_on(done, total, label):
        if label == "layer 1" and not failed:
            with pytest.raises(KeyboardInterrupt):
                convert(tiny(), tmp_path / "out", process=(1, 2), progress=fail)

    report = convert(tiny(), tmp_path / "out", process=(0, 2), progress=go_on)
    assert len(failed) == 1
    assert report.written == report.bytes
    assert_same(tmp_path / "out", converted())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_who_comes_late_finds_all_done_and_who_never_comes_is_not_waited_for(
    tmp_path, tiny, monkeypatch
):
    out, reports = tmp_path / "out", []
    first = threading.Thread(
        target=lambda: reports.append(convert(tiny(), out, process=(0, 2))), daemon=True
    )
    first.start()
    while not out.exists():
        time.sleep(0.01)
    late = convert(tiny(), out, process=(1, 2))
    first.join(timeout=60)
    assert (late.written, late.resumed, late.elsewhere) == (0, 8, 0)
    assert reports[0].written == reports[0].bytes == late.bytes
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tiny(), out, process=(1, 2))
    monkeypatch.setattr(staging, "LATE_SECONDS", 0.3)
    convert(tiny(), tmp_path / "other", process=(1, 2))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "other", out]


def test_what_was_made_while_this_process_looked_at_the_source_is_not_made_again(
    tmp_path, tiny, converted, monkeypatch
):
    """It has checked the destination before it comes to the others, who are gone by then."""
    out = tmp_path / "out"
    original = staging.Staging.__init__

    def come(self, *arguments, **keywords):
        shutil.copytree(converted(), out)
        original(self, *arguments, **keywords)

    monkeypatch.setattr(staging.Staging, "__init__", come)
    with pytest.raises(CheckpointError, match="another convert has just made it"):
        convert(tiny(), out)
    assert list(tmp_path.iterdir()) == [out]
    assert verify(out).ok


def test_where_there_are_no_locks_one_process_converts_and_several_are_refused(
    tmp_path, tiny, converted, monkeypatch
):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CheckpointError, match=r"has no locks \(flock\).*; convert with one$"):
        convert(tiny(), tmp_path / "out", process=(0, 2))
    convert(tiny(), tmp_path / "out")
    assert_same(tmp_path / "out", converted())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_commands_share_the_work(tmp_path, tiny, converted):
    """As from two shells."""
    script = "import sys; from glm5_jax.cli import main; sys.argv[0] = 'glm5-jax'; main()"
    command = [sys.executable, "-c", script, "convert", str(tiny()), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen([*command, "--process", f"{index}/2"], env=environment, **pipes)
        for index in range(2)
    ]
    for process in both:
        stdout, stderr = process.communicate(timeout=120)
        assert (process.returncode, stderr) == (0, "")
        assert "172 leaves and 39 tensors passed through, 1,505,464 bytes" in stdout
    assert_same(tmp_path / "out", converted())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("text", ["", "1", "a/2", "1/", "-1/2", "1/2/3", "١/٢", "0/2\n"])
def test_a_process_is_two_numbers(text):
    with pytest.raises(CheckpointError, match=r"expected INDEX/COUNT, like 0/4 to 3/4, got"):
        parse_process(text)


@pytest.mark.parametrize("process", [(2, 2), (-1, 2), (0, 0)])
def test_a_process_is_one_of_those_that_there_are(tmp_path, tiny, process):
    assert check_process(*parse_process("3/4")).index == 3
    with pytest.raises(CheckpointError, match="expected an index from 0 and below the count, got"):
        convert(tiny(), tmp_path / "out", process=process)
    assert list(tmp_path.iterdir()) == []


def test_arrays_are_converted_without_jax(tmp_path, tiny):
    """It comes with Orbax, which writes the tree at the end."""
    script = (
        "import sys; from glm5_jax.checkpoint import convert, staging;"
        "staging.write_tree = lambda *_: sys.exit('jax' in sys.modules);"
        "convert.convert(*sys.argv[1:], process=(0, 2)); sys.exit(2)"
    )
    command = [sys.executable, "-c", script, str(tiny()), str(tmp_path / "out")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0


DISTRIBUTED = """
import sys, jax
address, index, source, out = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index))
import glm5_jax
report = glm5_jax.convert(source, out)
assert report.written < report.bytes or report.elsewhere == 0
"""


def test_in_a_jax_distributed_run_each_process_takes_its_part(tmp_path, tiny, converted):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DISTRIBUTED, address]
    both = [
        subprocess.Popen(
            [*command, str(index), str(tiny()), str(tmp_path / "out")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in both:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    assert_same(tmp_path / "out", converted())
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert not unfinished_directory(tmp_path / "out").exists()
