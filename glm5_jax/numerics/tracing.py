"""Traces of our own model: one pass that also returns its sites, whole or reduced on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..config_json import config_json
from ..inputs import checked_inputs
from ..model import TextModel
from ..nn.record import Recorder, Wanted
from ..nn.types import GivenMask, Implementation, Mask, Tokens
from ..processes import on_host
from ..streaming import LayerStream
from .sites import OFF_TOKENS, Keep, chosen_sites, real_positions
from .trace import Reduce, Trace, complete_meta, sample_indices, versions

_SCORES = ("index_scores", "scores")  # −inf where there is no candidate


def trace(
    model: TextModel | LayerStream,
    tokens: Tokens,
    mask: GivenMask | None = None,
    keep: Keep = "*",
    reduce: Reduce = "full",
    implementation: Implementation = None,
) -> Trace:
    """Every site of one pass of the model, or those that `keep` names: see `FORMAT.md`.

    model: what `load` returns, or `stream_layers`, which reads the weights meanwhile; both give
    the same bits. keep: a pattern, or several (`layers.3.*`, `*.router.*`); no other site is
    computed for the trace. reduce: "full" arrays, which leave the device one by one, or "stats",
    for which each is reduced where it arises. tokens, mask, implementation: as a call takes them.

    Raises:
        TraceError: no site of this model matches a pattern.
        ValueError: `tokens` or `mask` is not as a call expects, `reduce` is neither.
    """
    tokens, known = checked_inputs(tokens, mask, model.config.vocab_size)
    wanted = _wanted(model, keep, reduce)
    sites: dict[str, Any] = {}

    def take(name: str, value: jax.Array) -> None:
        # What is small may stay where it is until all has been asked for.
        sites[name] = on_host(value) if reduce == "full" else value

    record = Recorder(take, wanted, None if on_host(known).all() else known)
    model(tokens, known, record=record, implementation=implementation)
    return Trace(
        sites if reduce == "full" else jax.tree.map(on_host, sites),
        on_host(tokens).astype(np.int32),
        on_host(known),
        complete_meta(_metadata(model, implementation), reduce),
    )


def traced(
    model: TextModel,
    tokens: Tokens,
    mask: GivenMask | None = None,
    keep: Keep = "*",
    reduce: Reduce = "full",
    implementation: Implementation = None,
) -> dict[str, Array]:
    """The arrays of `trace` as a function of arrays alone, for use under `jax.jit`.

    `keep`, `reduce` and `implementation` are constants there. `jax.jit` sorts what it returns by
    name.
    """
    sites: dict[str, Array] = {}
    known = None if mask is None else checked_inputs(tokens, mask, model.config.vocab_size)[1]
    record = Recorder(sites.__setitem__, _wanted(model, keep, reduce), known)
    model(tokens, mask, record=record, implementation=implementation)
    return sites


@dataclass(frozen=True)
class Reduction:
    """What is kept of a site: its array with zeros where nothing is real, or its stats.

    `pool` is how many tokens a pool has.
    """

    reduce: Reduce
    pool: int

    def __call__(self, name: str, x: Array, mask: Mask | None) -> Mapping[str, Array]:
        """The parts of a file's entry, by what they append to the site's name."""
        real = None
        if mask is not None:
            real = real_positions(OFF_TOKENS.get(name, "B T"), mask, self.pool)
        if real is not None:
            real = jnp.expand_dims(real, tuple(range(2, x.ndim)))
            x = jnp.where(real, x, 0)
        if self.reduce == "full":
            return {"": x}
        sample = x.reshape(-1)[sample_indices(x.size)]
        if name in _SCORES:
            real = (x > -jnp.inf) | jnp.isnan(x) if real is None else real & ~(x == -jnp.inf)
        return {"#stats": site_stats(x, real), "#sample": sample}


def site_stats(x: Array, real: Bool[Array, "*_"] | None) -> Float[Array, " 4"]:
    """Mean, standard deviation, largest magnitude and L2 norm where `real`, in float32."""
    x = x.astype(jnp.promote_types(jnp.float32, x.dtype))
    count = jnp.asarray(x.size)
    if real is not None:
        count = jnp.sum(jnp.broadcast_to(real, x.shape))
        x = jnp.where(real, x, 0)
    count = jnp.maximum(count, 1)
    mean = jnp.sum(x) / count
    apart = x - mean if real is None else jnp.where(real, x - mean, 0)
    std = jnp.sqrt(jnp.sum(jnp.square(apart)) / count)
    absmax = jnp.max(jnp.abs(x), initial=0)
    return jnp.stack([mean, std, absmax, jnp.sqrt(jnp.sum(jnp.square(x)))]).astype(jnp.float32)


def _wanted(model: TextModel | LayerStream, keep: Keep, reduce: Reduce) -> Wanted:
    if reduce not in get_args(Reduce):
        raise ValueError(f"reduce: expected one of {', '.join(get_args(Reduce))}, got {reduce!r}")
    reduction = Reduction(reduce, model.config.index_kpool)
    return Wanted(chosen_sites(model.skeleton, keep), reduction)


def _metadata(model: TextModel | LayerStream, implementation: Implementation) -> dict[str, str]:
    chosen = implementation or getattr(model, "implementation", None) or "chosen by the machine"
    return {
        "engine": "glm5-jax",
        "versions": versions("glm5-jax", "jax", "jaxlib", "numpy"),
        "config": json.dumps(config_json(model.config)),
        "dtype": str(model.dtype),
        "implementation": chosen if isinstance(chosen, str) else ",".join(chosen),
    }
