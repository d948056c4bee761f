"""Two traces, site by site: where they part first, by how much, and whether it is rounding.

The growth model tells. A step adds the rounding of its dtype to the error of what it reads, and
multiplies both by its gain (`compare_steps`); what it reads is known, since both sides traced it.
So every site is judged by itself, however much error has piled up before it, and one that is
further apart than its inputs explain (`compare_growth`) has an error of its own.

A discrete choice that rounding turned over (`compare_choices`) explains any error behind it, at
the tokens that read it. That error is measured where it arises, and what comes later is held
against what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .compare_choices import (
    Flip,
    Groups,
    Verdict,
    flipped,
    judge,
    pools_of_tokens,
    with_refused_groups,
)
from .compare_errors import SiteError, array_error, sample_error
from .compare_growth import Gains, Growth
from .compare_logits import compare_logits
from .compare_sides import CHOICES, Comparable, Frame, Side, matched, paired
from .compare_steps import Node, model_graph
from .compare_table import WRONG, Comparison, Row, SiteVerdict

if TYPE_CHECKING:
    from ..model import TextModel

SCORES = {
    "attn.pools": "attn.index_scores",
    "attn.selection": "attn.index_scores",
    "ffn.router.experts": "ffn.router.scores",
}
# The norm of scores is that of the candidates and hangs on choices, and where a weight stands does
# on the order of scores that may be equal.
STATS_BY = {**dict.fromkeys(SCORES.values(), "sample"), "ffn.router.weights": "norm"}


def compare(
    trace: Comparable,
    other: Comparable,
    *,
    expected: tuple[Comparable, Comparable] | None = None,
    model: TextModel | str | os.PathLike[str] | None = None,
) -> Comparison:
    """Compare two traces of the same tokens: full, stats, or one of each; of any two dtypes.

    A side is a `Trace`, the path of one, or a dictionary of arrays as the model's `record` makes
    it (with `tokens` and `mask`, if there are any). Without more, the gains of steps are those
    that random models show. `expected` are two traces of one engine in two precisions, on any
    tokens; `model` is our model or its directory, which is then run on these tokens in float32 and
    float64: either measures what this model's weights do to errors.

    Raises:
        TraceError: a file is no trace; or the two are of different tokens, masks, configs or
            shapes, or have no site in common.
        CheckpointError: `model` is a directory that cannot be read.
    """
    a, b = Side.of(trace, "the trace"), Side.of(other, "the other")
    frame = matched(a, b)
    gains: dict[str, Gains] = {}
    if model is not None:
        from .compare_model import two_precisions

        expected = two_precisions(model, frame.tokens, frame.real)
    if expected is not None:
        gains = measured_gains(*expected)
    walk = _Walk(a, b, frame, gains)
    walk.run()
    head = [side.arrays.get("final.head") for side in (a, b)]
    logits = None
    if head[0] is not None and head[1] is not None:
        logits = compare_logits(head[0], head[1], frame.real)
    return Comparison(
        sides=(a.describe(), b.describe()),
        rows=tuple(walk.rows),
        flips=tuple(walk.flips),
        only_in_trace=tuple(name for name in a.sites if name not in set(b.sites)),
        only_in_other=tuple(name for name in b.sites if name not in set(a.sites)),
        logits=logits,
        real=frame.real,
        roundoff=max(a.roundoff, b.roundoff),
    )


def measured_gains(low: Comparable, high: Comparable) -> dict[str, Gains]:
    """The gains of every step of a model, from its traces in two precisions.

    What a site happened to do to the rounding of one run is trusted down to a quarter of the usual.
    """
    a, b = Side.of(low, "the lower precision"), Side.of(high, "the higher precision")
    walk = _Walk(a, b, matched(a, b), {})
    walk.run()
    gains = {}
    for name, found in walk.found.items():
        usual = walk.graph[name].step
        gains[name] = Gains(
            float(np.fmax(found.typical, usual.typical / 4)),
            float(np.fmax(found.peak, usual.peak / 4)),
        )
    return gains


class _Walk:
    """The sites of both sides in the model's order, each judged by those that it reads."""

    def __init__(self, a: Side, b: Side, frame: Frame, gains: Mapping[str, Gains]):
        self.sides, self.frame = (a, b), frame
        skeleton = next((side.trace.skeleton for side in (a, b) if side.trace is not None), None)
        self.graph = model_graph([*a.sites, *b.sites], skeleton)
        self.growth = Growth(frame, gains)
        self.common = set(a.sites) & set(b.sites)
        self.by_stats = a.is_stats or b.is_stats
        self.roundoff = max(a.roundoff, b.roundoff)
        self.rows: list[Row] = []
        self.flips: list[Flip] = []
        self.found: dict[str, Gains] = {}
        self._diverged: set[str] = set()
        self._flip_at: dict[tuple[str, int, int], Flip] = {}
        self._all_scores: dict[tuple[int, str], np.ndarray | None] = {}

    def run(self) -> None:
        """Visit every site."""
        for node in self.graph.values():
            if node.name not in self.common or (self.by_stats and node.tail in CHOICES):
                self.growth.predict(node, self.roundoff)
                diverges = False
            elif node.tail in CHOICES:
                diverges = self._choice(node)
            else:
                diverges = self._site(node)
            if diverges or self._follows(node):
                self._diverged.add(node.name)

    def _follows(self, node: Node) -> bool:
        return any(name in self._diverged for _, name in node.reads)

    def _site(self, node: Node) -> bool:
        a, b = self.sides
        if self.by_stats:
            x, y = (side.sample(node.name) for side in (a, b))
            stats = a.stats(node.name), b.stats(node.name)
            error = sample_error(x, y, *stats, by=STATS_BY.get(node.tail, "sample and norm"))
        else:
            x, y = paired(node, a, b, self.frame)
            error = self._array_error(node, x, y)
        judgement = self.growth.measure(node, error, self.roundoff)
        self.found[node.name] = judgement.gains
        verdict: SiteVerdict = "rounding"
        if error.nonfinite:
            verdict = "not a number"
        elif judgement.excess > 1:
            verdict = "diverges"
        elif self._follows(node):
            verdict = "follows"
        elif error.max_abs == 0 and error.relative_l2 == 0:
            verdict = "equal"
        self._add_row(
            *(node, x, y, verdict),
            max_abs=error.max_abs,
            relative_l2=error.relative_l2,
            cosine=error.cosine,
            worst=error.worst,
            expected=judgement.expected,
            excess=float("inf") if error.nonfinite else judgement.excess,
            flips=0,
            note=error.nonfinite or "",
        )
        return verdict in WRONG

    def _array_error(self, node: Node, x: np.ndarray, y: np.ndarray) -> SiteError:
        valid = self.frame.valid(node.tail, x.shape)
        if node.tail in SCORES.values():
            # −inf marks what was no candidate on one side; the choice is judged by itself.
            valid = np.broadcast_to(valid if valid.ndim == 3 else valid[..., None], x.shape)
            valid = valid & (x != -np.inf) & (y != -np.inf)
        elif node.tail == "ffn.router.weights":
            # In the order of the scores; two that are nearly equal may stand either way.
            x, y = (
                self._by_expert(node, side, w)
                for side, w in ((self.sides[0], x), (self.sides[1], y))
            )
        if node.tail == "attn.state":
            error = array_error(x[:, None], y[:, None], valid)
            error = replace(error, worst=(*error.worst[:1], *error.worst[2:]))
        else:
            error = array_error(x, y, valid)
        return replace(
            error,
            positions=self.frame.on_tokens(node.tail, error.positions),
            weights=self.frame.on_tokens(node.tail, error.weights),
        )

    def _by_expert(self, node: Node, side: Side, weights: np.ndarray) -> np.ndarray:
        experts = side.arrays.get(node.name.replace("weights", "experts"))
        if experts is None:
            return np.sort(weights, axis=-1)
        return np.take_along_axis(weights, np.argsort(experts, axis=-1), axis=-1)

    def _choice(self, node: Node) -> bool:
        a, b = self.sides
        x, y = paired(node, a, b, self.frame)
        flips = [
            Flip(
                *(node.name, node.layer, row, position, tuple(sorted(p - q)), tuple(sorted(q - p))),
                *self._verdict(node, row, position, (p, q)),
            )
            for row, position, p, q in flipped(x, y, self.frame.real)
        ]
        where = np.zeros(self.frame.real.shape, bool)
        for flip in flips:
            where[flip.row, flip.position] = True
        self.growth.choose(node, where)
        self.flips += flips
        self._flip_at |= {(flip.site, flip.row, flip.position): flip for flip in flips}
        wrong = [flip for flip in flips if flip.explained is False]
        share = len(flips) / max(int(self.frame.real.sum()), 1)
        unknown = sum(flip.explained is None for flip in flips)
        diverges = bool(wrong) or 2 * unknown > self.frame.real.sum()
        note = f"{len(wrong)} of {len(flips)} without a reason in the scores" if wrong else ""
        worst = next(iter(wrong or flips), None)
        verdict: SiteVerdict = "equal"
        if diverges:
            verdict = "diverges"
        elif flips:
            verdict = "follows" if self._follows(node) else "flipped"
        self._add_row(
            *(node, x, y, verdict),
            max_abs=float("nan"),
            relative_l2=share,
            cosine=float("nan"),
            worst=() if worst is None else (worst.row, worst.position),
            expected=float("nan"),
            excess=float("inf") if diverges else 0.0,
            flips=len(flips),
            note=note,
        )
        return diverges

    def _add_row(
        self, node: Node, x: np.ndarray, y: np.ndarray, verdict: SiteVerdict, **found: Any
    ) -> None:
        self.rows.append(
            Row(
                name=node.name,
                layer=node.layer,
                tail=node.tail,
                shape=x.shape,
                dtypes=(x.dtype.name, y.dtype.name),
                behind_flips=self._share(self.growth.behind[node.name]),
                verdict=verdict,
                **found,
            )
        )

    def _verdict(
        self, node: Node, row: int, position: int, sets: tuple[frozenset[int], frozenset[int]]
    ) -> Verdict:
        """Whether rounding can have turned over one token's choice."""
        source = next((name for _, name in node.reads), "")
        pool, config = self.frame.pool, self.frame.config
        first, seen = int(self.frame.first[row]), int(self.frame.seen[row, position])
        if source in self.common and self.graph[source].tail in CHOICES:
            return self._inherited(source, row, position, sets)
        name = f"layers.{node.layer}.{SCORES[node.tail]}"
        if node.tail == "attn.selection":
            if pool is None or name not in self.graph:
                return Verdict(None, None, None)
            (p, p_tail), (q, q_tail) = (pools_of_tokens(s, first, seen, pool) for s in sets)
            if p_tail != q_tail:
                return Verdict(None, None, False)
            sets = p, q
        scores = [self._scores(side, name) for side in self.sides]
        known = next((s for s in scores if s is not None), None)
        if known is None:
            return Verdict(None, None, None)
        candidates = np.ones(known.shape[-1], bool)
        groups = None
        if node.tail != "ffn.router.experts":
            candidates = self.frame.ends_of_pools(len(candidates)) <= seen
        elif config is not None:
            groups = Groups(config.n_group, config.topk_group)
        at = np.broadcast_to(self.growth.errors[name], self.frame.real.shape)[row, position]
        return judge(
            [None if s is None else s[row, position] for s in scores],
            sets,
            candidates,
            self.roundoff,
            float(at),
            groups,
        )

    def _scores(self, side: Side, name: str) -> np.ndarray | None:
        """The scores behind a choice, also those of groups that were refused."""
        key = self.sides.index(side), name
        if key not in self._all_scores:
            scores, logits = (side.arrays.get(n) for n in (name, name.replace("scores", "logits")))
            if scores is not None and logits is not None:
                scores = with_refused_groups(scores, logits, self.frame.real)
            self._all_scores[key] = scores
        return self._all_scores[key]

    def _inherited(
        self, source: str, row: int, position: int, sets: tuple[frozenset[int], frozenset[int]]
    ) -> Verdict:
        """A selection of tokens differs as the pools do, or the selection that it shares."""
        flip = self._flip_at.get((source, row, position))
        if flip is None:
            return Verdict(None, None, False)
        moved = {*flip.trace_only, *flip.other_only}
        pool, first = self.frame.pool, int(self.frame.first[row])
        if source.endswith(".pools"):
            if pool is None:
                return Verdict(flip.gap, flip.allowed, flip.explained)
            moved = {first + p * pool + slot for p in moved for slot in range(pool)}
        if moved != sets[0] ^ sets[1]:
            return Verdict(None, None, False)
        return Verdict(flip.gap, flip.allowed, flip.explained)

    def _share(self, of: np.ndarray) -> float:
        real = self.frame.real
        return float(np.broadcast_to(of, real.shape)[real].mean()) if real.any() else 0.0
