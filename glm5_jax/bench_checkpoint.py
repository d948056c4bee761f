"""Conversion timed beside a plain copy and beside transformers, and rehearsed at full size.

Everything is written below the directory for temporary files, which TMPDIR names. Files are on the
disk at the end of each turn, and the source is dropped from the system's cache before it, so that
all sides read it from the disk.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_jax.bench import Timing
from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.ledger import read_ledger
from glm5_jax.checkpoint.rehearsal import LAYOUTS, write_rehearsal
from glm5_jax.checkpoint.tiny import packaged_config

COPY_BYTES = 16 * 2**20
GOAL = 0.7

# Layers of the release's own sizes, but for fewer experts and a shorter vocabulary: one KDA layer
# with a dense FFN, one with experts, one of DSA.
FEW_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "full", "full"],
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 24,
    "vocab_size": 16384,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Rate(Timing):
    """A timing of something done to that many bytes."""

    nbytes: int = 0

    def __str__(self) -> str:
        ours, peer = (self.nbytes / seconds / 1e9 for seconds in (self.ours, self.peer))
        return f"{self.what}: {ours:.2f} GB/s, {self.peer_name}: {peer:.2f} GB/s; {self.verdict}"


def time_conversion(repeats: int) -> list[Timing]:
    """Convert a few layers, BF16 to BF16, in turn with both peers; each side's best turn."""
    with tempfile.TemporaryDirectory() as directory:
        source = write_rehearsal(Path(directory) / "source", _few_layers(), LAYOUTS["bf16"])
        nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        sides: dict[str, Callable[[Path, Path], Any]] = {
            "ours": convert,
            "copy": _plain_copy,
            "transformers": _transformers_round_trip,
        }
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(repeats):
            for name, side in sides.items():
                out = Path(directory) / "out"
                _drop_from_cache(source)
                start = time.perf_counter()
                side(source, out)
                best[name] = min(best[name], time.perf_counter() - start)
                shutil.rmtree(out)
    what = f"convert, {nbytes / 1e9:.1f} GB BF16"
    return [
        Rate(what, best["ours"], best["copy"], "read, SHA-256, write, fsync", GOAL, nbytes),
        Rate(what, best["ours"], best["transformers"], "transformers load and save", None, nbytes),
    ]


def _few_layers() -> dict[str, Any]:
    raw = json.loads(packaged_config("glm5_3_flash").read_text())
    text = raw["text_config"] | FEW_LAYERS
    text["linear_attn_config"] = {
        name: value
        for name, value in text["linear_attn_config"].items()
        if not name.endswith("_layers")
    }
    return raw | {"text_config": text}


def _drop_from_cache(source: Path) -> None:
    for file in source.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # what is not on the disk yet can't be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _plain_copy(source: Path, out: Path) -> None:
    """What reading, hashing once and writing the same bytes takes at least, one after the other."""
    out.mkdir()
    buffer = memoryview(bytearray(COPY_BYTES))
    for file in sorted(source.glob("*.safetensors")):
        digest = hashlib.sha256()
        with open(file, "rb", buffering=0) as read, open(out / file.name, "wb", 0) as write:
            while count := read.readinto(buffer):
                digest.update(buffer[:count])
                write.write(buffer[:count])
            os.fsync(write.fileno())


def _transformers_round_trip(source: Path, out: Path) -> None:
    import torch

    from glm5_jax.numerics.oracle import oracle_module, quiet

    with quiet():
        model = oracle_module().Glm5NextForConditionalGeneration.from_pretrained(
            str(source), dtype=torch.bfloat16
        )
        model.save_pretrained(str(out))
    for file in out.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@dataclass(frozen=True)
class Rehearsal:
    """What a command did to a directory of full size: its time, and its peak of memory."""

    what: str
    nbytes: int
    seconds: float
    peak: int
    largest: int

    @property
    def bound(self) -> float:
        """Memory that the command may take: 1.5 times the largest array, and 1 GB."""
        return 1.5 * self.largest + 1e9

    @property
    def reached(self) -> bool:
        """Whether the memory is within its bound."""
        return self.peak <= self.bound

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.nbytes / 1e9:.1f} GB in {self.seconds:.1f} s, "
            f"{self.nbytes / self.seconds / 1e9:.2f} GB/s; peak memory {self.peak / 1e9:.2f} GB, "
            f"largest array {self.largest / 1e9:.2f} GB, bound {self.bound / 1e9:.2f} GB "
            f"{'kept' if self.reached else 'BROKEN'}"
        )


_CHILD = """
import sys, time
from glm5_jax.checkpoint.{module} import {name}
start = time.perf_counter()
{name}({arguments})
print(time.perf_counter() - start)
# Not ru_maxrss: a child that was just forked has its parent's, and keeps it as its peak.
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


def rehearse(layers: str = "0,3") -> Iterator[Rehearsal]:
    """Convert, verify and export layers of the release's own size, in each of the six layouts.

    Layers 0 and 3 are one of KDA with a dense FFN and one of DSA with 288 experts; with them come
    embedding and head. In BF16 that is 18 GB, read from the disk, and in two copies at most at
    once. What is quantised is also converted to bfloat16. Each command runs in a process of its
    own.
    """
    config = json.loads(packaged_config("glm5_3_flash").read_text())
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            source, orbax, back = root / "source", root / "orbax", root / "back"
            write_rehearsal(source, config, layout, layers)
            if layout.quantization != "none":
                _drop_from_cache(source)
                options = {"layers": layers, "dtype": "bfloat16"}
                what = f"convert to bfloat16, {name}"
                yield _rehearsal(what, orbax, "convert", source, orbax, **options)
                shutil.rmtree(orbax)
            _drop_from_cache(source)
            yield _rehearsal(f"convert, {name}", orbax, "convert", source, orbax, layers=layers)
            shutil.rmtree(source)
            yield _rehearsal(f"verify, {name}", orbax, "verify", orbax)
            yield _rehearsal(f"export, {name}", orbax, "export", orbax, back)


def _rehearsal(what: str, orbax: Path, name: str, *paths: Path, **options: str) -> Rehearsal:
    """Run a command; sizes are those of what the Orbax directory holds."""
    seconds, peak = _run(name, *paths, **options)
    sizes = [line.nbytes for line in read_ledger(orbax)[1].values()]
    return Rehearsal(what, sum(sizes), seconds, peak, max(sizes))


def _run(name: str, *paths: Path, **options: str) -> tuple[float, int]:
    """Seconds and peak memory in bytes of a call in a process of its own."""
    arguments = [repr(str(path)) for path in paths] + [f"{k}={v!r}" for k, v in options.items()]
    code = _CHILD.format(module=name, name=name, arguments=", ".join(arguments))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    seconds, kilobytes = done.stdout.split()
    return float(seconds), int(kilobytes) * 1024
