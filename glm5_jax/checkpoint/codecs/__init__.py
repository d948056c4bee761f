"""Quantised weights as numbers and back: FP8 with scales, and the two spellings of NVFP4.

A quantised weight is a set of plain arrays by key: ``codes`` and ``scale``, for NVFP4 also
``scale_2`` (modelopt) or ``global_scale`` (compressed-tensors); the keys alone tell the scheme.
Here a weight is one matrix [out, in]; of a stack of experts each array has a leading axis. NumPy
only: no torch, no JAX. The model's own decoder, `nn.quantized`, gives the same bits.

A decoded value is the product (or quotient) of the stored numbers, computed in float64 and rounded
to float32; bfloat16 is that float32 rounded, which is what NumPy's cast from float64, torch and
every engine that dequantises in float32 give.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from .fp8 import decode_fp8, encode_fp8, scale_block, scale_values
from .nvfp4 import decode_nvfp4, encode_nvfp4

__all__ = [
    "KEYS",
    "decode",
    "decode_fp8",
    "decode_nvfp4",
    "encode_fp8",
    "encode_nvfp4",
    "scale_block",
    "scale_problem",
]

KEYS = ("codes", "scale", "scale_2", "global_scale")
DECODED = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64))


def decode(
    arrays: Mapping[str, np.ndarray],
    block: tuple[int, int] | None,
    dtype: np.dtype | type,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The matrix, or with a leading axis the matrices, that stored arrays stand for.

    arrays: by key, see above. block: the config's `weight_block_size`, which an FP8 scale that is a
    grid needs. dtype: bfloat16, float32 or float64. out: filled instead of a new array. One matrix
    is decoded at a time. Raises ValueError for arrays that do not belong together.
    """
    dtype = np.dtype(dtype)
    if dtype not in DECODED:
        raise ValueError(f"a weight is decoded to bfloat16, float32 or float64, not to {dtype}")
    codes = arrays["codes"]
    width = codes.shape[-1] * (1 if arrays.keys() == {"codes", "scale"} else 2)
    shape = (*codes.shape[:-1], width)
    out = np.empty(shape, dtype) if out is None else out
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out must be {dtype} {list(shape)}, got {out.dtype} {list(out.shape)}")
    if codes.ndim == 3:
        for index in range(codes.shape[0]):
            decode({key: array[index] for key, array in arrays.items()}, block, dtype, out[index])
    elif arrays.keys() == {"codes", "scale"}:
        decode_fp8(codes, arrays["scale"], block, out)
    else:
        second = {key: array for key, array in arrays.items() if key not in ("codes", "scale")}
        decode_nvfp4(codes, arrays["scale"], **second, out=out)
    return out


def scale_problem(key: str, array: np.ndarray) -> str | None:
    """Why the scale of that key cannot be one, or None: every element is finite, no divisor 0."""
    if key == "codes":
        return None
    values = scale_values(array)
    nonzero = key == "global_scale"
    bad = ~np.isfinite(values) | (nonzero & (values == 0))
    if not bad.any():
        return None
    wanted = "finite and not 0" if nonzero else "finite"
    return f"a scale must be {wanted}, got {values[bad][0]}"
