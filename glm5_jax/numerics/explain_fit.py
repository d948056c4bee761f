"""How well one run of a part reproduces the numbers of a trace, in units of rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .trace import Trace

# How many times the rounding that we make ourselves is still taken for the other engine's.
ROUNDINGS = 8
# Where it is next to nothing: how many units of the last place of the wide dtype.
PLACES = 4

Sites = Mapping[str, Any]


class Fit:
    """The `numbers` of a trace, and how far from them rounding alone leads.

    names: the sites that are compared; those without numbers are left out, and those where our own
    two runs are infinitely apart, as they are from inputs that are NaN. exact, rounded: what our
    model makes of the trace's own inputs, in float64 and in a dtype like the trace's; `share` is
    the part of their difference that the trace's dtype would make.
    """

    def __init__(
        self,
        trace: Trace,
        numbers: Sites,
        names: Iterable[str],
        exact: Sites,
        rounded: Sites,
        eps: float,
        share: float,
    ):
        self.trace, self.numbers = trace, numbers
        self.allowed = {}
        for name in (name for name in names if name in numbers):
            noise = self._error(name, exact, rounded)
            if scores := trace.site(name).scores:
                noise += self._error(scores, exact, rounded)
            if np.isfinite(noise):
                self.allowed[name] = ROUNDINGS * share * noise + PLACES * eps
        self.names = tuple(self.allowed)

    def misfits(self, sites: Sites) -> dict[str, float]:
        """For each site how far it is from the trace's; up to 1 it is rounding."""
        return {
            name: self._error(name, sites, self.numbers) / self.allowed[name] for name in self.names
        }

    def misfit(self, sites: Sites) -> float:
        """That of the worst site."""
        return max(self.misfits(sites).values())

    def _error(self, name: str, a: Sites, b: Sites) -> float:
        """The largest error of a token, as a part of the root mean square over all tokens."""
        site, real = self.trace.site(name), self.trace.real(name)
        if name.endswith(".selection"):
            return self._tokens_chosen(name, a, b)
        if site.scores:
            x, y = _worth_of_choices(
                *(np.asarray(h)[real] for h in (a[site.scores], a[name], b[name]))
            )
        elif name.endswith(".weights"):
            experts = f"{name.removesuffix('weights')}experts"
            x, y = _weights_of_same_experts(
                *((np.asarray(h[experts])[real], np.asarray(h[name])[real]) for h in (a, b))
            )
        else:
            x, y = (np.asarray(h[name], np.float64) for h in (a, b))
            if real is not None:
                x, y = x[real], y[real]
        if not x.size:
            return 0.0
        x, y = (h.reshape(len(h), -1) for h in (x, y))
        known = ~np.isneginf(x) & ~np.isneginf(y)  # what is no candidate scores −inf
        x, y = (np.where(known, h, 0) for h in (x, y))
        apart = np.sqrt(np.sum(np.square(x - y), axis=-1).max())
        scale = np.sqrt(np.sum(np.square(y), axis=-1).mean())
        if apart == 0:
            return 0.0
        return float(apart / scale) if np.isfinite(apart) and scale > 0 else np.inf

    def _tokens_chosen(self, name: str, a: Sites, b: Sites) -> float:
        """Whether some query that chose the same pools has other tokens: 1, else 0."""
        real = self.trace.mask
        tokens = [_members(np.asarray(h[name])[real], real.shape[1]) for h in (a, b)]
        differ = np.any(np.not_equal(*tokens), axis=-1)
        pools = f"{name.removesuffix('selection')}pools"
        if pools in a and pools in b:
            chosen = [_members(np.asarray(h[pools])[real], real.shape[1]) for h in (a, b)]
            differ &= np.all(np.equal(*chosen), axis=-1)
        return float(differ.any())


def _members(chosen: np.ndarray, size: int) -> np.ndarray:
    """[n, size] bool, from indices [n, W]; −1 is none."""
    members = np.zeros((len(chosen), size + 1), bool)
    np.put_along_axis(members, np.where(chosen < 0, size, chosen), True, axis=-1)
    return members[:, :size]


def _worth_of_choices(
    scores: np.ndarray, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The scores [n, W] of two choices [n, W], each sorted: those of two that tie are equal.

    What was no candidate is worth less than anything.
    """
    scores = scores.astype(np.float64)
    least = -1e6 * np.abs(scores, where=np.isfinite(scores), out=np.ones_like(scores)).max(
        initial=1
    )

    def worth(chosen: np.ndarray) -> np.ndarray:
        of_chosen = np.take_along_axis(scores, np.maximum(chosen, 0), axis=-1)
        return np.sort(np.where(chosen < 0, least, np.maximum(of_chosen, least)), axis=-1)

    return worth(a), worth(b)


def _weights_of_same_experts(
    a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Both sides' weights of the tokens that chose the same experts, in the experts' order."""
    orders = [np.argsort(experts, axis=-1) for experts, _ in (a, b)]
    experts, weights = (
        [np.take_along_axis(side[i], order, -1) for side, order in zip((a, b), orders, strict=True)]
        for i in (0, 1)
    )
    same = np.all(experts[0] == experts[1], axis=-1)
    x, y = (side[same].astype(np.float64) for side in weights)
    return x, y
