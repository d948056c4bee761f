"""Read a converted directory again and compare it with its ledger, leaf by leaf."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .conveyor import Digest, Hashers, Job, convey
from .database import one_line, open_array, pieces_of
from .ledger import LEDGER, LedgerLine, read_ledger
from .manifest import check_manifest
from .orbax import leaf_paths, require_converted

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

    Every leaf is read by plain TensorStore, in pieces, and hashed; so is every small file.
    With `quick` only what is there is compared: names, dtypes, shapes and file sizes. `progress`
    is called with (bytes read, bytes in all, leaf). Raises CheckpointError if `dst` is no Orbax
    directory at all, or one that `save` wrote; whatever else is wrong is a problem of the report.
    """
    directory = require_converted(Path(dst))
    problems = list(check_manifest(directory, quick))
    try:
        header, ledger = read_ledger(directory)
    except CheckpointError as error:
        return VerifyReport(directory, 0, (*problems, str(error)))
    if header.leaves != len(ledger):
        problems.append(f"{LEDGER}: has {len(ledger)} leaves, {header.leaves} were written")
    problems += _structure(directory, ledger)

    stored = [line for line in ledger.values() if not line.empty]
    leaves = [_Leaf(directory, line) for line in stored]
    if quick:
        for leaf in leaves:
            leaf.open()
    else:
        _hash(leaves, progress)
    problems += [leaf.problem for leaf in leaves if leaf.problem is not None]
    return VerifyReport(directory, len(stored), tuple(problems))


def _hash(leaves: list[_Leaf], progress: Progress | None) -> None:
    """Read all leaves whose headers are in order, and compare their hashes."""
    total, read = sum(leaf.line.nbytes for leaf in leaves), 0

    def advance(leaf: _Leaf, nbytes: int) -> None:
        nonlocal read
        read += nbytes
        if progress is not None:
            progress(read, total, leaf.line.path)

    hashers = Hashers()
    try:
        convey(
            job for leaf in leaves for job in leaf.jobs(hashers, functools.partial(advance, leaf))
        )
    finally:
        hashers.close()


class _Leaf:
    """A leaf that is compared with its line; `problem` says what is wrong with it."""

    def __init__(self, directory: Path, line: LedgerLine):
        self.line = line
        self.problem: str | None = None
        self._opening = open_array(directory, line.path)

    def open(self) -> Any:
        """The array, if it is there and says of itself what the line says of it."""
        line = self.line
        try:
            array = self._opening.result()
        except (ValueError, OSError) as error:
            self.problem = f"{line.path}: cannot be read: {one_line(error)}"
            return None
        self.problem = line.mismatch(array.dtype.name, array.shape)
        return None if self.problem else array

    def jobs(self, hashers: Hashers, advance: Callable[[int], None]) -> Iterator[Job]:
        """Read and hash piece by piece; the last one compares."""
        array = self.open()
        digest = Digest(hashers)
        pieces = [] if array is None else pieces_of(array)
        left = self.line.nbytes
        for piece in pieces:
            nbytes = piece.size * piece.dtype.numpy_dtype.itemsize
            left -= nbytes
            yield Job(
                nbytes=nbytes,
                read=functools.partial(self._read, piece),
                use=lambda read: [] if read is None else [digest.update(read)],
                done=functools.partial(advance, nbytes),
            )
        yield Job(
            nbytes=0,
            read=lambda: None,
            use=lambda _: (),
            done=functools.partial(self._compare, digest, left, advance),
        )

    def _read(self, piece: Any) -> np.ndarray | None:
        if self.problem is not None:
            return None
        try:
            return piece.read().result()
        except (ValueError, OSError) as error:
            self.problem = f"{self.line.path}: cannot be read: {one_line(error)}"
            return None

    def _compare(self, digest: Digest, left: int, advance: Callable[[int], None]) -> None:
        if self.problem is None and digest.hexdigest() != self.line.sha256:
            self.problem = f"{self.line.path}: its bytes are not those that were written"
        if left:
            advance(left)


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
