"""What a comparison found."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from .compare_choices import Flip
from .compare_logits import LogitComparison
from .compare_sides import ROUNDOFF

SiteVerdict = Literal["equal", "rounding", "flipped", "follows", "diverges", "not a number"]
WRONG = ("diverges", "not a number")
# Random models in plain bfloat16 against float32 had a median KL of 0.0017 nats at most, also where
# the mean was 0.09: flips move few tokens far, a mistake moves most of them.
USUAL_KL = 0.01


@dataclass(frozen=True)
class Row:
    """One site.

    relative_l2: the norm of the difference by the larger of the two norms. Of a choice: the share
        of tokens that chose otherwise.
    cosine, max_abs, expected: NaN for a choice; cosine also where a number is none.
    worst: the index of the largest difference, [row, position, ...]; of a sample where only
        samples are known; of the first flip of a choice, [row, position].
    expected: the relative error that rounding, and the error of what the site reads, usually make.
    excess: the error, by the largest that these explain. Beyond 1 the site `diverges`.
    behind_flips: the share of tokens that are behind a flipped choice.
    verdict: "equal" to the bit; "rounding"; "flipped", a choice, by rounding; "diverges"; "not a
        number"; "follows", where an error came in from a site that diverges, and none was added.
    """

    name: str
    layer: int | None
    tail: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    max_abs: float
    relative_l2: float
    cosine: float
    worst: tuple[int, ...]
    expected: float
    excess: float
    behind_flips: float
    flips: int
    verdict: SiteVerdict
    note: str = ""


@dataclass(frozen=True)
class LayerSummary:
    """The sites of one layer: the one of the largest excess, and the error that it hands on."""

    layer: int
    worst: str
    excess: float
    relative_l2: float
    flips: int
    verdict: SiteVerdict


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """What `compare` found.

    sides: who ran, as far as it is known.
    rows: one for each site of both sides, in the model's order.
    flips: one for each token and site that chose otherwise.
    only_in_trace, only_in_other: sites of one side only, which nothing is said about.
    logits: None where one side has none.
    real: [B, T], which tokens were compared.
    roundoff: the relative error of one rounding in the coarser of the two dtypes.
    """

    sides: tuple[dict[str, str], dict[str, str]]
    rows: tuple[Row, ...]
    flips: tuple[Flip, ...]
    only_in_trace: tuple[str, ...]
    only_in_other: tuple[str, ...]
    logits: LogitComparison | None
    real: np.ndarray
    roundoff: float

    @cached_property
    def first_divergence(self) -> Row | None:
        """The first site whose error is beyond what its inputs and its dtype explain."""
        return next((row for row in self.rows if row.verdict in WRONG), None)

    @property
    def ok(self) -> bool:
        """Whether all that differs is rounding, and choices that rounding turned over."""
        return self.first_divergence is None

    @property
    def usual_kl(self) -> float:
        """What the median token's KL stays below in these dtypes; it goes by their square."""
        return USUAL_KL * (self.roundoff / ROUNDOFF["bfloat16"]) ** 2

    @property
    def moved(self) -> bool:
        """Whether no site diverges, and yet the logits of most tokens moved more than is usual.

        A mistake smaller than the coarser dtype's rounding can hide in it.
        """
        return self.ok and self.logits is not None and self.logits.median_kl > self.usual_kl

    @cached_property
    def layers(self) -> tuple[LayerSummary, ...]:
        """One summary for each layer that has a site."""
        found: dict[int, list[Row]] = {}
        for row in self.rows:
            if row.layer is not None:
                found.setdefault(row.layer, []).append(row)
        return tuple(_summary(layer, rows) for layer, rows in sorted(found.items()))

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self, color: bool = False) -> str:
        """For a terminal: a sentence, the layers, the sites of the one that parts first."""
        from .report import to_text

        return to_text(self, color=color)

    def to_json(self) -> str:
        """All of it; NaN and infinities are null."""
        from .report import to_json

        return to_json(self)

    def to_html(self) -> str:
        """A page that stands alone: no network, no script."""
        from .report_html import to_html

        return to_html(self)

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_html` to a file, whole or not at all. Raises TraceError where it cannot be."""
        from .report_html import write_html

        return write_html(self, path)

    def write_plots(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write `errors.png` and, where there are logits, `logits.png`, into a directory.

        Raises TraceError: matplotlib is not installed.
        """
        from .report_plots import write_plots

        return write_plots(self, directory)


def _summary(layer: int, rows: list[Row]) -> LayerSummary:
    worst = max(rows, key=lambda row: row.excess)
    first_wrong = next((row.verdict for row in rows if row.verdict in WRONG), None)
    last = next((row for row in reversed(rows) if not np.isnan(row.max_abs)), rows[-1])
    return LayerSummary(
        layer=layer,
        worst=worst.name,
        excess=worst.excess,
        relative_l2=last.relative_l2,
        flips=sum(row.flips for row in rows),
        verdict=first_wrong or last.verdict,
    )
