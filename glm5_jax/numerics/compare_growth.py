"""What error a site may have, from the errors of the sites that it reads: the growth model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .compare_errors import SiteError
from .compare_sides import CHOICES, Frame
from .compare_steps import Node

# The largest gains of random models, times this, are the limit.
MARGIN = 4.0
# The median of fewer tokens says as little as one of them.
MEDIAN_OF = 8
# A choice that not both sides traced may have flipped. What that does to the next site, as a
# multiple of the scores' error and at most.
UNSEEN_CHOICE, UNSEEN_LIMIT = 10.0, 0.3


class Gains(NamedTuple):
    """How much a step enlarges errors: that of the median token, and of the worst one."""

    typical: float
    peak: float


class Judgement(NamedTuple):
    """`excess` is the error by the largest that is explained, `expected` the usual one.

    `gains` are those that this site showed, NaN where there was no token to tell.
    """

    excess: float
    expected: float
    gains: Gains


@dataclass
class Growth:
    """The errors of the sites so far, in the model's order, as [B, T]: measured or else predicted.

    `gains` are known for this model, from two runs of its own; others are those of `Step`.
    """

    frame: Frame
    gains: Mapping[str, Gains] = field(default_factory=dict)
    errors: dict[str, np.ndarray] = field(default_factory=dict)
    behind: dict[str, np.ndarray] = field(default_factory=dict)
    """Which tokens are behind a flip."""

    def incoming(self, node: Node) -> np.ndarray:
        """The largest error among what each token of the site reads."""
        return self._reached(self.errors, node, 0.0)

    def predict(self, node: Node, roundoff: float) -> None:
        """A site that not both sides have: its usual error."""
        gain = self._gains(node).typical
        error = gain * (roundoff + self.incoming(node))
        if node.tail in CHOICES:
            error = np.minimum(UNSEEN_CHOICE * error, UNSEEN_LIMIT)
        self.errors[node.name] = error
        self.behind[node.name] = self._reached(self.behind, node, False)

    def choose(self, node: Node, flipped: np.ndarray) -> None:
        """A choice, and which tokens chose otherwise: that explains whatever comes of it."""
        self.errors[node.name] = np.where(flipped, np.inf, 0.0)
        self.behind[node.name] = self._reached(self.behind, node, False) | flipped

    def measure(self, node: Node, error: SiteError, roundoff: float) -> Judgement:
        """A site that both sides have, with the error that was found."""
        positions, weights = error.positions, error.weights
        judged = ~np.isnan(positions)
        base = roundoff + np.broadcast_to(self.incoming(node), positions.shape)
        self.errors[node.name] = np.where(judged, positions, 0.0)
        self.behind[node.name] = self._reached(self.behind, node, False)
        # Behind a flip anything is explained, and a number that is none is reported as such.
        clean = judged & np.isfinite(base) & np.isfinite(positions)
        gains = self._gains(node)
        typical = np.minimum(gains.typical * base, 1.0)
        total = float(weights[judged].sum())
        expected = float(np.sqrt((typical**2 * weights)[judged].sum() / total)) if total else 0.0
        if not clean.any():
            return Judgement(0.0, expected, Gains(float("nan"), float("nan")))
        growth = positions[clean] / base[clean]
        found = Gains(float(np.median(growth)), float(growth.max()))
        excess = found.peak / gains.peak
        if growth.size >= MEDIAN_OF:
            excess = max(excess, found.typical / gains.typical)
        return Judgement(excess / MARGIN, expected, found)

    def _gains(self, node: Node) -> Gains:
        return self.gains.get(node.name) or Gains(node.step.typical, node.step.peak)

    def _reached(self, of: Mapping[str, np.ndarray], node: Node, nothing: float) -> np.ndarray:
        reached = np.full((1, 1), nothing)
        for how, name in node.reads:
            reached = np.maximum(reached, self._spread(of[name], how))
        return reached

    def _spread(self, values: np.ndarray, how: str) -> np.ndarray:
        """From the tokens that have an error to those that read them."""
        if not how:
            return values
        window = self.frame.window
        if how == "<" or window is None:
            return np.maximum.accumulate(values, axis=1)
        T = values.shape[1]
        return np.maximum.reduce(
            [np.pad(values, ((0, 0), (delay, 0)))[:, :T] for delay in range(window)]
        )
