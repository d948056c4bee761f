"""The two sides of a comparison: traces, files or plain dicts, checked to be of one run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np

from ..config import ModelConfig
from ..errors import TraceError
from .compare_steps import Node
from .trace import Stats, Trace

Comparable: TypeAlias = Trace | str | os.PathLike[str] | Mapping[str, np.ndarray]
"""A trace, its file, or its arrays by name: then `tokens` and `mask` may be among them."""

CHOICES = ("attn.pools", "attn.selection", "ffn.router.experts")
# The largest relative error of one rounding.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True, eq=False)
class Side:
    """One engine's numbers. What is not known of them is None."""

    label: str
    arrays: Mapping[str, np.ndarray]
    trace: Trace | None
    tokens: np.ndarray | None
    mask: np.ndarray | None
    roundoff: float

    @classmethod
    def of(cls, given: Comparable, label: str) -> Side:
        """Read what was given; `label` is what it is called where it has no file.

        Raises TraceError: the file is no trace.
        """
        if isinstance(given, (str, os.PathLike)):
            label, given = os.fspath(given), Trace.load(given)
        if isinstance(given, Trace):
            dtype = given.meta["dtype"]
            roundoff = ROUNDOFF[dtype] if dtype in ROUNDOFF else coarsest(given.values())
            return cls(label, given, given, given.tokens, given.mask, roundoff)
        arrays = {name: np.asarray(array) for name, array in given.items()}
        tokens, mask = arrays.pop("tokens", None), arrays.pop("mask", None)
        mask = None if mask is None else mask.astype(bool)
        return cls(label, arrays, None, tokens, mask, coarsest(arrays.values()))

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites."""
        return tuple(self.arrays) if self.trace is None else self.trace.sites

    @property
    def config(self) -> ModelConfig | None:
        """The model that ran."""
        return None if self.trace is None else self.trace.config

    @property
    def is_stats(self) -> bool:
        """Whether there are but stats and samples."""
        return self.trace is not None and self.trace.reduce == "stats"

    def stats(self, name: str) -> Stats:
        """What `Trace.stats` says; of a full trace too."""
        assert self.trace is not None
        return self.trace.stats(name)

    def sample(self, name: str) -> np.ndarray:
        """What `Trace.sample` says; of a full trace too."""
        assert self.trace is not None
        return self.trace.sample(name)

    def describe(self) -> dict[str, str]:
        """Who ran, for a report."""
        if self.trace is None:
            return {"label": self.label}
        names = ("engine", "dtype", "implementation", "reduce", "config_sha256")
        return {"label": self.label} | {n: self.trace.meta.get(n, "") for n in names}


@dataclass(frozen=True, eq=False)
class Frame:
    """Where the real tokens of both sides stand: `real` [B, T], `pool` tokens a pool."""

    tokens: np.ndarray | None
    real: np.ndarray
    config: ModelConfig | None

    @property
    def pool(self) -> int | None:
        """Tokens a pool."""
        return None if self.config is None else self.config.index_kpool

    @property
    def window(self) -> int | None:
        """Tokens that a KDA convolution sees."""
        return None if self.config is None else self.config.linear_conv_kernel_dim

    @property
    def first(self) -> np.ndarray:
        """[B]: the first real token of each row."""
        return self.real.argmax(1)

    @property
    def seen(self) -> np.ndarray:
        """[B, T]: how many real tokens each token sees, itself included; 0 for padding."""
        return np.where(self.real, np.cumsum(self.real, 1), 0)

    def valid(self, tail: str, shape: tuple[int, ...]) -> np.ndarray:
        """Which part of a site means anything, [n, m] or elementwise; n and m as in `rows`."""
        if tail == "attn.state":
            return np.asarray(self.real.any(1, keepdims=True))
        if tail == "attn.pool_keys":
            return self.ends_of_pools(shape[1]) <= self.real.sum(1, keepdims=True)
        if tail == "attn.index_scores":
            return self.ends_of_pools(shape[2]) <= self.seen[..., None]
        return self.real

    def on_tokens(self, tail: str, values: np.ndarray) -> np.ndarray:
        """What is per row or per pool, at the last token of it; NaN at the others."""
        if tail not in ("attn.state", "attn.pool_keys"):
            return values
        ends = self.real.sum(1, keepdims=True)
        if tail == "attn.pool_keys":
            ends = np.broadcast_to(self.ends_of_pools(values.shape[1]), values.shape)
        out = np.full(self.real.shape, np.nan)
        row, column = np.nonzero(self.valid(tail, values.shape))
        out[row, self.first[row] + ends[row, column] - 1] = values[row, column]
        return out

    def ends_of_pools(self, pools: int) -> np.ndarray:
        """[pools]: how many tokens a query must see to see a pool whole.

        Where the size of a pool is not known it is taken for as large as it can be.
        """
        size = self.pool or self.real.shape[1] // max(pools, 1)
        return size * (np.arange(pools) + 1)


def coarsest(arrays: Iterable[np.ndarray]) -> float:
    """The roundoff of the narrowest float dtype among the arrays; float32's if there is none."""
    found = [ROUNDOFF[a.dtype.name] for a in arrays if a.dtype.name in ROUNDOFF]
    return max(found, default=ROUNDOFF["float32"])


def matched(a: Side, b: Side) -> Frame:
    """What both sides ran on.

    Raises:
        TraceError: it was not the same: other configs, tokens or masks, no site in common; one
            line that names both sides and the first difference.
    """
    both = f"{a.label} and {b.label}"
    if a.config is not None and b.config is not None and a.config != b.config:
        values = {f.name: [getattr(s.config, f.name) for s in (a, b)] for f in fields(a.config)}
        name = next(name for name, (x, y) in values.items() if x != y)
        raise TraceError(
            f"{both} are of different configs: {name} is {values[name][0]} and {values[name][1]}"
        )
    if a.tokens is not None and b.tokens is not None and not np.array_equal(a.tokens, b.tokens):
        raise TraceError(f"{both} ran on different tokens: {_difference(a.tokens, b.tokens)}")
    if a.mask is not None and b.mask is not None and not np.array_equal(a.mask, b.mask):
        raise TraceError(f"{both} ran with different masks: {_difference(a.mask, b.mask)}")
    common = [name for name in a.sites if name in set(b.sites)]
    if not common:
        raise TraceError(
            f"{both} have no site in common: {_some(a.sites)} against {_some(b.sites)}"
        )
    if (a.is_stats or b.is_stats) and (a.trace is None or b.trace is None):
        raise TraceError(f"{both}: one has stats alone, and plain arrays are no trace; save both")
    mask = a.mask if a.mask is not None else b.mask
    tokens = a.tokens if a.tokens is not None else b.tokens
    if mask is None:
        if tokens is not None:
            mask = np.ones(tokens.shape, bool)
        else:
            mask = np.ones(_batch(common, a), bool)
    return Frame(tokens, mask, a.config if a.config is not None else b.config)


def paired(node: Node, a: Side, b: Side, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """The two arrays of a site that both sides have.

    Raises TraceError: they have different shapes, or one that no batch of these tokens has.
    """
    x, y = a.arrays[node.name], b.arrays[node.name]
    is_choice = node.tail in CHOICES
    if (x.shape[:-1] if is_choice else x.shape) != (y.shape[:-1] if is_choice else y.shape):
        raise TraceError(
            f"{node.name}: shape {list(x.shape)} in {a.label} and {list(y.shape)} in {b.label}"
        )
    B, T = frame.real.shape
    leading = {"attn.state": (B,), "attn.pool_keys": (B,)}.get(node.tail, (B, T))
    if x.shape[: len(leading)] != leading:
        raise TraceError(
            f"{node.name}: expected [{B}, {T}, ...] as the tokens are, got {list(x.shape)} in "
            f"{a.label} and {b.label}"
        )
    return x, y


def _batch(names: Iterable[str], side: Side) -> tuple[int, int]:
    for name in names:
        shape = side.arrays[name].shape
        if not name.endswith((".state", ".pool_keys")) and len(shape) >= 2:
            return shape[0], shape[1]
    return len(side.arrays[next(iter(names))]), 1


def _difference(a: np.ndarray, b: np.ndarray) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} against {list(b.shape)}"
    at = tuple(map(int, np.argwhere(a != b)[0]))
    return f"{a[at]} against {b[at]} at {list(at)}, the first of {int((a != b).sum())}"


def _some(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:2])}{', …' if len(names) > 2 else ''}" if names else "none at all"
