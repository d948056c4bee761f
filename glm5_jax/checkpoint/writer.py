"""Safetensors files whose tensors are known beforehand and filled in any order, and in parts.

Headers are written first, so a tensor larger than the memory needs no more of it than the part that
is at hand. A directory appears whole or not at all. No JAX here.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from .durable import flush, flush_entry
from .header import DTYPES
from .reader import INDEX

SHARD_BYTES = 5 * 10**9
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Bytes from `5GB`, `500 MB` or `1000000`; CheckpointError if it is no such size."""
    number = text.strip().upper().rstrip("KMGTB")
    unit = text.strip().upper().removeprefix(number)
    if not number.strip().isdecimal() or unit not in _UNITS or not int(number):
        raise CheckpointError(f"size: expected one like 5GB or 500MB, got {text!r}")
    return int(number) * _UNITS[unit]


class Declared(NamedTuple):
    """A tensor that is to be written: its dtype in the format's own word, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8


class _Place(NamedTuple):
    file: str
    offset: int


class TensorFiles:
    """The weight files of a directory: one, or some of about `shard_bytes` with an index."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, Declared], shard_bytes: int = SHARD_BYTES
    ):
        self.directory = directory
        self._tensors = tensors
        self._places: dict[str, _Place] = {}
        shards = _shards(tensors, shard_bytes)
        for number, names in enumerate(shards, 1):
            several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._begin(several if len(shards) > 1 else "model.safetensors", names)
        self.files = sorted({place.file for place in self._places.values()})

    def _begin(self, file: str, names: list[str]) -> None:
        """Write the header of a file, and give it its length."""
        # transformers refuses a file that does not name its format.
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            tensor, begin = self._tensors[name], end
            end += tensor.nbytes
            header[name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        start = 8 + len(raw)
        with open(self.directory / file, "wb") as stream:
            stream.write(struct.pack("<Q", len(raw)) + raw)
            stream.truncate(start + end)
        at = start
        for name in names:
            self._places[name] = _Place(file, at)
            at += self._tensors[name].nbytes

    def write(self, name: str, data: np.ndarray, start: int = 0) -> None:
        """Write some elements of a tensor, from flat element `start` on; from any thread."""
        place = self._places[name]
        offset = place.offset + start * data.dtype.itemsize
        view = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        descriptor = os.open(self.directory / place.file, os.O_WRONLY)
        try:
            while view:
                done = os.pwrite(descriptor, view, offset)
                view, offset = view[done:], offset + done
        finally:
            os.close(descriptor)

    def write_index(self) -> None:
        """Write the index, if there is more than one file."""
        if len(self.files) > 1:
            total = sum(tensor.nbytes for tensor in self._tensors.values())
            weight_map = {name: place.file for name, place in sorted(self._places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
            (self.directory / INDEX).write_text(text, encoding="utf-8")


def _shards(tensors: Mapping[str, Declared], shard_bytes: int) -> list[list[str]]:
    """Tensors by file, in order, none larger than `shard_bytes` unless one tensor is."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


@contextmanager
def whole_directory(dst: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `dst` if nothing is raised and is gone otherwise.

    All of it is on the disk by then. What a killed process left behind is dropped. Raises
    CheckpointError if `dst` is there and not an empty directory, if another process is writing it,
    and for what can't be written.
    """
    if os.path.lexists(dst) and not (dst.is_dir() and not any(dst.iterdir())):
        raise CheckpointError(f"{dst}: exists already; choose another destination or delete it")
    partial = dst.with_name(f"{dst.name}.writing")
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(dst, error) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{dst}: another process is writing it") from None
        except OSError:
            pass  # a file system without locks
        try:
            _empty(partial)
            yield partial
            flush(partial)
            os.replace(partial, dst)
            flush_entry(dst.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise _unwritable(dst, error) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _unwritable(dst: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{dst}: cannot be written: {error.strerror or error}")
