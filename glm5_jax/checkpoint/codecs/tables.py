"""The values of the small formats, and rounding to the dtype that a weight is decoded to."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

_CHUNK = 2**16

# By code. 127 and 255 are NaN; there is no infinity.
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)

# By code: bit 3 is the sign, so code 8 is −0.
E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])


def round_to(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 to `dtype`; bfloat16 by way of float32, which ml_dtypes' own cast takes too."""
    if dtype == np.float64:
        return values
    with np.errstate(over="ignore"):  # infinity is what it should become
        single = values.astype(np.float32)
    return single.astype(dtype, copy=False)


def row_chunks(first: int, last: int, width: int) -> Iterator[slice]:
    """Rows `first` to `last` in pieces that fit a cache: an index has 8 bytes for each element."""
    step = max(1, _CHUNK // max(1, width))
    for start in range(first, last, step):
        yield slice(start, min(start + step, last))


def look_up(table: np.ndarray, index: np.ndarray, out: np.ndarray, together: int = 1) -> None:
    """`out[...] = table[index]`, where an index stands for `together` elements that adjoin.

    As bits: NumPy is several times slower on ml_dtypes' arrays.
    """
    size = together * out.dtype.itemsize
    bits = np.dtype(np.complex128 if size == 16 else f"u{size}")
    np.take(table.view(bits), index, out=out.view(bits), mode="clip")
