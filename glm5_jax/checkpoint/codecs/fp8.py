"""FP8 e4m3: one byte per weight, and a scale that multiplies a block, a row or the whole matrix.

`F8_E4M3` is float8_e4m3fn always; as e4m3fnuz the same bytes are off by 2. A scale stored as bytes
is E8M0: byte b is 2^(b − 127), and 255 is NaN.
"""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

from .tables import E4M3_VALUES, look_up, round_to, row_chunks

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
MAX = 448.0

Shape = tuple[int, ...]


def scale_block(weight: Shape, scale: Shape, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of a matrix that share one element of its scale.

    A scale is a scalar (rank 0, or one element), one per row ([out] or [out, 1]), or a grid over
    blocks of `block`, whose last row and column of blocks may be partial. Where a shape can be
    read in two ways, both mean the same. Raises ValueError for another shape.
    """
    out, into = weight[0], weight[1]
    if block is not None and scale == (-(-out // block[0]), -(-into // block[1])):
        return block
    if scale in ((), (1,), (1, 1)):
        return (out, into)
    if scale in ((out,), (out, 1)):
        return (1, into)
    grid = "no block size is known" if block is None else f"blocks are {list(block)}"
    raise ValueError(f"a scale {list(scale)} does not fit a weight {list(weight)}; {grid}")


def scale_values(scale: np.ndarray) -> np.ndarray:
    """A scale as float64: E8M0 (or its bytes) as powers of two, others as they are."""
    with np.errstate(invalid="ignore"):  # NaN
        return (scale.view(E8M0) if scale.dtype == np.uint8 else scale).astype(np.float64)


def decode_fp8(
    codes: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None, out: np.ndarray
) -> np.ndarray:
    """`codes * scale` of one matrix [out, in] in the dtype of `out`, which is filled and returned.

    codes: float8_e4m3fn. scale: float32, bfloat16, float8_e8m0fnu or uint8 (E8M0), see
    `scale_block` for its shapes.
    """
    if codes.dtype != E4M3:
        raise ValueError(f"FP8 codes must be {E4M3}, got {codes.dtype}")
    rows, columns = scale_block(codes.shape, scale.shape, block)
    grid = scale_values(scale).reshape(-(-codes.shape[0] // rows), -(-codes.shape[1] // columns))
    of_column = np.arange(codes.shape[1]) // columns * 256
    flat = codes.view(np.uint8)
    for index, scales in enumerate(grid):
        # The 256 values that each block of this row of blocks can hold, rounded once.
        with np.errstate(invalid="ignore"):  # infinity times 0
            table = round_to(scales[:, None] * E4M3_VALUES, out.dtype).reshape(-1)
        last = min((index + 1) * rows, codes.shape[0])
        for part in row_chunks(index * rows, last, codes.shape[1]):
            look_up(table, flat[part] + of_column, out[part])
    return out


def encode_fp8(
    weight: np.ndarray,
    scale: Literal["block", "channel", "tensor"] = "block",
    block: tuple[int, int] = (128, 128),
    scale_dtype: np.dtype | type = np.float32,
) -> dict[str, np.ndarray]:
    """A matrix [out, in] as `codes` and `scale`, nearest to the weight, nothing beyond ±448.

    The largest magnitude of a block becomes 448 before the scale is rounded to `scale_dtype`
    (float32, bfloat16 or float8_e8m0fnu; E8M0 rounds up, as no code would be left above). A block
    of zeros has scale 1. Raises ValueError unless all weights are finite.
    """
    values = np.asarray(weight, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a weight that is not finite has no FP8 form")
    out, into = values.shape
    rows, columns = {"block": block, "channel": (1, into), "tensor": (out, into)}[scale]
    largest = np.abs(values)
    for axis, size in enumerate((rows, columns)):
        starts = np.arange(0, largest.shape[axis], size)
        largest = np.maximum.reduceat(largest, starts, axis=axis)
    scales = _rounded_scale(np.where(largest == 0, MAX, largest) / MAX, np.dtype(scale_dtype))
    spread = scale_values(scales).repeat(rows, 0)[:out].repeat(columns, 1)[:, :into]
    codes = np.clip(values / spread, -MAX, MAX).astype(np.float32).astype(E4M3)
    shape = {"block": scales.shape, "channel": (out, 1), "tensor": ()}[scale]
    return {"codes": codes, "scale": scales.reshape(shape)}


def _rounded_scale(scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    # A scale that rounds to 0 would divide by 0: the smallest there is stands for it.
    if dtype == E8M0:
        return (
            np.exp2(np.ceil(np.log2(np.maximum(scale, 2.0**-127)))).astype(np.float32).astype(E8M0)
        )
    return (
        np.maximum(scale, float(ml_dtypes.finfo(dtype).smallest_normal))
        .astype(np.float32)
        .astype(dtype)
    )
