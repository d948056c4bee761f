"""Two processes of four devices each do together what one process with one device does alone."""

import math

import numpy as np
import pytest

import glm5_jax as glm
from glm5_jax.checkpoint.restore import load_leaves, open_leaves
from glm5_jax.sharding import PRESETS, array_pieces


@pytest.fixture(scope="module")
def runs(plain, run_together, tmp_path_factory):
    """What they printed and wrote: those of one process, and those of two."""
    found = {}
    for processes, devices in ((1, 1), (2, 4)):
        out = tmp_path_factory.mktemp(f"processes-{processes}")
        ended = run_together("runs.py", plain, out, processes=processes, devices=devices)
        for one in ended:
            assert one.status == 0, one.err
        found[processes] = (out, ended)
    return found


def arrays(runs, processes):
    out, ended = runs[processes]
    return [dict(np.load(out / f"process-{i}.npz")) for i in range(len(ended))]


def test_every_process_generates_what_one_does(runs):
    (alone,) = arrays(runs, 1)
    for one in arrays(runs, 2):
        np.testing.assert_array_equal(one["generated"], alone["generated"])
        np.testing.assert_array_equal(one["seen"], alone["seen"])


def test_a_trace_of_two_is_that_of_one(runs):
    """Float64, so that nothing but the order of sums differs."""
    alone, together = (glm.Trace.load(runs[n][0] / "trace.safetensors") for n in (1, 2))
    assert alone.sites == together.sites
    for name in alone.sites:
        expected, found = alone[name], together[name]
        if expected.dtype == np.int32:
            np.testing.assert_array_equal(found, expected, err_msg=name)
            continue
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(found), finite, err_msg=name)
        scale = np.abs(expected[finite]).max()
        apart = np.abs(found[finite] - expected[finite]).max()
        assert apart <= 1e-12 * scale, name


def test_the_first_process_alone_prints(runs):
    first, second = runs[2][1]
    assert first.out.count("trace.safetensors: Trace(") == 1
    assert "Trace(" not in second.out + second.err


def test_what_they_save_together_is_what_they_loaded(runs, plain):
    found = load_leaves(runs[2][0] / "saved", mtp=True)[1]
    expected = load_leaves(plain, mtp=True)[1]
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array.astype(np.float64), err_msg=path)


def test_a_process_reads_its_own_half_and_what_is_whole_everywhere(runs, plain):
    reader = open_leaves(plain, mtp=True)
    cut = whole = 0
    for path, leaf in reader.leaves.items():
        ((_, array),) = reader.arrays(path).items()
        nbytes = math.prod(array.shape) * array.dtype.itemsize
        if any(array_pieces(PRESETS["tp"], leaf, array.shape, {"tensor": 8})):
            cut += nbytes
        else:
            whole += nbytes
    assert cut > whole
    for one in arrays(runs, 2):
        # What was saved has float64 in the place of float32.
        assert one["bytes"].tolist() == [cut // 2 + whole, 2 * (cut // 2 + whole)]


def test_processes_that_were_started_otherwise_all_say_so(plain, run_together):
    for one in run_together("otherwise.py", plain, processes=2):
        assert one.status == 2
        waits, said = one.err.splitlines()[0], one.err.splitlines()[-1]
        assert "waits for the others at 127.0.0.1:" in waits
        assert said.startswith("error: process 1 was started with other arguments than process 0")
