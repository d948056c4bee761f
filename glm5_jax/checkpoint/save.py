"""A model in memory becomes an Orbax directory, as `convert` makes one of safetensors.

Orbax writes: each process the parts that its devices have, of what several have the first one.
It writes beside the destination, in ``DEST.saving``; what is complete is renamed into place. So
there is all of the new directory at the destination, or what was there before; what a killed save
has left beside it the next one drops.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from flax import nnx
from jax.errors import JaxRuntimeError
from orbax.checkpoint import v1 as ocp

from ..config_json import config_json
from ..errors import CheckpointError
from ..model import TextModel
from ..processes import first_alone
from .database import TREE, nested_tree, one_line, remove
from .durable import flush
from .orbax import is_orbax
from .staging import CONFIG, place_directory

CHUNK_BYTES = 32 * 2**20  # what a process that wants a part of an array reads at once
_LOCK = "lock"
_TREE = "tree"
_WHOLE = "whole"


def save(model: TextModel, path: str | os.PathLike[str], force: bool = False) -> Path:
    """Write a model to an Orbax directory that `load` opens, on any number of devices.

    The tree is that of `convert`: plain Orbax restores it, and quantised weights stay as they are.
    There is no ledger, since no source is accounted for, so nothing for `verify` to compare with;
    a tokenizer's files are not the model's, and not there either. `force` replaces an Orbax
    directory that is there, once the new one is complete.

    Where several processes have the model, each calls this, with the same path on a disk that all
    of them see. Returns when all is written.

    Raises:
        CheckpointError: one line, in every process: the destination exists, another save is at work
            there, each process has a model of its own, something cannot be written, or another
            process is gone.
    """
    path = Path(path).resolve()
    arrays = {
        ".".join(map(str, name)): variable.get_value()
        for name, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.Variable)
    }
    own = any(array.is_fully_addressable for array in arrays.values())
    if own and jax.process_count() > 1:
        raise CheckpointError(
            f"{path}: each of {jax.process_count()} processes has a model of its own; "
            "load it over a mesh of all devices (mesh=...), or save it from one process alone"
        )
    place = _Place(path, force)
    try:
        first_alone(place.take)
        _write(place.root / _WHOLE, arrays)
        _write(place.root / _TREE, {name: np.zeros(1, np.uint8) for name in arrays})
        config = json.dumps(config_json(model.config), indent=2)
        first_alone(lambda: place.fill(config))
    except JaxRuntimeError as error:
        raise CheckpointError(
            f"{path}: not saved, another process cannot be reached: {one_line(error)}"
        ) from error
    finally:
        place.let_go()
    return path


class _Place:
    """The destination, and the directory beside it that one process alone looks after."""

    def __init__(self, path: Path, force: bool):
        self.path, self.force = path, force
        self.root = path.with_name(f"{path.name}.saving")
        self._lock: IO[bytes] | None = None

    def take(self) -> None:
        """Check the destination; hold the directory, and drop what a killed save left in it."""
        if os.path.lexists(self.path):
            if not is_orbax(self.path):
                raise CheckpointError(
                    f"{self.path}: exists and is not an Orbax directory; choose another destination"
                )
            if not self.force:
                raise CheckpointError(f"{self.path}: exists already; force=True replaces it")
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.root / _LOCK, "wb")  # noqa: SIM115 - held, open
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{self.path}: another save is writing it") from None
        except OSError:
            pass  # a file system without locks
        for entry in self.root.iterdir():
            if entry.name != _LOCK:
                remove(entry)

    def fill(self, config: str) -> None:
        """Put what is written at the destination, with its config, in one step."""
        whole = self.root / _WHOLE
        # Orbax notes of each array the devices that it came from, and restores it for no others.
        # As a tree of NumPy arrays, which that of `convert` is, it restores everywhere.
        os.replace(self.root / _TREE / TREE, whole / TREE)
        (whole / CONFIG).write_text(config, encoding="utf-8")
        flush(whole)
        place_directory(whole, self.path)
        remove(self.root)

    def let_go(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _write(directory: Path, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    storage = ocp.options.ArrayOptions.Saving.StorageOptions

    def chunked(_: Any, array: jax.Array | np.ndarray) -> Any:
        # An expert a chunk where a stack is large: whoever needs one reads no other.
        large_stack = array.ndim == 3 and array.nbytes > CHUNK_BYTES
        return storage(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if large_stack else ())

    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False
    # Less than a chunk is not shared out among those who have it: each shape would be compiled for.
    context.array.saving.min_slice_bytes_for_replica_parallel = CHUNK_BYTES
    context.array.saving.scoped_storage_options_creator = chunked
    context.memory.deepcopy_host_arrays = False
    try:
        with context:
            ocp.save(directory, nested_tree(arrays))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: cannot be written: {one_line(error)}") from error
