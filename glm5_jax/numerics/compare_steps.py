"""Which sites a site is computed from, and how much a step can enlarge the error that it reads.

The growth model of `compare`: a step reads sites that are apart by some relative error, adds the
rounding of its dtype, and multiplies what comes in by its *gain*. A gain hangs on the step and the
weights, hardly on the dtype. Those here are the largest, rounded up, of 31 models of
`random_models`, each in float64, float32 and bfloat16, against itself and against transformers:
`typical` is that of the median token, `peak` that of the worst one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..skeleton import Skeleton
from .sites import sites_of


class Step(NamedTuple):
    """How a site comes about.

    `reads` are sites of the same layer: `<name` is read from all tokens up to this one, `~name`
    from the few that the convolution sees.
    """

    reads: tuple[str, ...]
    typical: float
    peak: float


@dataclass(frozen=True)
class Node:
    """A site among those of its model: its step, and the sites that it reads, by full name."""

    name: str
    layer: int | None
    tail: str
    step: Step
    reads: tuple[tuple[str, str], ...]
    """Pairs of how (``""``, `<`, `~`) and which site."""


def _connection(at: str, streams: str) -> dict[str, Step]:
    return {
        f"{at}.pre": Step((streams,), 1.4, 3.5),
        f"{at}.post": Step((streams,), 2.1, 4.5),
        f"{at}.comb": Step((streams,), 3.4, 6),
        f"{at}.collapse": Step((streams, f"{at}.pre"), 1, 1.6),
        f"{at}.norm": Step((f"{at}.collapse",), 1.4, 5),
    }


_RECURRENCE = ("<attn.q", "<attn.k", "<attn.v", "<attn.g", "<attn.beta")
_LAYER: dict[str, Step] = {
    **_connection("attn", "in"),
    "attn.q": Step(("~attn.norm",), 1, 3.5),
    "attn.k": Step(("~attn.norm",), 1.6, 4),
    "attn.v": Step(("~attn.norm",), 1.4, 4),
    "attn.g": Step(("attn.norm",), 1, 3.5),
    "attn.beta": Step(("attn.norm",), 1, 2.5),
    "attn.state": Step(_RECURRENCE, 1.6, 3),
    "attn.latent": Step(("attn.norm",), 1.5, 6),
    "attn.index_keys": Step(("attn.norm",), 1.7, 4),
    "attn.pool_keys": Step(("<attn.index_keys", "<attn.norm"), 1, 1.6),
    "attn.index_scores": Step(("attn.norm", "<attn.pool_keys"), 3, 6),
    "attn.pools": Step(("attn.index_scores",), 1, 1),
    "attn.selection": Step(("attn.pools",), 1, 1),
    "attn.kda": Step(("attn.o", "attn.norm"), 1.4, 20),
    "attn.dsa": Step(("attn.o",), 1.2, 2),
    "attn.expand": Step(("in", "attn.post", "attn.comb", "attn.kda", "attn.dsa"), 1, 1.4),
    **_connection("ffn", "attn.expand"),
    "ffn.router.logits": Step(("ffn.norm",), 1.6, 2.5),
    "ffn.router.scores": Step(("ffn.router.logits",), 1, 1),
    "ffn.router.experts": Step(("ffn.router.scores",), 1, 1),
    "ffn.router.weights": Step(("ffn.router.scores", "ffn.router.experts"), 1, 4),
    "ffn.experts": Step(("ffn.norm", "ffn.router.experts", "ffn.router.weights"), 2.7, 6),
    "ffn.shared": Step(("ffn.norm",), 2.7, 6),
    "ffn.moe": Step(("ffn.experts", "ffn.shared"), 1.1, 1.4),
    "ffn.dense": Step(("ffn.norm",), 2.7, 6),
    "ffn.expand": Step(("attn.expand", "ffn.post", "ffn.comb", "ffn.moe", "ffn.dense"), 1, 1.4),
}
_MIXED = {
    "kda": Step(_RECURRENCE, 1.6, 18),
    "dsa": Step(("attn.norm", "<attn.latent", "attn.selection"), 1.3, 5),
}
_FINAL = {
    "final.norm": Step(("final.mean",), 1, 2.5),
    "final.head": Step(("final.norm",), 1, 1.2),
}
_COPY = Step((), 1, 1.1)
_UNKNOWN = Step((), 3, 20)
ORDER = ("in", *_LAYER)


def model_graph(names: Iterable[str], skeleton: Skeleton | None) -> dict[str, Node]:
    """The sites of a model in their order, each with what it reads.

    Without a skeleton the model is what has the given names. A site that is not of the model's
    own, or whose inputs have no name, reads the one before it, from all earlier tokens.
    """
    known = list(names) if skeleton is None else list(sites_of(skeleton))
    universe = sorted(dict.fromkeys(known), key=_place)
    layers: dict[int, set[str]] = {}
    for name in universe:
        layer, tail = split_name(name)
        if layer is not None:
            layers.setdefault(layer, set()).add(tail)
    graph: dict[str, Node] = {}
    streams, selection, before = "embedding", None, None
    for name in universe:
        layer, tail = split_name(name)
        step = _step(tail, layers.get(-1 if layer is None else layer, set()))
        at = "" if layer is None else f"layers.{layer}."
        reads = [(r[0], at + r[1:]) if r[0] in "<~" else ("", at + r) for r in step.reads]
        reads = [(how, read) for how, read in reads if read in graph]
        if tail in ("in", "final.mean") and streams in graph:
            reads = [("", streams)]
        elif tail == "attn.selection" and not reads and selection is not None:
            reads = [("", selection)]  # shared: another layer's
        elif not reads and before is not None:
            reads = [("<", before)]
        graph[name] = Node(name, layer, tail, step, tuple(reads))
        if tail == "ffn.expand":
            streams = name
        elif tail == "attn.selection":
            selection = name
        before = name
    return graph


def split_name(name: str) -> tuple[int | None, str]:
    """`layers.3.attn.o` → (3, `attn.o`), `final.norm` → (None, `final.norm`)."""
    first, _, rest = name.partition(".")
    index, _, tail = rest.partition(".")
    return (int(index), tail) if first == "layers" and index.isdigit() and tail else (None, name)


def _step(tail: str, layer: set[str]) -> Step:
    if tail == "attn.o":
        is_kda = layer & {"attn.kda", "attn.q", "attn.k", "attn.v", "attn.g", "attn.beta"}
        return _MIXED["kda" if is_kda else "dsa"]
    if tail in ("embedding", "in", "final.mean"):
        return _COPY
    return _LAYER.get(tail) or _FINAL.get(tail) or _UNKNOWN


_PLACES = {tail: float(place) for place, tail in enumerate(ORDER)}
_PLACES["attn.o"] = _PLACES["attn.kda"] - 0.5


def place(tail: str) -> float:
    """Where a site stands within a layer."""
    return _PLACES.get(tail, len(ORDER))


def _place(name: str) -> tuple[float, float]:
    layer, tail = split_name(name)
    if layer is not None:
        return layer, place(tail)
    if name == "embedding":
        return -1, 0
    return float("inf"), ("final.mean", "final.norm", "final.head", name).index(name)
