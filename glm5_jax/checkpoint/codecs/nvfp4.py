"""NVFP4: four bits per weight, an e4m3 scale for 16 columns, and one float32 scale for the matrix.

A byte holds two columns, the even one in its low nibble. Modelopt's `scale_2` multiplies,
compressed-tensors' `global_scale` divides.
"""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

from .tables import E2M1_MAGNITUDES, E2M1_VALUES, E4M3_VALUES, look_up, round_to, row_chunks

GROUP = 16
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_BYTES = np.arange(256)


def decode_nvfp4(
    codes: np.ndarray,
    scale: np.ndarray,
    scale_2: np.ndarray | None = None,
    global_scale: np.ndarray | None = None,
    *,
    out: np.ndarray,
) -> np.ndarray:
    """One matrix [out, in] in the dtype of `out`, which is filled and returned.

    `e2m1 * (scale * scale_2)`, or `e2m1 * (scale / global_scale)`. codes: uint8 [out, in/2]. scale:
    float8_e4m3fn [out, in/16]. The second scale has one element; exactly one of the two is given.
    Raises ValueError for arrays that do not belong together.
    """
    if (scale_2 is None) == (global_scale is None):
        raise ValueError("NVFP4 has either scale_2 or global_scale")
    rows, packed = codes.shape
    if codes.dtype != np.uint8 or scale.dtype != E4M3 or packed % (GROUP // 2):
        raise ValueError(
            f"NVFP4 is uint8 codes [out, in/2] with in a multiple of {GROUP} and an {E4M3} scale, "
            f"got {codes.dtype} {list(codes.shape)} and {scale.dtype}"
        )
    if scale.shape != (rows, 2 * packed // GROUP):
        raise ValueError(f"a scale {list(scale.shape)} does not fit codes {list(codes.shape)}")
    if scale_2 is not None:
        scales = E4M3_VALUES * scale_2.astype(np.float64).reshape(())
    else:
        assert global_scale is not None
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = E4M3_VALUES / global_scale.astype(np.float64).reshape(())
    # Every scale byte has one value for each code; with a byte of codes it has two.
    with np.errstate(invalid="ignore"):  # infinity times 0
        table = round_to(scales[:, None] * E2M1_VALUES, out.dtype)
    pairs = np.stack([table[:, _BYTES & 15], table[:, _BYTES >> 4]], axis=-1).reshape(-1)
    of_scale = scale.view(np.uint8)[..., None].astype(np.uint16) << 8
    for part in row_chunks(0, rows, 2 * packed):
        index = codes[part].reshape(-1, packed // (GROUP // 2), GROUP // 2) | of_scale[part]
        look_up(pairs, index.reshape(-1, packed), out[part], together=2)
    return out


# |x| above one of these rounds to the next code; a tie goes to the even code.
_ABOVE = (E2M1_MAGNITUDES[1:] + E2M1_MAGNITUDES[:-1]) / 2
_ABOVE[1::2] = np.nextafter(_ABOVE[1::2], 0)


def encode_nvfp4(
    weight: np.ndarray,
    second: Literal["scale_2", "global_scale"] = "scale_2",
) -> dict[str, np.ndarray]:
    """A matrix [out, in] as `codes`, `scale` and the second scale: modelopt's or the other's.

    The largest magnitude of the matrix becomes 6 · 448, the largest of a group 6, each code is the
    nearest. Raises ValueError unless all weights are finite and `in` is a multiple of 16.
    """
    values = np.asarray(weight, np.float64)
    rows, into = values.shape
    if into % GROUP or not np.isfinite(values).all():
        raise ValueError(f"NVFP4 takes finite weights, {GROUP} columns a group; got {rows}×{into}")
    groups = values.reshape(rows, -1, GROUP)
    largest = np.abs(groups).max(axis=-1, initial=0.0)
    whole = float(largest.max(initial=0.0)) or 6 * 448.0  # of a matrix of zeros the scale is 1
    if second == "scale_2":
        of_matrix = np.array(whole / (6 * 448), np.float32)
        unit = float(of_matrix)
    else:
        of_matrix = np.array([6 * 448 / whole], np.float32)
        unit = 1 / float(of_matrix[0])
    scale = np.minimum(largest / (6 * unit), 448).astype(np.float32).astype(E4M3)
    step = scale.astype(np.float64)[..., None] * unit
    scaled = np.divide(groups, step, out=np.zeros_like(groups), where=step != 0)
    nibbles = np.searchsorted(_ABOVE, np.abs(scaled)).astype(np.uint8)
    nibbles |= np.signbit(groups).astype(np.uint8) << 3
    nibbles = nibbles.reshape(rows, into)
    return {"codes": nibbles[:, 0::2] | nibbles[:, 1::2] << 4, "scale": scale, second: of_matrix}
