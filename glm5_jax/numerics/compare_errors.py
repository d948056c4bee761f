"""How far two arrays of one site are apart: in all, and at each token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .trace import Stats

# Numbers that are widened to float64 at once.
BLOCK = 2**21


@dataclass(frozen=True, eq=False)
class SiteError:
    """The distance of a site's two arrays.

    `relative_l2` is the norm of the difference by the larger of the two norms, so that neither
    side is the truth. `positions` is the same for each token, NaN where there is nothing to
    compare; a token whose norm is below the median token's is measured against that. `weights` are
    the squared norms that they were measured against. Where a number is no number, or infinite on
    one side only, `nonfinite` says so, `worst` is where, the errors are infinite, and there is no
    cosine: NaN.
    """

    max_abs: float
    relative_l2: float
    cosine: float
    worst: tuple[int, ...]
    positions: np.ndarray
    weights: np.ndarray
    nonfinite: str | None = None


def array_error(a: np.ndarray, b: np.ndarray, valid: np.ndarray) -> SiteError:
    """The error of two arrays [n, m, ...] at what is `valid`, [n, m] or of the arrays' own shape.

    Its `positions` are [n, m].
    """
    n, m, *inner = a.shape
    tokens, width = n * m, math.prod(inner)
    a, b = a.reshape(tokens, width), b.reshape(tokens, width)
    valid = valid.reshape(tokens, valid.size // max(tokens, 1))
    dd, aa, bb, ab, top = (np.zeros(tokens) for _ in range(5))
    at = np.zeros(tokens, int)
    nonfinite = None
    rows = max(1, BLOCK // max(width, 1))
    for start in range(0, tokens if a.size else 0, rows):
        part = slice(start, start + rows)
        x, y = a[part].astype(np.float64), b[part].astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        broken = valid[part] & ~finite & (x != y)
        use = valid[part] & finite
        if nonfinite is None and broken.any():
            first = tuple(np.argwhere(broken)[0])
            nonfinite = f"{_word(x[first])} against {_word(y[first])}"
        x, y = np.where(use, x, 0), np.where(use, y, 0)
        d = np.where(broken, np.inf, np.abs(x - y))
        at[part], top[part] = d.argmax(1), d.max(1)
        dd[part], aa[part], bb[part] = (d * d).sum(1), (x * x).sum(1), (y * y).sum(1)
        ab[part] = (x * y).sum(1)

    judged = valid.any(1)
    weights = np.maximum(aa, bb)
    weights = np.maximum(weights, np.median(weights[judged]) if judged.any() else 0)
    positions = np.sqrt(np.divide(dd, weights, out=np.zeros(tokens), where=weights > 0))
    positions[dd == np.inf] = np.inf
    positions[~judged] = np.nan
    row = int(np.argmax(top)) if tokens else 0
    inside = np.unravel_index(at[row], inner) if inner and a.size else ()
    return SiteError(
        max_abs=float(top.max(initial=0)),
        relative_l2=_ratio(float(dd.sum()), float(max(aa.sum(), bb.sum()))),
        cosine=math.nan
        if nonfinite
        else _cosine(float(ab.sum()), float(aa.sum()), float(bb.sum())),
        worst=(*divmod(row, m), *map(int, inside)) if top.max(initial=0) else (),
        positions=positions.reshape(n, m),
        weights=weights.reshape(n, m),
        nonfinite=nonfinite,
    )


def sample_error(
    a: np.ndarray, b: np.ndarray, of_a: Stats, of_b: Stats, by: str = "sample and norm"
) -> SiteError:
    """The error of two samples of a site at the same places, and of what its stats say.

    The relative error is the larger one of the samples' and of the norms', or that which `by`
    names. `worst` is an index into the sample; `positions` is [1, 1], one number for the site.
    """
    # −inf is no candidate's score.
    valid = (a != -np.inf) & (b != -np.inf)
    error = array_error(a[None, None], b[None, None], valid[None, None])
    norms = 0.0
    if of_a.l2 != of_b.l2 and "norm" in by:
        norms = abs(of_a.l2 - of_b.l2) / max(of_a.l2, of_b.l2)
    nonfinite = error.nonfinite
    if nonfinite is None and not np.isfinite([*of_a, *of_b]).all():
        nonfinite = f"{_word(sum(of_a))} against {_word(sum(of_b))}"
    relative = max(error.relative_l2 if "sample" in by else 0.0, norms)
    relative = float("inf") if nonfinite else relative
    return SiteError(
        max_abs=error.max_abs,
        relative_l2=relative,
        cosine=math.nan if nonfinite else error.cosine,
        worst=error.worst[2:],
        positions=np.array([[relative]]),
        weights=np.ones((1, 1)),
        nonfinite=nonfinite,
    )


def _word(value: float) -> str:
    return "NaN" if np.isnan(value) else str(value) if np.isinf(value) else "a number"


def _ratio(dd: float, scale: float) -> float:
    return (dd / scale) ** 0.5 if scale else float(np.sqrt(dd))


def _cosine(ab: float, aa: float, bb: float) -> float:
    if not aa or not bb:
        return float(aa == bb)
    return float(np.clip(ab / (aa * bb) ** 0.5, -1, 1))
