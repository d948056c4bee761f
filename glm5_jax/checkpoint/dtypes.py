"""Which dtype a leaf gets when a checkpoint is converted or loaded in a dtype asked for by name."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..errors import CheckpointError
from ..specs import Leaf

Dtype = Literal["stored", "bfloat16", "float32", "float64"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = (_BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))


def dtype_word(dtype: DTypeLike) -> str:
    """The word for a dtype that a checkpoint is asked for in; its dtype object serves as well.

    Raises CheckpointError for any other.
    """
    word: object = dtype
    if not isinstance(dtype, str | None):
        with suppress(TypeError, ValueError):
            word = np.dtype(dtype).name
    if word not in get_args(Dtype):
        raise CheckpointError(f"dtype: expected one of {', '.join(get_args(Dtype))}, got {dtype!r}")
    return str(word)


def leaf_dtype(leaf: Leaf, stored: np.dtype, dtype: str) -> np.dtype:
    """The dtype of a leaf that is stored as `stored` when the model is asked for in `dtype`.

    ``stored`` changes nothing; ``float32`` and ``float64`` are every leaf's. ``bfloat16`` is not
    for the leaves that must be float32 (decay, correction bias, hyper-connection base and scale:
    rounded, they change which experts are chosen), nor for those that are computed in float32
    whatever the model dtype (router and conv weights), which stay as they are stored.
    """
    if stored not in _FLOATS:
        raise CheckpointError(f"{leaf.path}: expected a bfloat16 or float32 leaf, got {stored}")
    if dtype == "stored":
        return stored
    if dtype != "bfloat16":
        return np.dtype(dtype)
    if leaf.dtype == "F32":
        return np.dtype(np.float32)
    return stored if leaf.keep_stored else _BFLOAT16


def decoded_dtype(leaf: Leaf, dtype: str) -> np.dtype | None:
    """The dtype to which a quantised leaf is decoded, None for ``stored``, which keeps its arrays.

    No leaf that a release may quantise is among those that a bfloat16 model keeps in float32.
    """
    return None if dtype == "stored" else leaf_dtype(leaf, _BFLOAT16, dtype)
