"""Every kernel that the model can call compiles for an H200, without one: no spills, tensor cores.

The numbers of the assembler's report are kept in `golden/kernels.json` and may not change unseen.
And what no interpreter runs, the addresses of rows gathered by threads, is computed from the code.
Needs the extra `aot` (JAX 0.11.2's CUDA plugin) and ptxas. Where they are missing the gate is
skipped, unless GLM5_JAX_GATES is set, as it is in CI.
"""

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from pallas_kernels.aot import CannotCompile, Kernel, compile_kernels, versions
from pallas_kernels.aot_calls import KDAShape, SparseMLAShape

TABLE = Path(__file__).parents[1] / "golden" / "kernels.json"
# The state is always an input: without one of its own, a call passes zeros.
KDA = [
    KDAShape(B=B, T=T, packed=packed)
    for B in (1, 4)
    for T in (64, 4096, 65536)
    for packed in (False, True)
]
SPARSE_MLA = [
    *(SparseMLAShape(B=B) for B in (1, 8, 128)),  # 33 parts, 11 parts, whole
    SparseMLAShape(B=8, T=4, A=8, paged=True),
    SparseMLAShape(B=44, W=9216),  # as many tiles as a part can have
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    try:
        used = versions()
    except CannotCompile as error:
        if "GLM5_JAX_GATES" in os.environ:
            pytest.fail(str(error))
        pytest.skip(str(error))
    dump = tmp_path_factory.mktemp("dump")
    kernels = compile_kernels("h200", [*KDA, *SPARSE_MLA], dump)
    codes = sorted(dump.glob("sparse_mla_*.ptx"), key=lambda path: int(path.stem.split("_")[2]))
    codes = [path.read_text() for path in codes]  # in the order of the shapes
    shutil.rmtree(dump)
    return used, kernels, codes


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
    _, kernels, _ = compiled
    for shape in [*KDA, *SPARSE_MLA]:
        names = [kernel.name for kernel in kernels[str(shape)]]
        assert names == (["kda_prepare", "kda_scan"] if shape in KDA else ["sparse_mla"]), shape
        for kernel in kernels[str(shape)]:
            assert not faults(kernel), f"{shape}: {kernel}"
            assert bool(kernel.pieces) == (shape in SPARSE_MLA)  # its rows are gathered


def test_two_blocks_of_prepare_fit_an_sm(compiled):
    _, kernels, _ = compiled
    for shape in KDA:
        prepare = kernels[str(shape)][0]
        assert 2 * 128 * prepare.registers <= 65536
        assert 2 * (prepare.shared_bytes + 2048) <= 228 * 1024  # barriers, and what a block takes


def test_reports_are_those_of_the_table(compiled, tmp_path):
    used, kernels, _ = compiled
    found = {
        "versions": used,
        "kernels": {name: [asdict(x) for x in rows] for name, rows in kernels.items()},
    }
    written = tmp_path / "kernels.json"
    written.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(TABLE.read_text()), f"if the change is meant: cp {written} {TABLE}"


def test_a_spill_a_missing_wgmma_and_a_serialized_one_are_faults():
    good = Kernel("k", 200, 0, 1024, wgmma=8, copies=2, pieces=0, serialized=False)
    assert not faults(good)
    for changed in (
        {"spilled_bytes": 4},
        {"wgmma": 0},
        {"serialized": True},
        {"copies": 0},
        {"shared_bytes": 240_000},
    ):
        assert faults(Kernel(**asdict(good) | changed))


class GatherCode:
    """The addresses of 16-byte copies in PTX, as the code itself computes them.

    A register has the value of its first definition in the text, which in a loop is that of the
    first time around.
    """

    definition = re.compile(r"^\s*([a-z][\w.:]*)\s+(%\w+), (.+);$", re.M)
    copy = re.compile(
        r"cp\.async\.cg\.shared\.global\S* \[(%\w+) \+ (\d+)\], \[(%\w+) \+ (\d+)\], 16, (%\w+);"
    )

    def __init__(self, ptx, block):
        self.definitions = {}
        for op, name, operands in self.definition.findall(ptx):
            self.definitions.setdefault(name, (op, operands.split(", ")))
        self.copies = [
            (to, int(further), source, int(further_source), size)
            for to, further, source, further_source, size in self.copy.findall(ptx)
        ]
        # Parameters and shared memory begin at 0.
        self.given = {"__dynamic_shmem__0": 0, "%ctaid.x": block, "%ctaid.y": 0, "%ctaid.z": 0}

    def piece(self, copy, thread, load):
        """Where one thread copies from and to, and how much; `load` reads shared memory."""
        to, further, source, further_source, size = copy
        known = self.given | {"%tid.x": thread}
        to, source, size = (self.value(name, known, load) for name in (to, source, size))
        return to + further, source + further_source, size

    def value(self, x, known, load):
        if x in known:
            return known[x]
        if not x.startswith("%"):
            return int(x, 0)
        op, operands = self.definitions[x]
        known[x] = self.result(op, operands, lambda x: self.value(x, known, load), load)
        return known[x]

    def result(self, op, operands, value, load):
        if op.startswith("ld.param"):
            return 0
        if op == "ld.shared.b32":
            address, _, offset = operands[0].strip("[]").partition("+")
            return load(value(address) + int(offset or 0))
        a, *rest = (value(x) for x in operands)
        name, *kinds = op.split(".")
        match name, *kinds:
            case ["setp", "lt", "u32"]:
                return int(a < rest[0])
            case ["mul", "wide", "u32"]:
                return a * rest[0]
            case ["selp", _]:
                return a if rest[1] else rest[0]
            case ["mov" | "cvt", *_]:
                found = a
            case ["add", _]:
                found = a + rest[0]
            case ["and", _]:
                found = a & rest[0]
            case ["or", _]:
                found = a | rest[0]
            case ["xor", _]:
                found = a ^ rest[0]
            case ["shl", _]:
                found = a << rest[0]
            case ["shr", "u32" | "u64"]:
                found = a >> rest[0]
            case _:
                raise NotImplementedError(f"{op} {', '.join(operands)}")
        return found % 2 ** int(kinds[0][1:])


def test_threads_gather_each_piece_of_each_row_and_nothing_for_holes(compiled, tile_places):
    """Every copy of every thread, computed from the code of the kernel that is compiled."""
    shape, token = SparseMLAShape(B=128), 3
    ptx = compiled[2][[str(x) for x in SPARSE_MLA].index(str(shape))]
    code = GatherCode(ptx, block=token)
    rows = np.random.default_rng(0).permutation(shape.S)[:64]
    rows[[5, 17, 40, 63]] = -1, shape.S, shape.S + 5, -(2**31)
    assert code.copies
    assert len(code.copies) % 32 == 0  # the loop's, and those that were taken out of it
    for first in range(0, len(code.copies), 32):
        copies = code.copies[first : first + 32]
        found, start = {}, []

        def index(address, start=start):
            start[:] = start or [address]  # the first thread reads the first row's
            row, rest = divmod(address - start[0], 4)
            assert rest == 0
            return int(rows[row]) % 2**32

        for thread in range(256, 384):  # of the third warpgroup
            for copy in copies:
                to, source, size = code.piece(copy, thread, index)
                found[to] = source, size
        tile = min(found)
        assert tile % 1024 == 0
        for (row, piece), place in np.ndenumerate(tile_places):
            source, size = found.pop(tile + place)
            if 0 <= rows[row] < shape.S:
                assert size == 16
                assert source == ((token * shape.S + rows[row]) * 64 + piece) * 16
            else:
                assert size == 0
        assert not found
