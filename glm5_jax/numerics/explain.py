"""Which known mistake another engine makes, if it makes one.

Where two traces part first, `compare` says. The part of the model that this site belongs to is run
again, alone, from the numbers that the other engine had there, once as it should be and once with
each mistake of the catalogue (`mistakes`) that can be made in it. The mistake with which our model
gives the other engine's numbers, but for rounding, is the one that it makes. No error from before
that part, and no choice that went otherwise, comes in between.
"""

from __future__ import annotations

import itertools
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
from ..streaming import LayerStream
from .compare import compare
from .explain_fit import Fit
from .explain_parts import Part, mistakes_in, parts_of, run_part
from .mistakes import MISTAKES
from .trace import Trace

# A mistake is named where it leaves rounding, and at most this part of what there was without it.
LEFT = 0.2


@dataclass(frozen=True)
class Trial:
    """One mistake: how far our numbers are from the other engine's with it, 1 being rounding."""

    name: str
    description: str
    misfit: float


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` found.

    divergence: the site where the traces part first; None where all that differs is rounding.
    part: the part of the model that gives other numbers than ours from the same inputs; None where
        every part up to that site gives the same.
    misfits: how far the sites of that part are from the other engine's without any mistake, 1 being
        what rounding can do.
    trials: every mistake that can be made in that part, the best first.

    More than one mistake is `named` where these inputs cannot tell them apart, none where no
    mistake of the catalogue explains it.
    """

    divergence: str | None
    part: str | None = None
    misfits: Mapping[str, float] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()

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
    def ok(self) -> bool:
        """Whether there is nothing to explain."""
        return self.divergence is None

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
    model: TextModel | LayerStream,
    trace: Trace | str | os.PathLike[str],
    other: Trace | str | os.PathLike[str],
    site: str | None = None,
) -> Explanation:
    """Find the known mistake that makes `other` part from `trace`, a trace of our `model`.

    `model` is what `load` returns, or `stream_layers`, which reads the layers in question alone.
    `other` has full arrays. What a part of the model reads is taken from it; what it lacks is
    computed by ours from what it has, in the worst case from the tokens. So a trace of the layers
    in question, or of every layer's streams, is enough. `site` is where to look instead of where
    they part first; what comes before it is looked at too, as far back as its numbers are right.

    Raises:
        TraceError: a file is no trace, the two cannot be compared, `other` has stats only, or is of
            another model; or no site is called `site`.
    """
    trace, other = (t if isinstance(t, Trace) else Trace.load(t) for t in (trace, other))
    if other.reduce != "full":
        raise TraceError(
            "the other trace: expected full arrays, got stats, from which no layer can be run "
            "again; write it with reduce=full (keep=layers.N.* of the layer in question is enough)"
        )
    ours = replace(model.config, vision=None).dims
    if other.skeleton.layers != model.skeleton.layers or other.config.dims != ours:
        raise TraceError("the other trace is of another model than the one that was given")
    if site is None:
        row = compare(trace, other).first_divergence
        if row is None:
            return Explanation(None)
        site = row.name
    with jax.enable_x64(True):
        return _Search(model, other).explain(site)


class _Search:
    def __init__(self, model: TextModel | LayerStream, other: Trace):
        self.other = other
        self.parts = parts_of(model)
        self.given_by = {site: i for i, part in enumerate(self.parts) for site in part.gives}
        try:
            self.dtype = jnp.dtype(other.meta["dtype"])
        except TypeError:
            raise TraceError(
                f"the other trace: metadata dtype: expected float32, bfloat16 or the like, "
                f"got {other.meta['dtype']!r}"
            ) from None
        self.recorded = self._with_padding()

    def explain(self, divergence: str) -> Explanation:
        """The first part before or at the divergence, going back, that is not as the other's."""
        last = self.given_by.get(self._canonical(divergence))
        if last is None:
            raise TraceError(f"no site of this model is called {divergence!r}; see FORMAT.md")
        for i in range(last, -1, -1):
            if self.recorded.keys() & set(self.parts[i].gives):
                found = self._judge(divergence, self._stretch(i))
                if found is not None:
                    return found
        return Explanation(divergence)

    def _stretch(self, last: int) -> list[Part]:
        """A part, and before it those that give what it reads and was not traced."""
        stretch, wanted = set(), {last}
        while wanted:
            stretch |= wanted
            reads = {name for i in wanted for name in self.parts[i].reads}
            wanted = {self.given_by[name] for name in reads - self.recorded.keys()}
        return [self.parts[i] for i in sorted(stretch)]

    def _judge(self, divergence: str, stretch: list[Part]) -> Explanation | None:
        """The trials of a stretch; None where it gives the other's numbers without a mistake."""
        rounding = min(self.dtype, jnp.dtype(jnp.float32), key=lambda dtype: dtype.itemsize)
        exact, rounded = (self._run(stretch, dtype) for dtype in (jnp.float64, rounding))
        eps = float(jnp.finfo(wide(self.dtype)).eps)
        share = eps / float(jnp.finfo(wide(rounding)).eps)
        gives = [site for part in stretch for site in part.gives]
        fit = Fit(self.other, self.recorded, gives, exact, rounded, eps, share)
        misfits = fit.misfits(exact)
        if max(misfits.values()) <= 1:
            return None
        values = exact | self.recorded
        can_be_made = [mistakes_in(part, values, self.other.mask) for part in stretch]
        trials = []
        for name in dict.fromkeys(itertools.chain(*can_be_made)):
            made = [name if name in possible else None for possible in can_be_made]
            misfit = fit.misfit(self._run(stretch, jnp.float64, made))
            trials.append(Trial(name, MISTAKES[name].description, misfit))
        trials.sort(key=lambda trial: trial.misfit)
        return Explanation(divergence, stretch[-1].name, misfits, tuple(trials))

    def _run(
        self,
        stretch: list[Part],
        dtype: Any,
        mistakes: Iterable[str | None] = itertools.repeat(None),
    ) -> dict[str, Any]:
        """The sites of a stretch, from what was traced of its inputs; each part has its mistake."""
        sites: dict[str, Any] = {}
        for part, mistake in zip(stretch, mistakes, strict=False):
            sites |= run_part(part, sites | self.recorded, self.other.mask, dtype, mistake)
        return sites

    def _with_padding(self) -> dict[str, Any]:
        """What was traced, by the names that parts read; and at padded positions what was not.

        A trace has zeros there. Before the first mixer it was the embedding of the padding.
        """
        recorded = {name: np.asarray(self.other[name]) for name in self.other}
        recorded["tokens"] = self.other.tokens
        for name in self.other:
            if name.endswith(".in"):
                recorded.setdefault(self._canonical(name), recorded[name])
        if not self.other.mask.all():
            at_start: dict[str, Any] = {"tokens": self.other.tokens}
            for part in self.parts[:2]:
                at_start |= run_part(part, at_start, self.other.mask, jnp.float64)
            for name in recorded.keys() & at_start.keys() - {"tokens"}:
                real = self.other.mask.reshape(
                    self.other.mask.shape + (1,) * (recorded[name].ndim - 2)
                )
                recorded[name] = np.where(real, recorded[name], at_start[name])
        return recorded

    @staticmethod
    def _canonical(site: str) -> str:
        """The name that `parts_of` has for a site."""
        after = re.fullmatch(r"layers\.(\d+)\.in", site)
        i = int(after[1]) if after else 0
        return f"layers.{i - 1}.ffn.expand" if i else site
