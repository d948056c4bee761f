"""Every kernel that the model can call compiles for an H200, without one: no spills, tensor cores.

The numbers of the assembler's report are kept in `golden/kernels.json` and may not change unseen.
Needs the extra `aot` (JAX 0.11.2's CUDA plugin) and ptxas. Where they are missing the gate is
skipped, unless GLM5_JAX_GATES is set, as it is in CI.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from pallas_kernels.aot import CannotCompile, KDAShape, Kernel, compile_kda, versions

TABLE = Path(__file__).parents[1] / "golden" / "kernels.json"
# The state is always an input: without one of its own, a call passes zeros.
SHAPES = [
    KDAShape(B=B, T=T, packed=packed)
    for B in (1, 4)
    for T in (64, 4096, 65536)
    for packed in (False, True)
]


@pytest.fixture(scope="module")
def compiled():
    try:
        used = versions()
    except CannotCompile as error:
        if "GLM5_JAX_GATES" in os.environ:
            pytest.fail(str(error))
        pytest.skip(str(error))
    return used, compile_kda("h200", SHAPES)


def faults(kernel):
    """What must never be, whatever the versions."""
    found = []
    if kernel.spilled_bytes:
        found.append(f"{kernel.spilled_bytes} bytes spilled")
    if not kernel.wgmma:
        found.append("no wgmma")
    if kernel.serialized:
        found.append("wgmma serialized")
    if not kernel.copies:
        found.append("no TMA copies")
    if kernel.shared_bytes > 227 * 1024:
        found.append(f"{kernel.shared_bytes} bytes of shared memory, a block has {227 * 1024}")
    return found


def test_kernels_neither_spill_nor_leave_the_tensor_cores(compiled):
    _, kernels = compiled
    for shape in SHAPES:
        names = [kernel.name for kernel in kernels[str(shape)]]
        assert names == ["kda_prepare", "kda_scan"], shape
        for kernel in kernels[str(shape)]:
            assert not faults(kernel), f"{shape}: {kernel}"


def test_two_blocks_of_prepare_fit_an_sm(compiled):
    _, kernels = compiled
    for shape in SHAPES:
        prepare = kernels[str(shape)][0]
        assert 2 * 128 * prepare.registers <= 65536
        assert 2 * (prepare.shared_bytes + 2048) <= 228 * 1024  # barriers, and what a block takes


def test_reports_are_those_of_the_table(compiled, tmp_path):
    used, kernels = compiled
    found = {
        "versions": used,
        "kernels": {name: [asdict(x) for x in rows] for name, rows in kernels.items()},
    }
    written = tmp_path / "kernels.json"
    written.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(TABLE.read_text()), f"if the change is meant: cp {written} {TABLE}"


def test_a_spill_a_missing_wgmma_and_a_serialized_one_are_faults():
    good = Kernel("k", 200, 0, 1024, wgmma=8, copies=2, serialized=False)
    assert not faults(good)
    for changed in (
        {"spilled_bytes": 4},
        {"wgmma": 0},
        {"serialized": True},
        {"copies": 0},
        {"shared_bytes": 240_000},
    ):
        assert faults(Kernel(**asdict(good) | changed))
