"""Discrete choices, experts and pools, compared as sets; and what a difference of them hangs on.

Two scores that are closer than rounding are put in either order by two right engines. A flip is
explained if the scores of one side had to move no further than the two sides' scores are apart
for the other side's choice to be the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Flip:
    """One token that chose otherwise on the two sides.

    `gap` is how far the chosen scores had to move for the other choice to be right, by the largest
    score in question: 0 is a tie, infinite what no scores can make right, None unknown. `allowed`
    is the gap that the difference of the scores explains, None where no scores are known.
    """

    site: str
    layer: int | None
    row: int
    position: int
    trace_only: tuple[int, ...]
    other_only: tuple[int, ...]
    gap: float | None
    allowed: float | None
    explained: bool | None

    @property
    def is_tie(self) -> bool:
        """Whether the scores were equal."""
        return self.gap == 0


class Groups(NamedTuple):
    """Experts in `number` equal groups, of which the `kept` best may be chosen from."""

    number: int
    kept: int


class Verdict(NamedTuple):
    """The gap of a flip, what is allowed, and whether the one is within the other."""

    gap: float | None
    allowed: float | None
    explained: bool | None


def flipped(
    a: np.ndarray, b: np.ndarray, real: np.ndarray
) -> Iterator[tuple[int, int, frozenset[int], frozenset[int]]]:
    """Row, position and both sets wherever choices [B, T, _] differ as sets; −1 chooses nothing."""
    width = max(a.shape[-1], b.shape[-1])
    x, y = (_as_set(choice, width) for choice in (a, b))
    for row, position in np.argwhere(real & (x != y).any(-1)):
        of_a, of_b = (frozenset(map(int, c[row, position])) - {-1} for c in (a, b))
        if of_a != of_b:  # else one of them chose something twice
            yield int(row), int(position), of_a, of_b


def shortfall(
    scores: np.ndarray,
    chosen: frozenset[int],
    candidates: np.ndarray,
    groups: Groups | None = None,
) -> float:
    """How far scores [n] have to move for `chosen` to be the best of the candidates [n].

    0 if it is; infinite if it holds what is no candidate, or is of more groups than may be kept.
    """
    members = np.zeros(len(scores), bool)
    if any(not 0 <= index < len(scores) for index in chosen):
        return float("inf")
    members[list(chosen)] = True
    if (members & ~candidates).any():
        return float("inf")
    if groups is None or groups.number == 1:
        return _miss(scores, members, candidates & ~members)
    best = np.sort(np.where(candidates, scores, -np.inf).reshape(groups.number, -1), axis=1)
    of_group = best[:, -2:].sum(axis=1)
    used = set(np.flatnonzero(members.reshape(groups.number, -1).any(axis=1)).tolist())
    others = sorted(set(range(groups.number)) - used)
    misses = [float("inf")]
    # Groups may be kept that nothing was chosen from, which no choice tells.
    for unused in combinations(others, max(0, groups.kept - len(used))):
        kept = np.zeros(groups.number, bool)
        kept[[*used, *unused]] = True
        if kept.sum() == groups.kept:
            within = candidates & np.repeat(kept, len(scores) // groups.number) & ~members
            misses.append(max(_miss(of_group, kept, ~kept), _miss(scores, members, within)))
    return min(misses)


def judge(
    scores: Sequence[np.ndarray | None],
    chosen: Sequence[frozenset[int]],
    candidates: np.ndarray,
    roundoff: float,
    expected: float,
    groups: Groups | None = None,
) -> Verdict:
    """Whether the scores [n] of the two sides, as far as known, explain their two choices.

    With both known, a choice may fall short by what they are apart, twice, and by rounding. With
    one, by the `expected` relative error of scores.
    """
    known = [np.asarray(s, np.float64) for s in scores if s is not None]
    if not known:
        return Verdict(None, None, None)
    candidates = candidates & np.logical_and.reduce([s != -np.inf for s in known])
    scale = max((float(np.abs(s[candidates]).max(initial=0)) for s in known), default=0.0) or 1.0
    gaps = [shortfall(s, c, candidates, groups) for s in known for c in chosen]
    if len(known) == 2:
        apart = float(np.abs(known[0][candidates] - known[1][candidates]).max(initial=0))
        moved = 2 * apart / scale + 8 * roundoff
    else:
        moved = 2 * expected
    allowed = moved if groups is None or groups.number == 1 else 2 * moved
    gap = max(gaps) / scale
    same_size = len(chosen[0]) == len(chosen[1])
    return Verdict(gap, allowed, bool(same_size and gap <= allowed))


def with_refused_groups(scores: np.ndarray, logits: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Scores of experts [B, T, E] with those of the refused groups, which are −inf, filled in.

    An expert's score is the sigmoid of its logit and a bias of its own, so that any token that
    kept its group tells the bias. Experts that no token kept stay −inf.
    """
    own = 1 / (1 + np.exp(-logits.astype(np.float64)))
    known = real[..., None] & np.isfinite(scores)
    bias = np.where(known, scores - own, 0).sum((0, 1)) / np.maximum(known.sum((0, 1)), 1)
    bias = np.where(known.any((0, 1)), bias, -np.inf)
    return np.where(scores == -np.inf, own + bias, scores)


def pools_of_tokens(
    tokens: frozenset[int], first: int, seen: int, pool: int
) -> tuple[frozenset[int], frozenset[int]]:
    """The whole pools in a selection of tokens, and the tokens that are in none of them."""
    pools = {(t - first) // pool for t in tokens}
    whole = frozenset(
        p
        for p in pools
        if p < seen // pool and all(first + p * pool + slot in tokens for slot in range(pool))
    )
    return whole, frozenset(t for t in tokens if (t - first) // pool not in whole)


def _as_set(choice: np.ndarray, width: int) -> np.ndarray:
    pad = [(0, 0)] * (choice.ndim - 1) + [(0, width - choice.shape[-1])]
    return np.sort(np.pad(choice, pad, constant_values=-1), axis=-1)


def _miss(scores: np.ndarray, members: np.ndarray, others: np.ndarray) -> float:
    if not members.any() or not others.any():
        return 0.0
    return max(0.0, float(scores[others].max() - scores[members].min()))
