"""The arrays below an Orbax directory: how they are written, chunk by chunk, and read.

Orbax keeps the arrays of a tree in one database (TensorStore's OCDBT) under ``state/``, each as a
zarr array under its dotted name. Only the tree itself is left to Orbax here: it takes an array only
whole, so it would hold all of a stack of experts, and a second time while it encodes the chunks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from .company import distributed_process
from .ledger import tree_keys

STATE = "state"
TREE = f"{STATE}/_METADATA"


class Database:
    """A new database in an empty directory, written by nobody else."""

    def __init__(self, directory: Path):
        import tensorstore

        self.directory = directory
        # Shared by all arrays, or each would commit its chunks alone, and find out of the others'.
        self._context = tensorstore.Context()
        self._opening: list[Any] = []

    def create(
        self, path: str, shape: tuple[int, ...], dtype: np.dtype, chunk: tuple[int, ...]
    ) -> Any:
        """A future of a TensorStore handle on a new array, to be written chunk by chunk.

        Each chunk has a checksum: whoever restores it, plain Orbax too, notices a flipped bit.
        """
        import tensorstore

        little = {"name": "bytes", "configuration": {"endian": "little"}}
        metadata = {
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "codecs": [little, {"name": "crc32c"}],
        }
        spec = _array_spec(self.directory, path) | {
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        self._opening.append(tensorstore.open(spec, create=True, context=self._context))
        return self._opening[-1]

    def settle(self) -> None:
        """Wait until nothing is being created any more, whatever has become of it."""
        for future in self._opening:
            with suppress(OSError, ValueError):
                future.result()


def open_array(directory: Path, path: str) -> Any:
    """A future of a TensorStore handle on an array of an Orbax directory, to be read.

    Its result, or that of a read, raises ValueError for what is missing or damaged.
    """
    import tensorstore

    # Without this, a chunk that is not there reads as zeros.
    spec = _array_spec(directory / STATE, path) | {"fill_missing_data_reads": False}
    return tensorstore.open(spec, read=True)


def pieces_of(array: Any) -> list[Any]:
    """An opened array in parts that are read at once: its chunks, along the first axis."""
    if array.rank == 0:
        return [array]
    rows, total = array.chunk_layout.read_chunk.shape[0], array.shape[0]
    return [array[first : min(first + rows, total)] for first in range(0, total, rows)]


def _array_spec(database: Path, path: str) -> dict[str, Any]:
    name = ".".join(tree_keys(path))
    return {"driver": "zarr3", "kvstore": _database_spec(database) | {"path": f"{name}/"}}


def _database_spec(directory: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}


def nested_tree(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The tree that Orbax is given, of arrays by path."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        node = tree
        *parents, last = tree_keys(path)
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def write_tree(directory: Path, paths: Iterable[str]) -> None:
    """Let Orbax write a tree with arrays of those paths, and take its (empty) arrays out again."""
    save = save_tree if distributed_process() is None else _save_tree_apart
    save(str(directory), list(paths))
    for entry in (directory / STATE).iterdir():
        if entry != directory / TREE:
            remove(entry)


def save_tree(directory: str, paths: list[str]) -> None:
    """Have Orbax save arrays of one byte at those paths."""
    from orbax.checkpoint import v1 as ocp

    ocp.save(directory, nested_tree(dict.fromkeys(paths, np.zeros(1, np.uint8))))


def _save_tree_apart(directory: str, paths: list[str]) -> None:
    """`save_tree` in a process of its own, which is in no `jax.distributed` run.

    In one, Orbax saves only if all processes do at once, and here each can be the one that does.
    """
    script = f"import json, sys; from {__name__} import save_tree; save_tree(*json.load(sys.stdin))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([directory, paths]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"Orbax: {done.stderr.strip().rpartition(chr(10))[2]}")


def merge_databases(databases: list[Path], parent: Path) -> None:
    """Make one database of some that lie below it: a copy of their indices, not of the arrays."""
    import tensorstore

    context = tensorstore.Context()  # one for all: only then is it their indices that are copied
    transaction = tensorstore.Transaction(atomic=True)
    whole = tensorstore.KvStore.open(_database_spec(parent), context=context).result()
    opening = [
        tensorstore.KvStore.open(_database_spec(path), context=context) for path in databases
    ]
    copies = [
        part.result().experimental_copy_range_to(whole.with_transaction(transaction))
        for part in opening
    ]
    for copy in copies:
        copy.result()
    transaction.commit_sync()


def remove(path: Path) -> None:
    """Delete a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def one_line(error: Exception) -> str:
    """What TensorStore or Orbax says, without the pages that follow."""
    return " ".join(str(error).split()).partition(" [tensorstore_spec")[0][:300]
