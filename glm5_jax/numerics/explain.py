"""Which known mistake another engine makes, if it makes one.

Where two traces part first, `compare` says. The part of the model that this site belongs to is run
again, alone, from the numbers that the other engine had there, once as it should be and once with
each mistake of the catalogue (`mistakes`) that can be made in it. The mistake with which our model
gives the other engine's numbers, but for rounding, is the one that it makes. No error from before
that part, and no choice that went otherwise, comes in between.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import TraceError
from ..model import TextModel
from ..nn.types import wide
from ..streaming import LayerStream, stream_layers
from .compare import compare
from .explain_fit import Fit
from .explain_parts import Part, mistakes_in, parts_of, run_part
from .mistakes import MISTAKES
from .trace import Trace

# A mistake is named where it leaves rounding, and at most this part of what there was without it.
LEFT = 0.2
# It is nearer than no mistake where it leaves at most this part.
NEARER = 0.5


@dataclass(frozen=True)
class Trial:
    """One mistake: how far our numbers are from the other engine's with it, 1 being rounding."""

    name: str
    description: str
    misfit: float


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` found.

    divergence: the site where the traces part first; None where all that differs is rounding, and
        where `site` was given.
    part: the part of the model that gives other numbers than ours from the same inputs; None where
        every part that was checked gives the same.
    misfits: how far the sites of that part are from the other engine's without any mistake, 1 being
        what rounding can do.
    trials: every mistake that can be made in that part, the best first.
    site: where the search began.
    checked: the sites that were looked at from there back, in the model's order; they are what
        `parts_checked` of the `parts` up to there give. The rest was not traced.

    More than one mistake is `named` where these inputs cannot tell them apart, none where no
    mistake of the catalogue explains it.
    """

    divergence: str | None
    part: str | None = None
    misfits: Mapping[str, float] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    site: str | None = None
    checked: tuple[str, ...] = ()
    parts_checked: int = 0
    parts: int = 0

    @property
    def misfit(self) -> float:
        """That of the worst site, without any mistake."""
        return max(self.misfits.values(), default=0.0)

    @property
    def named(self) -> tuple[str, ...]:
        """The mistakes with which our numbers are the other engine's, but for rounding."""
        limit = min(1.0, LEFT * self.misfit)
        return tuple(trial.name for trial in self.trials if trial.misfit <= limit)

    @property
    def nearer(self) -> tuple[Trial, ...]:
        """The trials that come nearer to the other engine's numbers than ours without a mistake."""
        if math.isinf(self.misfit):
            return tuple(trial for trial in self.trials if math.isfinite(trial.misfit))
        return tuple(trial for trial in self.trials if trial.misfit <= NEARER * self.misfit)

    @property
    def ok(self) -> bool:
        """Whether there is nothing to explain."""
        return self.divergence is None and self.part is None

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self, color: bool = False) -> str:
        """For a terminal: what it is, in sentences, and the mistakes that come nearest."""
        from .explain_report import to_text

        return to_text(self, color=color)

    def to_json(self) -> str:
        """All of it; infinities are null."""
        from .explain_report import to_json

        return to_json(self)


def explain(
    model: TextModel | LayerStream | str | os.PathLike[str],
    trace: Trace | str | os.PathLike[str],
    other: Trace | str | os.PathLike[str],
    site: str | None = None,
) -> Explanation:
    """Find the known mistake that makes `other` part from `trace`, a trace of our `model`.

    `model` is what `load` returns, or `stream_layers`, or its directory: of these two the layers in
    question alone are read. `other` has full arrays. What a part of the model reads is taken from
    it; what it lacks is computed by ours from what it has, in the worst case from the tokens. So a
    trace of the layers in question, or of every layer's streams, is enough. `site` is where to look
    instead of where they part first; what comes before it is looked at too, as far back as its
    numbers are right.

    Raises:
        TraceError: a file is no trace, the two cannot be compared, `other` has stats only, or one
            is of another model; or no site is called `site`, or `other` has nothing up to it.
        CheckpointError: `model` is a directory that cannot be read.
    """
    trace, other = (t if isinstance(t, Trace) else Trace.load(t) for t in (trace, other))
    if other.reduce != "full":
        raise TraceError(
            "the other trace: expected full arrays, got stats, from which no layer can be run "
            "again; write it with reduce=full (keep=layers.N.* of the layer in question is enough)"
        )
    if not isinstance(model, TextModel | LayerStream):
        model = stream_layers(model)
    ours = replace(model.config, vision=None).dims
    for name, side in (("the other trace", other), ("the trace", trace)):
        if side.skeleton.layers != model.skeleton.layers or side.config.dims != ours:
            raise TraceError(f"{name} is of another model than the one that was given")
    divergence = None
    if site is None:
        row = compare(trace, other).first_divergence
        if row is None:
            return Explanation(None)
        site = divergence = row.name
    with jax.enable_x64(True):
        parts = parts_of(model)
        search = _Search(parts, other)
        found, stretch = search.explain(Explanation(divergence, site=site))
        # A name needs no trace of ours: our model with that mistake gives the other's numbers.
        if not found.named and trace.reduce == "full":
            _Search(parts, trace).check(stretch, model.dtype)
    return found


class _Search:
    def __init__(self, parts: list[Part], trace: Trace):
        self.parts, self.trace = parts, trace
        self.given_by = {site: i for i, part in enumerate(parts) for site in part.gives}
        self.dtype = jnp.dtype(trace.meta["dtype"])
        self.recorded = self._with_padding()

    def explain(self, asked: Explanation) -> tuple[Explanation, list[Part]]:
        """The first part before or at its site, going back, that is not as the trace's.

        With it the stretch that it ends; where there is none, the stretch nearest to the site.
        """
        last = self.given_by.get(self._canonical(str(asked.site)))
        if last is None:
            raise TraceError(f"no site of this model is called {asked.site!r}; see FORMAT.md")
        nearest: list[Part] = []
        sites: set[str] = set()
        names: set[str] = set()
        found = asked
        for i in range(last, -1, -1):
            if not self.recorded.keys() & set(self.parts[i].gives):
                continue
            stretch = self._stretch(i)
            fit, exact = self._fit(stretch)
            if not fit.names:
                continue
            nearest = nearest or stretch
            sites.update(fit.names)
            names.update(part.name for part in stretch)
            misfits = fit.misfits(exact)
            if max(misfits.values()) > 1:
                nearest, trials = stretch, self._trials(stretch, fit, exact)
                found = replace(asked, part=stretch[-1].name, misfits=misfits, trials=trials)
                break
        if not sites:
            raise TraceError(
                f"the other trace has no numbers of {asked.site} or of what comes before it: "
                "nothing can be checked"
            )
        checked = tuple(sorted(sites, key=list(self.given_by).index))
        return replace(found, checked=checked, parts_checked=len(names), parts=last + 1), nearest

    def check(self, stretch: list[Part], dtype: Any) -> None:
        """Refuse a trace that our model does not give, where it has what the stretch reads.

        Its weights may have been rounded to another dtype than the model's, `dtype`.
        """
        gives = {site for part in stretch for site in part.gives}
        reads = {site for part in stretch for site in part.reads} - gives
        if not reads <= self.recorded.keys():
            return
        eps = max(float(jnp.finfo(each).eps) for each in (self.dtype, dtype))
        fit, exact = self._fit(stretch, eps)
        if fit.names and fit.misfit(exact) > 1:
            raise TraceError(
                f"the trace is not of this model, whose {stretch[-1].name} gives other numbers: "
                "is it of another checkpoint, or are the two traces in the other order?"
            )

    def _stretch(self, last: int) -> list[Part]:
        """A part, and before it those that give what it reads and was not traced."""
        stretch, wanted = set(), {last}
        while wanted:
            stretch |= wanted
            reads = {name for i in wanted for name in self.parts[i].reads}
            wanted = {self.given_by[name] for name in reads - self.recorded.keys()}
        return [self.parts[i] for i in sorted(stretch)]

    def _fit(self, stretch: list[Part], places: float = 0) -> tuple[Fit, dict[str, Any]]:
        """What rounding can do in a stretch, and the sites that it gives without a mistake.

        places: the unit of the last place, where it is a larger one than the trace's.
        """
        rounding = min(self.dtype, jnp.dtype(jnp.float32), key=lambda dtype: dtype.itemsize)
        exact, rounded = (self._run(stretch, dtype) for dtype in (jnp.float64, rounding))
        eps = float(jnp.finfo(wide(self.dtype)).eps)
        share = eps / float(jnp.finfo(wide(rounding)).eps)
        gives = [site for part in stretch for site in part.gives]
        fit = Fit(self.trace, self.recorded, gives, exact, rounded, max(eps, places), share)
        return fit, exact

    def _trials(self, stretch: list[Part], fit: Fit, exact: Mapping[str, Any]) -> tuple[Trial, ...]:
        """Every mistake that can be made in a stretch, the best first."""
        values = {**exact, **self.recorded}
        can_be_made = [mistakes_in(part, values, self.trace.mask) for part in stretch]
        trials = []
        for name in dict.fromkeys(itertools.chain(*can_be_made)):
            made = [name if name in possible else None for possible in can_be_made]
            misfit = fit.misfit(self._run(stretch, jnp.float64, made))
            trials.append(Trial(name, MISTAKES[name].description, misfit))
        return tuple(sorted(trials, key=lambda trial: trial.misfit))

    def _run(
        self,
        stretch: list[Part],
        dtype: Any,
        mistakes: Iterable[str | None] = itertools.repeat(None),
    ) -> dict[str, Any]:
        """The sites of a stretch, from what was traced of its inputs; each part has its mistake."""
        sites: dict[str, Any] = {}
        for part, mistake in zip(stretch, mistakes, strict=False):
            sites |= run_part(part, sites | self.recorded, self.trace.mask, dtype, mistake)
        return sites

    def _with_padding(self) -> dict[str, Any]:
        """What was traced, by the names that parts read; and at padded positions what was not.

        A trace has zeros there. Before the first mixer it was the embedding of the padding.
        """
        recorded = {name: np.asarray(self.trace[name]) for name in self.trace}
        recorded["tokens"] = self.trace.tokens
        for name in self.trace:
            if name.endswith(".in"):
                recorded.setdefault(self._canonical(name), recorded[name])
        if not self.trace.mask.all():
            at_start: dict[str, Any] = {"tokens": self.trace.tokens}
            for part in self.parts[:2]:
                at_start |= run_part(part, at_start, self.trace.mask, jnp.float64)
            for name in recorded.keys() & at_start.keys() - {"tokens"}:
                real = self.trace.mask.reshape(
                    self.trace.mask.shape + (1,) * (recorded[name].ndim - 2)
                )
                recorded[name] = np.where(real, recorded[name], at_start[name])
        return recorded

    @staticmethod
    def _canonical(site: str) -> str:
        """The name that `parts_of` has for a site."""
        after = re.fullmatch(r"layers\.(\d+)\.in", site)
        i = int(after[1]) if after else 0
        return f"layers.{i - 1}.ffn.expand" if i else site
