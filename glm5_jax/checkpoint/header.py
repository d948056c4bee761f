"""The safetensors format, read strictly: what one file says of itself, or one clear line why not.

A file is 8 bytes (little-endian header length), the header (a JSON object) and the data. The
`safetensors` package can't give FP8 arrays to numpy, and accepts some files that are refused here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from ..errors import CheckpointError

# Bits per element on disk and the numpy dtype, None where no numpy dtype has that layout.
# F8_E4M3 is float8_e4m3fn always: read as fnuz, the same bytes are off by 2.
DTYPES: Mapping[str, tuple[int, np.dtype | None]] = {
    "BOOL": (8, np.dtype(np.bool_)),
    "U8": (8, np.dtype(np.uint8)),
    "I8": (8, np.dtype(np.int8)),
    "U16": (16, np.dtype("<u2")),
    "I16": (16, np.dtype("<i2")),
    "U32": (32, np.dtype("<u4")),
    "I32": (32, np.dtype("<i4")),
    "U64": (64, np.dtype("<u8")),
    "I64": (64, np.dtype("<i8")),
    "F16": (16, np.dtype("<f2")),
    "F32": (32, np.dtype("<f4")),
    "F64": (64, np.dtype("<f8")),
    "C64": (64, np.dtype("<c8")),
    "BF16": (16, np.dtype(ml_dtypes.bfloat16)),
    "F8_E4M3": (8, np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E5M2": (8, np.dtype(ml_dtypes.float8_e5m2)),
    "F8_E8M0": (8, np.dtype(ml_dtypes.float8_e8m0fnu)),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
}

MAX_HEADER = 100_000_000  # the limit of the safetensors package

Refuse = Callable[[str], NoReturn]


class StoredTensor(NamedTuple):
    """A tensor as a header declares it. `file` is relative to the checkpoint's directory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class DuplicateKey(ValueError):
    """A JSON object that gives one key twice."""


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses a repeated key, which plain `json` lets win silently."""
    decoded = dict(pairs)
    if len(decoded) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise DuplicateKey(f"key {repeated!r} occurs twice")
    return decoded


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def decode_json(raw: bytes) -> Any:
    """Strict UTF-8 JSON; ValueError says what is wrong with it."""
    try:
        text = raw.decode("utf-8")
        decoded = json.loads(text, object_pairs_hook=unique_object, parse_constant=_no_constant)
    except DuplicateKey:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if b"\\u" in raw and any(_is_surrogate(text) for text in _strings(decoded)):
        raise ValueError("not valid JSON: a lone surrogate in a string")
    return decoded


def _is_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in _strings(part)]
    if isinstance(value, list):
        return [text for part in value for text in _strings(part)]
    return []


def read_header(path: Path, file: str) -> list[StoredTensor]:
    """Every tensor of one safetensors file, in file order, the layout of its data checked.

    `file` is the name recorded in the tensors. Raises CheckpointError, one line that names the
    file and the tensor, for a file that is absent, truncated, padded, a Git LFS pointer, or whose
    header has a repeated key, an unknown dtype, a shape that disagrees with its bytes, or offsets
    that overlap, leave holes or don't end where the file ends.
    """

    def refuse(problem: str) -> NoReturn:
        raise CheckpointError(f"{path}: {problem}")

    raw, size = _raw_header(path)
    data_start = 8 + len(raw)
    try:
        header = decode_json(raw)
    except ValueError as error:
        refuse(f"header is {error}" if str(error).startswith("not") else f"header: {error}")
    if not isinstance(header, dict):
        refuse(f"header must be a JSON object, got {type(header).__name__}")
    _check_metadata(header.pop("__metadata__", {}), refuse)

    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = (
                entry["dtype"],
                tuple(entry["shape"]),
                entry["data_offsets"],
            )
            bits, _ = DTYPES[dtype]
            good = (
                len(entry) == 3 and type(begin) is int and type(end) is int and name.isprintable()
            )
            good = good and all(type(n) is int and n >= 0 for n in shape)
        except (KeyError, TypeError, ValueError):
            _refuse_entry(name, entry, refuse)
        if not good:
            _refuse_entry(name, entry, refuse)
        total = math.prod(shape) * bits
        if total % 8 or end - begin != total // 8:
            refuse(
                f"{name}: {dtype} {list(shape)} takes {total / 8:g} bytes, "
                f"but data_offsets give {end - begin}; the header lies"
            )
        shape = shapes.setdefault(shape, shape)
        found.append(StoredTensor(name, dtype, shape, file, data_start + begin, end - begin))

    found.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    position = data_start
    for tensor in found:
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole"
            refuse(
                f"{tensor.name}: data begins at byte {tensor.offset - data_start} where "
                f"{position - data_start} was expected; it {what}"
            )
        position += tensor.nbytes
    if size < position:
        refuse(
            f"truncated: the header describes {position} bytes, the file has {size}; "
            f"download it again"
        )
    if size > position:
        refuse(f"{size - position} trailing bytes after the {position} that the header describes")
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` of a file whose header `read_header` has accepted."""
    return decode_json(_raw_header(path)[0]).get("__metadata__", {})


def _raw_header(path: Path) -> tuple[bytes, int]:
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            start = stream.read(8)
            if start.startswith(b"version "):
                raise CheckpointError(
                    f"{path}: Git LFS pointer / incomplete download; fetch the real file "
                    f"(git lfs pull, or download it again)"
                )
            if len(start) < 8:
                what = "empty file" if not start else f"truncated: only {size} bytes"
                raise CheckpointError(f"{path}: {what}; not a safetensors file, download it again")
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER:
                raise CheckpointError(
                    f"{path}: header of {length} bytes is above the limit of {MAX_HEADER}; "
                    f"not a safetensors file"
                )
            if length > size - 8:
                raise CheckpointError(
                    f"{path}: truncated: a header of {length} bytes in a file of {size}; "
                    f"download it again"
                )
            return stream.read(length), size
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read: {reason}") from None


def _check_metadata(metadata: Any, refuse: Refuse) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse("header: __metadata__ must map strings to strings")


def _refuse_entry(name: str, entry: Any, refuse: Refuse) -> NoReturn:
    """Say which part of a tensor's entry is not as the format demands."""
    if not name.isprintable():
        refuse(f"tensor name {name!r} holds unprintable characters")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse(f"{name}: header entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse(f"{name}: unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        refuse(f"{name}: shape must be a list of non-negative integers, got {shape!r}")
    refuse(f"{name}: data_offsets must be two integers, got {offsets!r}")
