"""Two runs of our own model that differ in precision alone: what its weights do to rounding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..errors import TraceError
from ..model import TextModel
from ..nn.quantized import QuantizedWeight
from ..streaming import LayerStream, stream_layers
from .trace import Trace
from .tracing import trace


def two_precisions(
    model: TextModel | str | os.PathLike[str], tokens: np.ndarray | None, mask: np.ndarray
) -> tuple[Trace, Trace]:
    """Full traces of the model on these tokens in float32 and in float64.

    A directory is read a layer at a time. Raises TraceError: no tokens are known, or the model is
    quantised in memory (its directory will do); CheckpointError as `stream_layers` does.
    """
    if tokens is None:
        raise TraceError("model: neither side says on which tokens it ran; give a trace")
    with _64_bits():
        low, high = (trace(_in(model, dtype), tokens, mask) for dtype in ("float32", "float64"))
    return low, high


def _in(model: TextModel | str | os.PathLike[str], dtype: str) -> TextModel | LayerStream:
    if not isinstance(model, TextModel):
        return stream_layers(model, dtype)
    if any(isinstance(module, QuantizedWeight) for _, module in nnx.iter_graph(model)):
        raise TraceError("model: its weights are quantised; give its directory instead")
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), state))


@contextmanager
def _64_bits() -> Iterator[None]:
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
