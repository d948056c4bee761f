"""Score gaps of the model's discrete choices: experts, expert groups, pools.

A run in lower precision may choose otherwise where two scores are closer than its rounding, and the
numbers after that say nothing. The gap tells such a flip from a wrong choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Gap:
    """The nearest miss of one discrete choice: the last chosen score less the first refused one.

    `gap` is the smallest over all real tokens (inf where nothing was refused), `scale` the largest
    score that took part, so `relative` is comparable with the eps of a dtype.
    """

    gap: float
    scale: float

    @property
    def relative(self) -> float:
        """The gap as a part of the scale; two scores of exactly zero are a tie (0)."""
        return self.gap / self.scale if self.scale > 0 else (0.0 if self.gap == 0 else float("inf"))


def discrete_gaps(
    sites: Mapping[str, np.ndarray], mask: np.ndarray | None = None
) -> dict[str, Gap]:
    """The nearest miss of every discrete choice in `oracle_sites`, over real tokens.

    Keys are the sites that chose: `layers.{i}.attn.selection` (the cut among candidate pools),
    `layers.{i}.ffn.router.experts` and `layers.{i}.ffn.router.groups`.
    """
    gaps: dict[str, Gap] = {}
    for name, scores in sites.items():
        site = name.removesuffix(".scores")
        if f"{site}.k" in sites and site != name:
            valid = scores > np.finfo(scores.dtype).min
            if mask is not None:
                valid = valid & np.asarray(mask, bool)[..., None]
            gaps[site] = cut_gap(scores, valid, int(sites[f"{site}.k"]))
    return gaps


def cut_gap(scores: np.ndarray, valid: np.ndarray, k: int) -> Gap:
    """The gap at the cut after the `k` best of `scores` [..., n], where `valid` allows a choice."""
    scale = float(np.abs(scores[valid]).max()) if valid.any() else 0.0
    if k == 0 or k >= scores.shape[-1]:
        return Gap(float("inf"), scale)
    ordered = -np.sort(-np.where(valid, scores, -np.inf), axis=-1)
    chosen, refused = ordered[..., k - 1], ordered[..., k]
    cut = np.isfinite(refused)
    misses = chosen[cut] - refused[cut]
    return Gap(float(misses.min()) if misses.size else float("inf"), scale)


def has_tie(
    sites: Mapping[str, np.ndarray], mask: np.ndarray | None = None, within: float = 1e-11
) -> bool:
    """Whether some choice of a float64 run is a tie, which the oracle decides arbitrarily.

    Dead pools score exactly 0 and tie; scores equal in exact arithmetic differ by the rounding of
    their sums, hence `within`, relative to the largest score.
    """
    return any(gap.relative <= within for gap in discrete_gaps(sites, mask).values())
