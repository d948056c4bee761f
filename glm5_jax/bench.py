"""Timings beside a named peer, taken in one run on the same machine, weights, inputs and dtype.

Every bench returns `Timing`s; the command prints both numbers and the ratio, and fails when a
ratio is under its goal, if it has one. Tests assert nothing of this: times belong to a machine.
"""

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.config import load_config
from glm5_jax.generation import Running, begin, make_step
from glm5_jax.model import TextModel, load

TURN_SECONDS = 0.5
DECODE_ROOM = 256
_ORACLE = "transformers on the same CPU"


@dataclass(frozen=True)
class Timing:
    """Seconds of ours and of a peer for the same work, and the ratio to be reached, if any."""

    what: str
    ours: float
    peer: float
    peer_name: str
    goal: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as long the peer takes."""
        return self.peer / self.ours

    @property
    def reached(self) -> bool:
        """Whether the ratio is at least its goal; true without one."""
        return self.goal is None or self.ratio >= self.goal

    @property
    def verdict(self) -> str:
        """The ratio, its goal, and whether that is reached."""
        text = self._said(self.ratio, ".2f")
        if self.goal is not None:
            goal = self._said(self.goal, "g")
            text += f", goal {goal} {'reached' if self.reached else 'MISSED'}"
        return text

    def _said(self, ratio: float, digits: str) -> str:
        return f"{ratio:{digits}}x"

    def __str__(self) -> str:
        ours, peer = _seconds(self.ours), _seconds(self.peer)
        return f"{self.what}: {ours}, {self.peer_name}: {peer}; {self.verdict}"


@dataclass(frozen=True)
class Cost(Timing):
    """A timing of more work than the peer's: it says how many times as long ours takes."""

    def _said(self, ratio: float, digits: str) -> str:
        return f"{1 / ratio:{digits}} times as long"


def bench_forward(repeats: int = 5, tokens: int = 1024) -> list[Timing]:
    """A float32 forward pass of configs/bench.json, batch 1: jitted ours, the oracle's eager."""
    from glm5_jax.numerics.oracle import oracle_logits, oracle_model

    config = load_config(packaged_config("bench"))
    batch = np.random.default_rng(0).integers(0, config.vocab_size, (1, tokens))
    with tempfile.TemporaryDirectory() as directory:
        path = make_tiny(Path(directory) / "bench", packaged_config("bench"), dtype="float32")
        model = load(path, dtype="float32")
        oracle = oracle_model(path, "float32")
        forward = jax.jit(TextModel.__call__)
        ours, peer = alternate(
            lambda: forward(model, batch), lambda: oracle_logits(oracle, batch), repeats
        )
    return [Timing(f"forward, bench.json, 1×{tokens} float32", ours, peer, _ORACLE, 15)]


def bench_kda(repeats: int = 5, tokens: int = 1024, heads: int = 8, dim: int = 128) -> list[Timing]:
    """The chunked KDA operation alone, float32: ours against each peer that is installed."""
    from pallas_kernels.kda import chunk_kda

    rng = np.random.default_rng(0)
    shape = (1, tokens, heads, dim)
    q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
    g = -5 * rng.random(shape, np.float32)
    beta = rng.random(shape[:3], np.float32)
    inputs = (q, k, v, g, beta)
    arrays = [jax.device_put(x) for x in inputs]
    chunked = jax.jit(chunk_kda)

    timings, missing = [], []
    for name, peer_of, goal in (
        (_ORACLE, _oracle_kda, 30),
        ("jax-linear-attention's plain JAX", _jla_kda, 3),
    ):
        try:
            peer = peer_of(inputs)
        except ImportError as error:
            missing.append(error)
            continue
        ours, theirs = alternate(lambda: chunked(*arrays), peer, repeats)
        what = f"KDA, 1×{tokens}, {heads} heads of {dim}, float32"
        timings.append(Timing(what, ours, theirs, name, goal))
    if not timings:
        raise missing[0]
    return timings


def _oracle_kda(inputs: tuple[np.ndarray, ...]) -> Callable[[], Any]:
    """transformers' chunked form, eager."""
    from glm5_jax.numerics.oracle import oracle_module

    chunked = oracle_module().chunk_kimi_delta_attention
    import torch

    tensors = [torch.from_numpy(x) for x in inputs]

    def run() -> Any:
        with torch.no_grad():
            return chunked(*tensors, use_qk_l2norm_in_kernel=True)

    return run


def _jla_kda(inputs: tuple[np.ndarray, ...]) -> Callable[[], Any]:
    """jax-linear-attention's chunked form in plain JAX, jitted, with its own chunk sizes."""
    from jla.ops import chunked

    arrays = [jax.device_put(x) for x in inputs]
    run = jax.jit(functools.partial(chunked.kda, use_qk_l2norm=True))
    return lambda: run(*arrays)


def bench_compile(repeats: int = 1) -> list[Timing]:
    """First calls at 45 layers and at 9 (tiny widths): layer by layer, and under one `jax.jit`.

    Layer by layer there is one compilation per kind of layer, so the first call should hardly
    grow; under one `jax.jit` XLA compiles every layer anew.
    """
    raw = json.loads(packaged_config("tiny").read_text())
    tokens = np.arange(32).reshape(1, 32)

    def first_call(layers: int, jitted: bool) -> float:
        pattern = ["linear_attention"] * 3 + ["deepseek_sparse_attention"]
        text = raw["text_config"] | {
            "num_hidden_layers": layers,
            "layer_types": [pattern[i % 4] for i in range(layers)],
            "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (layers - 3),
            "indexer_types": ["full"] * layers,
            "num_nextn_predict_layers": 0,
            "linear_attn_config": {
                name: value
                for name, value in raw["text_config"]["linear_attn_config"].items()
                if not name.endswith("_layers")
            },
        }
        with tempfile.TemporaryDirectory() as directory:
            path = make_tiny(Path(directory) / "tiny", raw | {"text_config": text})
            model = load(path)
        forward = jax.jit(TextModel.__call__) if jitted else TextModel.__call__
        jax.clear_caches()
        start = time.perf_counter()
        jax.block_until_ready(forward(model, tokens))
        return time.perf_counter() - start

    timings: list[Timing] = []
    for what, jitted, goal in (
        ("first call layer by layer", False, 0.5),
        ("first call under one jit", True, None),
    ):
        nine, all_layers = (
            statistics.median(first_call(layers, jitted) for _ in range(repeats))
            for layers in (9, 45)
        )
        timings.append(Cost(f"{what}, 45 layers", all_layers, nine, "9 layers", goal))
    return timings


def bench_decode(
    repeats: int = 5, contexts: tuple[int, int] = (1024, 8192), batches: tuple[int, ...] = (1, 8)
) -> list[Timing]:
    """A further token of every row, float32 and greedy: `generate`'s step, the oracle's call.

    The rows of a batch are continuations of one prompt, which differ from their first token on.
    The prompt is ours to read: its state is handed to the oracle, whose first tokens must be ours.
    """
    from glm5_jax.numerics.oracle import oracle_model

    timings = []
    ours: dict[tuple[int, int], Callable[[], np.ndarray]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = make_tiny(Path(directory) / "bench", packaged_config("bench"), dtype="float32")
        model, oracle = load(path, dtype="float32"), oracle_model(path, "float32")
    rng = np.random.default_rng(0)
    for context in contexts:
        prompt = rng.integers(0, model.config.vocab_size, context)
        one = begin(model, [prompt], context + DECODE_ROOM, None)
        for batch in batches:
            running = replace(
                jax.tree.map(lambda x, rows=batch: jnp.repeat(x, rows, axis=0), one),
                newest=jnp.asarray(rng.integers(0, model.config.vocab_size, batch), jnp.int32),
            )
            peer = _peer_decoding(oracle, running)
            ours[batch, context] = _decoding(model, running)
            if not np.array_equal(ours[batch, context](), peer()):
                raise RuntimeError("the two sides choose different tokens from one state")
            mine, theirs = alternate(ours[batch, context], peer, repeats)
            what = f"decode, bench.json, batch {batch} after {context:,} tokens, float32"
            timings.append(Timing(what, mine, theirs, _ORACLE, 10))
    for batch in batches:
        far, near = alternate(ours[batch, contexts[1]], ours[batch, contexts[0]], repeats)
        what = f"decode, batch {batch} after {contexts[1]:,} tokens"
        timings.append(Cost(what, far, near, f"after {contexts[0]:,}", 1 / 1.5))
    return timings


def _decoding(model: TextModel, running: Running) -> Callable[[], np.ndarray]:
    """A call decodes one more token of each row, as `generate` does, and returns them."""
    step = make_step(model, None)
    active = np.ones(running.cache.batch, bool)
    start, used = np.array(running.cache.lengths), 0  # a copy: the step takes the array's place

    def call() -> np.ndarray:
        nonlocal running, used
        if used == DECODE_ROOM:
            # Times do not hang on what the state says: the same slots are written once more.
            again = replace(running.cache, lengths=jnp.asarray(start))
            running, used = replace(running, cache=again), 0
        running, tokens, _ = step(running, active)
        used += 1
        return np.asarray(tokens)[:, 0]

    return call


def _peer_decoding(oracle: Any, running: Running) -> Callable[[], np.ndarray]:
    """The same by the oracle, from the same state; its cache grows with every call."""
    from glm5_jax.numerics.oracle_cache import oracle_cache, oracle_decode

    cache, tokens = oracle_cache(oracle, running.cache), np.asarray(running.newest)

    def call() -> np.ndarray:
        nonlocal tokens
        tokens = np.argmax(oracle_decode(oracle, cache, tokens), axis=-1)
        return tokens

    return call


def bench_trace(repeats: int = 5) -> list[Timing]:
    """A trace of every site's stats beside the plain forward pass: time and memory."""
    from glm5_jax.bench_trace import time_trace

    return time_trace(repeats)


def bench_convert(repeats: int = 3) -> list[Timing]:
    """A few layers of the release's sizes: ours, a plain copy with SHA-256, and transformers."""
    from glm5_jax.bench_checkpoint import time_conversion

    return time_conversion(repeats)


def bench_rehearsal(repeats: int = 1) -> Iterator[Any]:
    """Layers of the release in full size: time and peak memory of convert, verify and export."""
    from glm5_jax.bench_checkpoint import rehearse

    return rehearse()


def bench_sparse_mla(repeats: int = 5) -> list[Timing]:
    """Sparse MLA in XLA against a dense product that is masked."""
    from glm5_jax.bench_sparse import time_sparse_mla

    return time_sparse_mla(repeats)


def bench_indexer(repeats: int = 5) -> list[Timing]:
    """The indexer's choice in windows of pools against that of all scores at once."""
    from glm5_jax.bench_sparse import time_indexer

    return time_indexer(repeats)


def bench_dispatch(repeats: int = 5) -> list[Timing]:
    """Experts on other devices: tokens gathered and sums scattered, against other ways."""
    from glm5_jax.bench_dispatch import time_dispatch

    return time_dispatch(repeats)


def bench_prefill(repeats: int = 1) -> list[Timing]:
    """32,768 tokens through one DSA layer: time against half as many, and memory."""
    from glm5_jax.bench_sparse import time_prefill

    return time_prefill()


# What a run without names leaves out: 40 GB of disk, and minutes.
ASKED_FOR: dict[str, Callable[..., Iterable[Any]]] = {
    "rehearsal": bench_rehearsal,
    "prefill": bench_prefill,
}
BENCHES: dict[str, Callable[..., list[Timing]]] = {
    "forward": bench_forward,
    "kda": bench_kda,
    "compile": bench_compile,
    "decode": bench_decode,
    "sparse-mla": bench_sparse_mla,
    "indexer": bench_indexer,
    "dispatch": bench_dispatch,
    "trace": bench_trace,
    "convert": bench_convert,
}


def alternate(ours: Callable[[], Any], peer: Callable[[], Any], repeats: int) -> tuple[float, ...]:
    """Median seconds of a call of each, timed in turn after one warm-up turn.

    A turn repeats the call for at least `TURN_SECONDS`, so that a short one is not timed on the
    caches that a long one left behind.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for call, times in zip((ours, peer), seconds, strict=True):
            calls, elapsed, start = 0, 0.0, time.perf_counter()
            while elapsed < TURN_SECONDS:
                jax.block_until_ready(call())
                calls, elapsed = calls + 1, time.perf_counter() - start
            if turn:
                times.append(elapsed / calls)
    return tuple(statistics.median(times) for times in seconds)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
