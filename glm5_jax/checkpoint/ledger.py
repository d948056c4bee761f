"""`ledger.jsonl`: where every stored leaf came from, and the hash of what was stored.

The first line is the header, every other line a leaf. Nothing in it depends on when or in how many
runs the conversion was made: two conversions of one source have the same ledger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..errors import CheckpointError
from ..specs import Naming
from .header import DTYPES

LEDGER = "ledger.jsonl"
FORMAT = 1
_ARRAYS = {dtype.name for _, dtype in DTYPES.values() if dtype is not None}
_PACKAGES = ("glm5-jax", "jax", "numpy", "orbax-checkpoint", "tensorstore")


@dataclass(frozen=True)
class LedgerSource:
    """A tensor of the source, or the part of one that went into a leaf.

    `sha256` is of the bytes that were used. `rows` is the range (on axis -2) that was used of a
    tensor that transformers fused, None for a whole tensor.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class LedgerLine:
    """A stored leaf: `transform` made it of `sources`; `sha256` is of its bytes in C order.

    The path is dotted, or ``passthrough/<name>`` for a tensor that is carried and not bound. An
    untransformed, uncast leaf hashes like its source. An array without elements is in the ledger
    alone: Orbax stores none.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    transform: str
    sha256: str
    sources: tuple[LedgerSource, ...]

    @property
    def empty(self) -> bool:
        """Whether the array has no elements, so that the checkpoint itself lacks it."""
        return 0 in self.shape

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def mismatch(self, dtype: str, shape: tuple[int, ...]) -> str | None:
        """What is wrong with an array that says this of itself."""
        if (dtype, shape) == (self.dtype, self.shape):
            return None
        return (
            f"{self.path}: expected {self.dtype} {list(self.shape)}, "
            f"the array is {dtype} {list(shape)}"
        )

    def encode(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class LedgerHeader:
    """What was converted, and what it was asked to become."""

    format: int
    naming: Naming
    quantization: str
    dtype: str
    layers: tuple[int, ...] | None
    mtp: bool
    leaves: int
    versions: dict[str, str]

    def encode(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


PASSTHROUGH = "passthrough"


def tree_keys(path: str) -> tuple[str, ...]:
    """Keys of a ledger path in the tree: a passthrough tensor's name is one key, dots and all."""
    if path.startswith(f"{PASSTHROUGH}/"):
        return (PASSTHROUGH, path.removeprefix(f"{PASSTHROUGH}/"))
    return tuple(path.split("."))


def tree_path(keys: Iterable[str]) -> str:
    """The ledger path of keys in the tree; undoes `tree_keys`."""
    first, *rest = keys
    return f"{first}/{'.'.join(rest)}" if first == PASSTHROUGH else ".".join((first, *rest))


def package_versions() -> dict[str, str]:
    """Versions of what shapes the stored bytes."""
    from .. import __version__

    return {name: __version__ if name == "glm5-jax" else version(name) for name in _PACKAGES}


def read_ledger(directory: Path) -> tuple[LedgerHeader, dict[str, LedgerLine]]:
    """The header and the lines by path.

    Raises CheckpointError, naming the file and the line, if it is missing, damaged, or of another
    format.
    """
    file = directory / LEDGER
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    decoded: list[dict[str, Any]] = []
    for number, text in enumerate(raw.splitlines(), 1):
        try:
            decoded.append(json.loads(text))
        except ValueError:
            raise CheckpointError(f"{file}: line {number} is not JSON; it is damaged") from None
    try:
        header = _header(decoded[0])
    except (IndexError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: line 1 is not the header of a ledger") from None
    if header.format != FORMAT:
        raise CheckpointError(
            f"{file}: format {header.format}, this version reads format {FORMAT}; convert again"
        )
    lines: dict[str, LedgerLine] = {}
    for number, entry in enumerate(decoded[1:], 2):
        try:
            line = _line(entry)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{file}: line {number} does not describe a leaf") from None
        if line.path in lines:
            raise CheckpointError(f"{file}: line {number}: {line.path} occurs twice")
        lines[line.path] = line
    return header, lines


def _header(entry: dict[str, Any]) -> LedgerHeader:
    layers = entry["layers"]
    header = LedgerHeader(**entry | {"layers": None if layers is None else _sizes(layers)})
    if header.naming not in get_args(Naming) or type(header.leaves) is not int:
        raise ValueError
    return header


def _line(entry: dict[str, Any]) -> LedgerLine:
    sources = tuple(_source(source) for source in entry["sources"])
    line = LedgerLine(**entry | {"shape": _sizes(entry["shape"]), "sources": sources})
    words = (line.path, line.transform, line.sha256)
    if line.dtype not in _ARRAYS or not sources or not all(map(_is_word, words)):
        raise ValueError
    return line


def _source(entry: dict[str, Any]) -> LedgerSource:
    rows = None
    if entry["rows"] is not None:
        begin, end = _sizes(entry["rows"])
        rows = (begin, end)
    source = LedgerSource(**entry | {"shape": _sizes(entry["shape"]), "rows": rows})
    words = (source.name, source.file, source.sha256)
    if source.dtype not in DTYPES or not all(map(_is_word, words)):
        raise ValueError
    return source


def _is_word(entry: Any) -> bool:
    return isinstance(entry, str) and entry.isprintable()


def _sizes(entry: list[Any]) -> tuple[int, ...]:
    if not isinstance(entry, list) or not all(type(n) is int and n >= 0 for n in entry):
        raise ValueError
    return tuple(entry)
