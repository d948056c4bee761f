"""What is on disk in an Orbax directory, and how its arrays are read one by one."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from .database import TREE, one_line, open_array, pieces_of
from .ledger import LEDGER, tree_path
from .manifest import MANIFEST
from .reader import ORBAX_MARKER
from .staging import JOURNAL, unfinished_directory

Part = list[int] | tuple[slice, ...] | None
"""Of an array: some rows, a slice of every dimension, or all of it."""

PIECES_AT_ONCE = 4
_MARKERS = (ORBAX_MARKER, "orbax.checkpoint")


class StoredLeaf(NamedTuple):
    """An array as it says of itself."""

    shape: tuple[int, ...]
    dtype: np.dtype


def is_orbax(path: Path) -> bool:
    """Whether a directory is a finished Orbax checkpoint, by its marker files.

    Raises CheckpointError for what is there only in an unfinished form.
    """
    if not path.exists():
        if (unfinished := unfinished_directory(path)).exists():
            raise CheckpointError(
                f"{path}: not there yet; {unfinished.name} beside it is an unfinished conversion, "
                f"run the same convert again to finish it"
            )
        raise CheckpointError(f"{path}: no such directory")
    if (path / JOURNAL).exists():
        raise CheckpointError(
            f"{path}: an unfinished conversion; run the same convert again to finish it"
        )
    return path.is_dir() and any((path / name).exists() for name in _MARKERS)


def require_converted(path: Path) -> Path:
    """The absolute path of an Orbax directory; CheckpointError if it is none."""
    if not is_orbax(path):
        if path.is_dir() and any(path.glob("*.safetensors")):
            raise CheckpointError(
                f"{path}: a safetensors directory, expected one of Orbax; `glm5-jax audit` checks "
                f"safetensors, `glm5-jax convert` makes an Orbax directory of them"
            )
        why = f"no {ORBAX_MARKER} in it" if path.is_dir() else "it is a file"
        raise CheckpointError(f"{path}: not an Orbax directory ({why})")
    if not any((path / name).exists() for name in (LEDGER, MANIFEST)):
        raise CheckpointError(
            f"{path}: has no ledger, so that nothing can be compared with its source or traced "
            f"back to it: `convert` writes one, `save` has no source and writes none"
        )
    return path.resolve()


def leaf_paths(directory: Path) -> list[str]:
    """Ledger path of every array of the tree that Orbax restores, layers in numeric order.

    Their keys come back as strings, 10 before 2. Raises CheckpointError for damaged metadata.
    """
    file = directory / TREE
    try:
        entries = json.loads(file.read_bytes())["tree_metadata"].values()
        found = [[str(key["key"]) for key in entry["key_metadata"]] for entry in entries]
        if not all(key.isprintable() for keys in found for key in keys):
            raise ValueError
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: is damaged; no tree can be read from it") from None
    found.sort(key=lambda keys: [_numbers_as_numbers(key) for key in keys])
    return [tree_path(keys) for keys in found]


def stored_leaves(directory: Path) -> dict[str, StoredLeaf]:
    """Shape and dtype of every array by ledger path; CheckpointError names one that is damaged."""
    # All are opened before the first is waited for.
    opening = {path: open_array(directory, path) for path in leaf_paths(directory)}
    found = {}
    for path, future in opening.items():
        try:
            array = future.result()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory}: {path}: {one_line(error)}") from None
        found[path] = StoredLeaf(tuple(array.shape), array.dtype.numpy_dtype)
    return found


def fill_array(directory: Path, path: str, out: np.ndarray, part: Part = None) -> None:
    """Read an array, or rows of its first axis, or a box, into `out`; CheckpointError if damaged.

    Only the chunks that hold the part are read.
    """
    # By TensorStore, not by Orbax: what that prints about a damaged array fills pages.
    import tensorstore

    try:
        stored = open_array(directory, path).result()
        target = tensorstore.array(out, copy=False, write=True)
        if part is None:
            _fill_in_pieces(target, stored)
            return
        chosen = stored[part]
        # A box keeps its place in the whole; here it begins at zero.
        target.write(chosen.translate_to[0] if isinstance(part, tuple) else chosen).result()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory}: {path} cannot be read: {one_line(error)}; "
            f"`glm5-jax verify` names all that is damaged"
        ) from None


def _fill_in_pieces(target: Any, stored: Any) -> None:
    """Some pieces at a time: all at once, TensorStore holds most of the array a second time."""
    writing: deque[Any] = deque()
    for piece in pieces_of(stored):
        if len(writing) == PIECES_AT_ONCE:
            writing.popleft().result()
        writing.append(target[piece.domain].write(piece))
    for written in writing:
        written.result()


def _numbers_as_numbers(key: Any) -> tuple[int, str]:
    text = str(key)
    return (int(text), text) if text.isdecimal() else (-1, text)
