"""What is on disk in an Orbax directory, and how its arrays are read one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from .ledger import tree_keys, tree_path
from .staging import JOURNAL, unfinished_directory

_MARKERS = ("_CHECKPOINT_METADATA", "orbax.checkpoint")


class StoredLeaf(NamedTuple):
    """An array as Orbax's metadata describes it; `abstract` is what Orbax takes to load it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    abstract: Any


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


def require_orbax(path: Path) -> Path:
    """The absolute path of an Orbax directory; CheckpointError if it is none."""
    if not is_orbax(path):
        raise CheckpointError(f"{path}: not an Orbax directory (no {_MARKERS[0]} in it)")
    return path.resolve()


def stored_leaves(directory: Path) -> dict[str, StoredLeaf]:
    """Every array of an Orbax directory by ledger path, from its metadata alone.

    Layers are in numeric order: as keys they come back as strings, 10 before 2. Raises
    CheckpointError if Orbax cannot read the metadata.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        tree = ocp.metadata(directory).metadata
    except (
        Exception
    ) as error:  # Orbax lets anything out: KeyError, JSON and Unicode errors, its own
        raise CheckpointError(f"{directory}: Orbax cannot read it: {_one_line(error)}") from error
    found: dict[str, StoredLeaf] = {}

    def walk(node: Any, keys: tuple[str, ...]) -> None:
        if isinstance(node, dict):
            for key in sorted(node, key=_numbers_as_numbers):
                walk(node[key], (*keys, str(key)))
        elif hasattr(node, "shape") and hasattr(node, "dtype"):
            found[tree_path(keys)] = StoredLeaf(tuple(node.shape), np.dtype(node.dtype), node)
        else:
            raise CheckpointError(
                f"{directory}: {tree_path(keys)} is {type(node).__name__}, expected an array"
            )

    walk(tree, ())
    return found


def load_arrays(directory: Path, leaves: dict[str, StoredLeaf]) -> dict[str, np.ndarray]:
    """Read some arrays of an Orbax directory, those alone; CheckpointError if one is damaged."""
    from orbax.checkpoint import v1 as ocp

    wanted: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = wanted
        *parents, last = tree_keys(path)
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf.abstract
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            tree = ocp.load(directory, wanted)
    except Exception as error:  # as above
        raise CheckpointError(f"{directory}: cannot be restored: {_one_line(error)}") from error
    return {path: np.asarray(_at(tree, tree_keys(path))) for path in leaves}


def open_array(directory: Path, path: str) -> Any:
    """A TensorStore handle on one array of an Orbax directory; ValueError if it is damaged."""
    import tensorstore

    name = ".".join(tree_keys(path))
    base = {"driver": "file", "path": f"{directory / 'state'}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    # Without this, a chunk that is not there reads as zeros.
    spec = {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}
    return tensorstore.open(spec, read=True).result()


def _numbers_as_numbers(key: Any) -> tuple[int, str]:
    text = str(key)
    return (int(text), text) if text.isdecimal() else (-1, text)


def _at(tree: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {text[:300]}"
