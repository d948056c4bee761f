"""An Orbax directory becomes safetensors again: the tensors that it was made of, bit for bit.

An array is read once, in pieces, hashed, and each piece written to where its elements belong, so no
more is held than `conveyor.IN_FLIGHT` of pieces, whatever the arrays' sizes are.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..config import ModelConfig, load_config
from ..errors import CheckpointError
from ..specs import Naming
from . import codecs
from .conveyor import PIECE_BYTES, WORKERS, Digest, Hashers, Job, Promise, convey
from .database import one_line, open_array, pieces_of
from .dtypes import dtype_word
from .export_plan import CODES, Decoded, ExportPlan, Run, plan_export
from .ledger import LEDGER, LedgerHeader, LedgerLine, read_ledger
from .manifest import check_manifest
from .orbax import require_converted
from .reader import companions
from .staging import CONFIG
from .writer import SHARD_BYTES, TensorFiles, whole_directory

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, repr=False)
class ExportReport:
    """What an export wrote. `left_out` names the tensors, by reason, that are not in it."""

    destination: Path
    naming: Naming
    dtype: str
    tensors: int
    bytes: int
    files: int
    seconds: float
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The report for a terminal."""
        rate = self.bytes / max(self.seconds, 1e-9) / 1e6
        lines = [
            f"{self.destination}: {self.tensors:,} tensors in {self.files:,} files, "
            f"{self.bytes:,} bytes in {self.seconds:.1f} s ({rate:,.0f} MB/s)",
            f"naming {self.naming} · dtype {self.dtype}",
        ]
        lines += [f"left out {len(names):,}: {why}" for why, names in self.left_out.items()]
        return "\n".join(lines)


def export(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    naming: Naming | None = None,
    dtype: str = "stored",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the safetensors directory that an Orbax directory of `convert` stands for.

    naming: ``released``, or ``native`` (transformers' module names, with fused experts and
    convolution); that of the source if None. dtype: ``stored`` gives every tensor as it is stored,
    so that of a ``stored`` conversion, in its source's naming, each comes back bit for bit, codes,
    scales and what was passed through too; any other dtype decodes what is quantised, see
    `dtypes.leaf_dtype` for what stays float32. shard_bytes: a new file is begun before one grows
    beyond that. What was converted in part is exported in part. progress is called with (bytes
    read, bytes in all, array).

    Every array is compared with its hash in the ledger on the way. Raises CheckpointError, one
    line, if `src` is no Orbax directory of ours or is damaged, and if `dst` is in the way: then
    nothing is written. `dst` appears when all of it is on the disk.
    """
    started = time.monotonic()
    dtype = dtype_word(dtype)
    if naming not in (None, *get_args(Naming)):
        raise CheckpointError(f"naming: expected 'released' or 'native', got {naming!r}")
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes: expected a positive number, got {shard_bytes}")
    directory, dst = require_converted(Path(src)), Path(dst).absolute()
    if dst.resolve().is_relative_to(directory):
        raise CheckpointError(f"{dst}: lies inside the source {src}; choose another destination")
    config = load_config(directory)
    for problem in check_manifest(directory, only=[LEDGER]):
        raise CheckpointError(f"{directory}: {problem}; `glm5-jax verify` tells all of it")
    header, ledger = read_ledger(directory)
    called = naming or header.naming
    arrays = _open(directory, header, ledger)
    plan = plan_export(config, header, ledger, called, dtype)
    with whole_directory(dst) as partial:
        files = TensorFiles(partial, plan.tensors, shard_bytes)
        _write(_Source(directory, config, ledger, arrays), plan, files, progress)
        files.write_index()
        (partial / CONFIG).write_bytes(_config(directory, header, plan, dtype))
        for name in companions(directory):
            shutil.copyfile(directory / name, partial / name)
    return ExportReport(
        destination=dst,
        naming=called,
        dtype=dtype,
        tensors=len(plan.tensors),
        bytes=sum(tensor.nbytes for tensor in plan.tensors.values()),
        files=len(files.files),
        seconds=time.monotonic() - started,
        left_out=plan.left_out,
    )


def _open(directory: Path, header: LedgerHeader, ledger: dict[str, LedgerLine]) -> dict[str, Any]:
    """Handles of all arrays that have elements, their dtypes and shapes compared."""
    if header.leaves != len(ledger):
        raise CheckpointError(
            f"{directory}: the ledger has {len(ledger)} arrays, {header.leaves} were written; "
            f"run `glm5-jax verify`"
        )
    opening = {path: open_array(directory, path) for path, x in ledger.items() if not x.empty}
    found = {}
    for path, future in opening.items():
        try:
            found[path] = future.result()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory}: {path}: {one_line(error)}") from None
        if problem := ledger[path].mismatch(found[path].dtype.name, found[path].shape):
            raise CheckpointError(f"{directory}: {problem}")
    return found


def _config(directory: Path, header: LedgerHeader, plan: ExportPlan, dtype: str) -> bytes:
    """The source's config.json, byte for byte unless the tensors are no longer what it says."""
    raw = (directory / CONFIG).read_bytes()
    decoded = header.quantization != "none" and not any(
        tensor.dtype in ("F8_E4M3", "U8") for tensor in plan.tensors.values()
    )
    became = dtype if dtype != "stored" else header.dtype
    if not decoded and became == "stored":
        return raw
    content = json.loads(raw)
    for part in (content, content.get("text_config")):
        if not isinstance(part, dict):
            continue
        if decoded:
            part.pop("quantization_config", None)
        for key in ("dtype", "torch_dtype"):
            if key in part and became != "stored":
                part[key] = became
    return (json.dumps(content, indent=2) + "\n").encode()


@dataclass(frozen=True)
class _Source:
    """The arrays that are exported, opened."""

    directory: Path
    config: ModelConfig
    ledger: dict[str, LedgerLine]
    arrays: dict[str, Any]

    def read(self, path: str, part: Any) -> np.ndarray:
        """An opened array, or a part of it."""
        try:
            return part.read().result()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.directory}: {path}: {one_line(error)}") from None

    def compare(self, path: str, digest: Digest) -> None:
        """Refuse an array that has not the hash that it was written with."""
        if digest.hexdigest() != self.ledger[path].sha256:
            raise CheckpointError(
                f"{self.directory}: {path}: its bytes are not those that were written; "
                f"`glm5-jax verify` names all that is damaged"
            )


def _write(
    source: _Source, plan: ExportPlan, files: TensorFiles, progress: Progress | None
) -> None:
    """Read every array once, and write all that is made of it."""
    total = sum(source.ledger[path].nbytes for path in source.arrays)
    read = 0

    def advance(path: str, nbytes: int) -> None:
        nonlocal read
        read += nbytes
        if progress is not None:
            progress(read, total, path)

    def jobs() -> Iterator[Job]:
        of_decoded = {x.path for leaf in plan.decoded.values() for x in leaf.lines.values()}
        for path in source.arrays:
            if path in plan.runs and path not in of_decoded:
                yield from _plain(source, plan, path, put, hashers, advance)
        for path, leaf in plan.decoded.items():
            yield from _decoding(source, path, leaf, put, hashers, advance)

    def put(path: str, begin: int, array: np.ndarray) -> list[Promise]:
        """Write a piece of an array, whose first element is number `begin`."""
        end = begin + array.size
        overlapping = [r for r in plan.runs[path] if r.begin < end and r.begin + r.length > begin]
        return [writers.submit(_put, files, plan, run, begin, array) for run in overlapping]

    hashers, writers = Hashers(), ThreadPoolExecutor(WORKERS)
    try:
        convey(jobs())
    finally:
        hashers.close()
        writers.shutdown(wait=True, cancel_futures=True)


def _put(files: TensorFiles, plan: ExportPlan, run: Run, begin: int, array: np.ndarray) -> None:
    low, high = max(begin, run.begin), min(begin + array.size, run.begin + run.length)
    data = array.reshape(-1)[low - begin : high - begin]
    code = plan.tensors[run.name].dtype
    if CODES[data.dtype] != code:
        data = data.astype(_DTYPES[code])
    files.write(run.name, data, run.start + low - run.begin)


_DTYPES = {code: dtype for dtype, code in CODES.items()}

Put = Callable[[str, int, np.ndarray], list[Promise]]
Advance = Callable[[str, int], None]


def _plain(
    source: _Source, plan: ExportPlan, path: str, put: Put, hashers: Hashers, advance: Advance
) -> Iterator[Job]:
    """An array that is written as it is, or cast."""
    digest = Digest(hashers)
    begin = 0
    for part in pieces_of(source.arrays[path]):
        nbytes = part.size * part.dtype.numpy_dtype.itemsize

        def use(array: np.ndarray, begin: int = begin) -> list[Promise]:
            return [digest.update(array), *put(path, begin, array)]

        yield Job(
            nbytes=nbytes,
            read=functools.partial(source.read, path, part),
            use=use,
            done=functools.partial(advance, path, nbytes),
        )
        begin += part.size
    yield Job(0, lambda: None, lambda _: (), functools.partial(source.compare, path, digest))


def _decoding(
    source: _Source, path: str, leaf: Decoded, put: Put, hashers: Hashers, advance: Advance
) -> Iterator[Job]:
    """The arrays of a quantised leaf, decoded: some experts at a time, or a matrix as a whole."""
    quantization = source.config.quantization
    block = None if quantization is None else quantization.weight_block_size
    shape = leaf.leaf.shape
    stack = len(shape) == 3
    expert = math.prod(shape[-2:])
    step = max(1, PIECE_BYTES // (expert * leaf.dtype.itemsize)) if stack else 1
    digests = {key: Digest(hashers) for key in leaf.lines}
    # What is small is read once, as a whole: its chunks hold many experts.
    small = {
        key: source.read(line.path, source.arrays[line.path])
        for key, line in leaf.lines.items()
        if key != "codes" and line.nbytes <= PIECE_BYTES
    }
    for key, array in small.items():
        digests[key].update(array)

    def read(rows: slice) -> tuple[dict[str, np.ndarray], np.ndarray]:
        arrays = {}
        for key, line in leaf.lines.items():
            array = small.get(key, source.arrays[line.path])
            part = array[rows] if stack else array
            arrays[key] = part if key in small else source.read(line.path, part)
            if problem := codecs.scale_problem(key, arrays[key]):
                raise CheckpointError(f"{source.directory}: {line.path}: {problem}")
        return arrays, codecs.decode(arrays, block, leaf.dtype)

    def use(piece: tuple[dict[str, np.ndarray], np.ndarray], begin: int) -> list[Promise]:
        arrays, decoded = piece
        hashed = [digests[key].update(array) for key, array in arrays.items() if key not in small]
        return [*hashed, *put(path, begin, decoded)]

    count = shape[0] if stack else 1
    whole = sum(line.nbytes for line in leaf.lines.values())
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        nbytes = whole * (rows.stop - rows.start) // count
        yield Job(
            nbytes=nbytes + (rows.stop - rows.start) * expert * leaf.dtype.itemsize,
            read=functools.partial(read, rows),
            use=functools.partial(use, begin=first * expert),
            done=functools.partial(advance, path, nbytes),
        )
    for key, line in leaf.lines.items():
        compare = functools.partial(source.compare, line.path, digests[key])
        yield Job(0, lambda: None, lambda _: (), compare)
