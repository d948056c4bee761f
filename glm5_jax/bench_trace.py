"""What looking on costs: a trace of every site beside the plain forward pass."""

import functools
import tempfile
from pathlib import Path

import jax
import numpy as np

from glm5_jax.bench import Cost, Timing, alternate
from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.model import TextModel, load
from glm5_jax.numerics.tracing import traced


def time_trace(repeats: int, tokens: int = 1024) -> list[Timing]:
    """Stats of every site of configs/bench.json in float32, batch 1; both are one jitted call.

    The memory is what XLA plans for a call, beside the weights.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = make_tiny(Path(directory) / "bench", packaged_config("bench"), dtype="float32")
        model = load(path, dtype="float32")
    batch = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))
    stats, plain = (
        jax.jit(run).lower(model, batch).compile()
        for run in (functools.partial(traced, reduce="stats"), TextModel.__call__)
    )
    ours, peer = alternate(lambda: stats(model, batch), lambda: plain(model, batch), repeats)
    what = (
        f"trace of stats, bench.json, 1×{tokens} float32, {_megabytes(stats)} beside the weights "
        f"({_megabytes(plain)} without)"
    )
    return [Cost(what, ours, peer, "plain forward", 1 / 1.3)]


def _megabytes(call: jax.stages.Compiled) -> str:
    plan = call.memory_analysis()
    assert plan is not None  # XLA has one on every backend that we run on
    return f"{(plan.temp_size_in_bytes + plan.output_size_in_bytes) / 1e6:.0f} MB"
