"""GPU kernels compiled for a GPU that is not at hand, and what the assembler says of them.

Needs JAX 0.11 or newer with its CUDA 13 plugin (`pip install "glm5-jax[aot]"`), and ptxas: that of
a CUDA toolkit on the machine, or of the package nvidia-cuda-nvcc, which goes first.

The compiler's own option that turns a spilled register into an error does not see Mosaic kernels.
Their assembler's report does, and this module reads it. It reaches the compiler by the environment
of its process, so the work is done in one of its own: `python -m pallas_kernels.aot`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.aot_calls import SHAPES, Shape

# What the compiler must know of a card, in the text form of its own message.
TARGETS = {"h200": Path(__file__).with_name("h200.txtpb")}


class CannotCompile(RuntimeError):
    """What is missing to compile for a GPU, in one line."""


@dataclass(frozen=True)
class Kernel:
    """What the assembler reports of one kernel, and what it found in it."""

    name: str
    registers: int  # of a thread
    spilled_bytes: int  # stored and loaded again, and the stack frame
    shared_bytes: int  # of a block
    wgmma: int  # instructions
    copies: int  # by the copy engine (TMA)
    pieces: int  # copied by threads, 16 bytes each
    serialized: bool  # every wgmma waits for the one before it

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.shared_bytes / 1024:.0f} KiB shared memory, {self.wgmma} wgmma"
            f"{' (SERIALIZED)' if self.serialized else ''}, {self.copies} TMA copies"
            f"{f', {self.pieces} pieces gathered' if self.pieces else ''}"
        )


def compile_kernels(
    target: str, shapes: Sequence[Shape], dump: Path | None = None
) -> dict[str, list[Kernel]]:
    """The kernels of a call of each shape, compiled for a GPU of `TARGETS`.

    In the directory `dump` the compiler leaves the code and the reports, one of each for a kernel.

    Raises:
      CannotCompile: what is missing, or the compiler's own message.
    """
    if target not in TARGETS:
        raise CannotCompile(f"no target is called {target!r}; there are {', '.join(TARGETS)}")
    root = toolkit()
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "pallas_kernels.aot"],
            input=json.dumps([target, [[type(shape).__name__, asdict(shape)] for shape in shapes]]),
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "JAX_ENABLE_X64": "0",
                "JAX_TRACEBACK_FILTERING": "off",  # so that an error's last line is its message
                "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={root}",
                "MOSAIC_GPU_CUDA_ROOT": str(root),
                "MOSAIC_GPU_DUMP_TO": str(dump or directory),
                "MOSAIC_GPU_DUMP_PTX": "1",
                "MOSAIC_GPU_DUMP_PTXAS": "1",
                # Without it the compiler prints where each dump came from, for minutes.
                "LLVM_DISABLE_SYMBOLIZATION": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            capture_output=True,
            text=True,
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise CannotCompile(
            f"compiling for {target} failed: {lines[-1] if lines else 'no message'}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [Kernel(**kernel) for kernel in kernels] for name, kernels in found.items()}


def versions() -> dict[str, str]:
    """Of JAX and of ptxas, on which the reported numbers hang; raises CannotCompile."""
    done = subprocess.run(
        [toolkit() / "bin" / "ptxas", "--version"], capture_output=True, text=True, check=True
    )
    release = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    return {"jax": jax.__version__, "ptxas": release[1] if release else done.stdout.strip()}


def toolkit() -> Path:
    """The directory with bin/ptxas."""
    if jax.__version_info__ < (0, 11):
        raise CannotCompile(
            f"compiling for a GPU needs JAX 0.11 or newer, this is {jax.__version__}"
        )
    try:
        plugin = version("jax-cuda13-plugin")
    except PackageNotFoundError:
        raise CannotCompile(
            'compiling for a GPU needs the package jax-cuda13-plugin: pip install "glm5-jax[aot]"'
        ) from None
    if plugin != jax.__version__:
        raise CannotCompile(f"jax-cuda13-plugin is {plugin}, and JAX {jax.__version__}")
    nvidia = find_spec("nvidia")
    for place in (nvidia.submodule_search_locations or []) if nvidia else []:
        if (Path(place) / "cu13" / "bin" / "ptxas").exists():
            return Path(place) / "cu13"
    for nvcc in ("/usr/local/cuda/bin/nvcc", shutil.which("nvcc")):
        if nvcc and (root := Path(nvcc).resolve().parents[1]).joinpath("bin", "ptxas").exists():
            return root
    raise CannotCompile(
        "compiling for a GPU needs ptxas: a CUDA 13 toolkit, or the package nvidia-cuda-nvcc"
    )


def _compile(target: str, function: Callable[..., Any], inputs: dict[str, Any]) -> list[Kernel]:
    """In the process that has the environment; `inputs` are shapes and dtypes."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS[target].read_text(), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    inputs = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        for name, x in inputs.items()
    }
    dump = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    before = set(dump.iterdir())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(function).lower(**inputs).compile()
    for log in dump.glob("*.mlir-passes.log"):
        log.unlink()  # a hundred megabytes that nobody asked for
    reports = sorted(path for path in set(dump.iterdir()) - before if path.suffix == ".ptxas")
    return [_read(path) for path in reports]


def _read(report: Path) -> Kernel:
    text, code = report.read_text(), report.with_suffix(".ptx").read_text()
    resources = report.with_suffix(".resources.txt").read_text()

    def number(pattern: str, where: str) -> int:
        found = re.findall(pattern, where)
        if len(found) != 1:
            raise CannotCompile(f"{report.name}: expected {pattern!r} once, found {len(found)}")
        return int(found[0])

    spills = (r"(\d+) bytes stack frame", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    return Kernel(
        name=report.stem.rpartition("_")[0],
        registers=number(r"Used (\d+) registers", text),
        spilled_bytes=sum(number(pattern, text) for pattern in spills),
        shared_bytes=number(r"smem_scratch_bytes=(\d+)", resources),
        wgmma=len(re.findall(r"wgmma\.mma_async", code)),
        copies=len(re.findall(r"cp\.async\.bulk\.tensor", code)),
        pieces=len(re.findall(r"cp\.async\.cg\.shared\.global", code)),
        serialized="serialized" in text,
    )


def _main() -> None:
    target, calls = json.load(sys.stdin)
    found = {}
    for name, sizes in calls:
        shape = SHAPES[name](**sizes)
        kernels = _compile(target, shape.call, shape.inputs())
        found[str(shape)] = [asdict(kernel) for kernel in kernels]
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
