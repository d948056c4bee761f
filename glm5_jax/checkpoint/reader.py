"""A directory of safetensors files as one table of tensors, with nothing read until asked for.

The index is followed: a stray weight file beside it isn't opened, and a shard it names must be
there. No JAX here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np

from ..config import ModelConfig, load_config
from ..errors import CheckpointError
from .header import DTYPES, StoredTensor, decode_json, read_header

__all__ = ["DTYPES", "Checkpoint", "StoredTensor", "open_checkpoint"]

INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"
ORBAX_MARKER = "_CHECKPOINT_METADATA"
# What loaders read beside weights and config.json: of texts, of images, and when to stop.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
Box = tuple[tuple[int, int], ...]  # of an array: first and end, by dimension
UNCACHED = 2**20  # what is read once and is smaller than this may stay in the system's cache


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint by name, where their bytes lie, and what was noticed on the way.

    `files` are the weight files in use, `stray` those beside them that the index doesn't name.
    """

    directory: Path
    tensors: Mapping[str, StoredTensor]
    files: tuple[str, ...]
    stray: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @cached_property
    def config(self) -> ModelConfig:
        """The config.json of the directory; ConfigError if it is missing or not of this family."""
        return load_config(self.directory)

    def _tensor(self, tensor: str | StoredTensor) -> tuple[StoredTensor, np.dtype]:
        if isinstance(tensor, str):
            if tensor not in self.tensors:
                raise CheckpointError(f"{self.directory}: no tensor named {tensor}")
            tensor = self.tensors[tensor]
        dtype = DTYPES[tensor.dtype][1]
        if dtype is None:
            raise CheckpointError(
                f"{self.directory / tensor.file}: {tensor.name}: {tensor.dtype} has no array form"
            )
        return tensor, dtype

    def read(self, tensor: str | StoredTensor) -> np.ndarray:
        """The tensor in its stored dtype and shape, read-only, backed by a map of the file."""
        tensor, dtype = self._tensor(tensor)
        if tensor.nbytes == 0:
            return np.empty(tensor.shape, dtype)
        path = self.directory / tensor.file
        try:
            raw = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.nbytes,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {tensor.name}: cannot be read: {error}") from None
        return np.asarray(raw).view(dtype).reshape(tensor.shape)

    def read_into(
        self, tensor: str | StoredTensor, out: np.ndarray, start: int = 0, once: bool = False
    ) -> None:
        """Fill `out` with the tensor's elements from flat element `start` on.

        `out` must be C-contiguous and of the stored dtype. Bytes go straight from the file into
        it: unlike a map, nothing else of the file becomes resident. With `once` the system need
        not cache them: who reads hundreds of GB once would drive all else out of memory.
        """
        tensor, dtype = self._tensor(tensor)
        if start < 0 or (start + out.size) * dtype.itemsize > tensor.nbytes:
            raise ValueError(f"{tensor.name}: {out.size} elements from {start} are too many")
        self._read_runs(tensor, dtype, out, [start], once)

    def read_box(self, tensor: str | StoredTensor, out: np.ndarray, box: Box) -> None:
        """Fill `out` with a part of the tensor, (first, end) of every dimension, and read no more.

        `out` must be C-contiguous, of the stored dtype and of the part's shape.
        """
        tensor, dtype = self._tensor(tensor)
        if out.shape != tuple(end - first for first, end in box):
            raise ValueError(f"{tensor.name}: out must be the part {box}, got {out.shape}")
        # Behind the last dimension that is cut, elements lie together.
        cut = [axis for axis, n in enumerate(tensor.shape) if box[axis] != (0, n)]
        outer = cut[-1] if cut else 0
        strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(box))]
        starts = np.zeros((), np.int64)
        for axis, (first, end) in enumerate(box[: outer + 1]):
            along = np.arange(first, end if axis < outer else first + 1) * strides[axis]
            starts = starts[..., None] + along
        self._read_runs(tensor, dtype, out, starts.reshape(-1).tolist(), once=False)

    def _read_runs(
        self, tensor: StoredTensor, dtype: np.dtype, out: np.ndarray, starts: list[int], once: bool
    ) -> None:
        """Fill `out`, run after run of equal length, from these flat elements on."""
        if out.dtype != dtype or not out.flags.c_contiguous:
            raise ValueError(f"{tensor.name}: out must be contiguous {dtype}, got {out.dtype}")
        path = self.directory / tensor.file
        target = out.reshape(-1).view(np.uint8).data
        length = len(target) // max(1, len(starts))
        try:
            with open(path, "rb", buffering=0) as stream:
                for run, start in enumerate(starts):
                    stream.seek(tensor.offset + start * dtype.itemsize)
                    done, end = run * length, (run + 1) * length
                    while done < end:
                        count = stream.readinto(target[done:end])
                        if not count:
                            raise CheckpointError(f"{path}: {tensor.name}: the file ends inside it")
                        done += count
                if once and len(target) >= UNCACHED and hasattr(os, "posix_fadvise"):
                    extent = (tensor.offset + starts[0] * dtype.itemsize, len(target))
                    os.posix_fadvise(stream.fileno(), *extent, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise CheckpointError(f"{path}: {tensor.name}: cannot be read: {error}") from None


def companions(directory: Path) -> list[str]:
    """The files of `COMPANIONS` that a directory holds."""
    return [name for name in COMPANIONS if (directory / name).is_file()]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers of a checkpoint: a directory, or one .safetensors file.

    With an index, its shards and `mtp.safetensors` (which some releases leave out of the index)
    are read. Without one, every .safetensors file is, and no tensor may occur twice. Raises
    CheckpointError, one line, for anything missing, malformed or contradictory.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".safetensors":
        return _without_index(path.parent, [path.name])
    if path.is_file():
        raise CheckpointError(f"{path}: a file; expected a directory, or a .safetensors file")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint directory")
    try:
        present = sorted(entry for entry in os.listdir(path) if entry.endswith(".safetensors"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if (path / INDEX).exists():
        return _with_index(path, present)
    if not present and (path / ORBAX_MARKER).exists():
        raise CheckpointError(
            f"{path}: an Orbax directory, expected one of safetensors; `glm5-jax verify` checks an "
            f"Orbax directory, `glm5-jax export` makes safetensors of it"
        )
    if not present:
        raise CheckpointError(f"{path}: no .safetensors file and no {INDEX} in it")
    return _without_index(path, present)


def _without_index(directory: Path, files: list[str]) -> Checkpoint:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(directory / file, file):
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise CheckpointError(
                    f"{directory}: {tensor.name} is in both {other.file} and {file}, and there is "
                    f"no {INDEX} to choose by; remove one of the files"
                )
    return Checkpoint(directory, tensors, tuple(files))


def _with_index(directory: Path, present: list[str]) -> Checkpoint:
    index = directory / INDEX
    weight_map, declared = _read_index(index)
    shards = sorted(set(weight_map.values()))
    if absent := [shard for shard in shards if not os.path.isfile(directory / shard)]:
        raise CheckpointError(
            f"{index}: names {len(absent)} of {len(shards)} files that are not there: "
            f"{', '.join(absent)}; download them, or take them out of the index"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for tensor in read_header(directory / shard, shard):
            _check_mapped(index, weight_map, tensor)
            tensors[tensor.name] = tensor
    for name in weight_map.keys() - tensors.keys():
        raise CheckpointError(f"{index}: maps {name} to {weight_map[name]}, which does not hold it")

    notices = []
    total = sum(tensor.nbytes for tensor in tensors.values())
    if declared is not None and declared != total:
        notices.append(f"{INDEX} declares {declared} bytes; the shards hold {total}")
    stray = [file for file in present if file not in set(shards)]
    if MTP_FILE in stray:
        side = read_header(directory / MTP_FILE, MTP_FILE)
        if repeated := [tensor.name for tensor in side if tensor.name in tensors]:
            notices.append(f"{MTP_FILE} is not used: the index has {repeated[0]} elsewhere")
        else:
            stray.remove(MTP_FILE)
            shards.append(MTP_FILE)
            tensors |= {tensor.name: tensor for tensor in side}
            notices.append(f"{MTP_FILE} is not in the index; its {len(side)} tensors are used")
    notices += [f"{file} is not in the index; not opened" for file in stray if file != MTP_FILE]
    return Checkpoint(directory, tensors, tuple(shards), tuple(stray), tuple(notices))


def _check_mapped(index: Path, weight_map: dict[str, str], tensor: StoredTensor) -> None:
    mapped = weight_map.get(tensor.name)
    if mapped is None:
        raise CheckpointError(f"{index}: lacks {tensor.name}, which {tensor.file} holds")
    if mapped != tensor.file:
        raise CheckpointError(
            f"{index}: maps {tensor.name} to {mapped}, but {tensor.file} holds it too or instead"
        )


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    """`weight_map`, and the total size that the index declares, if it does."""

    def refuse(problem: str) -> NoReturn:
        raise CheckpointError(f"{index}: {problem}")

    try:
        raw = index.read_bytes()
    except OSError as error:
        refuse(f"cannot be read: {error.strerror or error}")
    if raw.startswith(b"version https://git-lfs"):
        refuse("Git LFS pointer / incomplete download; fetch the real file")
    try:
        decoded: Any = decode_json(raw)
    except ValueError as error:
        refuse(str(error))
    weight_map = decoded.get("weight_map") if isinstance(decoded, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        refuse("weight_map must be an object that maps tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or not (name + file).isprintable():
            refuse(f"weight_map: {name!r} must name a file, got {file!r}")
    for file in set(weight_map.values()):
        pure = PurePosixPath(file)
        if pure.is_absolute() or ".." in pure.parts or "\\" in file or "\0" in file:
            refuse(f"weight_map: {file!r} leads out of the directory")
    metadata = decoded.get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(declared, float) and declared.is_integer():
        declared = int(declared)
    return weight_map, declared if type(declared) is int else None
