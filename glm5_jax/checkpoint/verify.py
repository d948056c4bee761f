"""Read a converted directory again and compare it with its ledger, leaf by leaf."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by name once it is imported)
import numpy as np

from ..errors import CheckpointError
from .ledger import LEDGER, LedgerLine, read_ledger, sha256
from .manifest import check_manifest
from .orbax import leaf_paths, one_line, open_array, require_orbax

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class VerifyReport:
    """`problems` has one line for each thing that is wrong; `checked` counts leaves compared."""

    directory: Path
    checked: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the directory is, byte for byte, what was written."""
        return not self.problems


def verify(
    dst: str | os.PathLike[str], quick: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Compare an Orbax directory of ours with its ledger.

    Every leaf is read by plain TensorStore, one at a time, and hashed; so is every small file.
    With `quick` only what is there is compared: names, dtypes, shapes and file sizes. `progress`
    is called with (bytes read, bytes in all, leaf). Raises CheckpointError if `dst` is no Orbax
    directory at all; whatever else is wrong is a problem of the report.
    """
    directory = require_orbax(Path(dst))
    problems = list(check_manifest(directory, quick))
    try:
        header, ledger = read_ledger(directory)
    except CheckpointError as error:
        return VerifyReport(directory, 0, (*problems, str(error)))
    if header.leaves != len(ledger):
        problems.append(f"{LEDGER}: has {len(ledger)} leaves, {header.leaves} were written")
    problems += _structure(directory, ledger)

    stored = [line for line in ledger.values() if not line.empty]
    total, done = sum(_nbytes(line) for line in stored), 0
    for line in stored:
        problems += _leaf(directory, line, quick)
        done += _nbytes(line)
        if progress is not None:
            progress(done, total, line.path)
    return VerifyReport(directory, len(stored), tuple(problems))


def _structure(directory: Path, ledger: dict[str, LedgerLine]) -> Iterator[str]:
    """Compare the names in the tree that Orbax restores with those of the ledger."""
    try:
        paths = leaf_paths(directory)
    except CheckpointError as error:
        yield str(error)
        return
    stored = {path for path, line in ledger.items() if not line.empty}
    yield from (
        f"{path}: a leaf without a line in {LEDGER}" for path in paths if path not in stored
    )
    for path in sorted(stored - set(paths)):
        yield f"{path}: in {LEDGER}, but not in the tree of the checkpoint"


def _leaf(directory: Path, line: LedgerLine, quick: bool) -> Iterator[str]:
    try:
        array = open_array(directory, line.path).result()
        if array.shape != line.shape or array.dtype.name != line.dtype:
            yield (
                f"{line.path}: expected {line.dtype} {list(line.shape)}, "
                f"the array is {array.dtype.name} {list(array.shape)}"
            )
        elif not quick and sha256(array.read().result()) != line.sha256:
            yield f"{line.path}: its bytes are not those that were written"
    except (ValueError, OSError) as error:
        yield f"{line.path}: cannot be read: {one_line(error)}"


def _nbytes(line: LedgerLine) -> int:
    return math.prod(line.shape) * np.dtype(line.dtype).itemsize
