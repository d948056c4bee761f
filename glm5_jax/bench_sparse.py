"""Sparse attention timed: the operation, the indexer's choice, and a long prefill of one layer."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.bench import Timing, alternate
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.config import load_config
from glm5_jax.memory import peak_memory
from glm5_jax.nn.dsa import DSA, masked_softmax
from glm5_jax.nn.indexer import best_pools, index_scores, select_pools, visible_pools
from glm5_jax.nn.params import Params, fill
from glm5_jax.skeleton import Skeleton
from glm5_jax.specs import layer_leaves
from pallas_kernels.sparse_mla import sparse_mla_decode

HEADS = 8  # of the 64, for the prefill alone
MOST_MEMORY = 6e9


def time_sparse_mla(repeats: int, rows: int = 32768, selected: int = 2048) -> list[Timing]:
    """A decoded token of 64 heads, float32: the XLA form against all scores, masked."""
    rng = np.random.default_rng(0)
    q = jax.device_put(rng.standard_normal((1, 1, 64, 512), np.float32))
    kv = jax.device_put(rng.standard_normal((1, rows, 512), np.float32))
    indices = rng.choice(rows, selected, replace=False).astype(np.int32)
    mask = jnp.zeros(rows, bool).at[indices].set(True)
    scale = 256**-0.5
    gathering = jax.jit(partial(sparse_mla_decode, scale=scale, implementation="xla"))

    @jax.jit
    def masked(q, kv, mask):
        weights = masked_softmax(scale * q[0, 0] @ kv[0].T, mask)
        return (weights @ kv[0])[None, None]

    calls = (
        partial(gathering, q, kv, jnp.asarray(indices)[None, None]),
        partial(masked, q, kv, mask),
    )
    ours, peer = (np.asarray(call()) for call in calls)
    if not np.allclose(ours, peer, atol=1e-5):
        raise RuntimeError("the two sides attend to different rows")
    what = f"sparse MLA, {selected} of {rows} rows of 512, 64 heads, float32"
    mine, theirs = alternate(*calls, repeats)
    return [Timing(what, mine, theirs, "all scores, masked", 8)]


def time_indexer(repeats: int) -> list[Timing]:
    """512 pools for each query, of the pools of a long context: against all scores at once.

    Windows of pools are there for the memory, and should cost no time.
    """
    return [_time_choice(repeats, queries, pools) for queries, pools in ((1, 2**18), (128, 2**13))]


def _time_choice(repeats: int, queries: int, pools: int) -> Timing:
    rng = np.random.default_rng(0)
    shapes = (1, queries, 32, 128), (1, pools, 128), (1, queries, 32)
    operands = [jax.device_put(rng.standard_normal(shape, np.float32)) for shape in shapes]
    seen = jnp.full((1, queries), 4 * pools)

    @jax.jit
    def at_once(queries, keys, weights, seen):
        visible = visible_pools(seen, pools, 4)
        return select_pools(index_scores(queries, keys, weights), visible, 512)

    ours = partial(jax.jit(best_pools, static_argnums=(4, 5)), *operands, seen, 4, 512)
    what = f"indexer, the best of {pools:,} pools, queries: {queries}, float32"
    mine, theirs = alternate(ours, partial(at_once, *operands, seen), repeats)
    return Timing(what, mine, theirs, "all scores at once", 1)


@dataclass(frozen=True)
class Prefill(Timing):
    """A timing whose own side may take so much memory and no more."""

    peak: int = 0

    @property
    def reached(self) -> bool:
        """Whether the ratio and the memory are as they should be."""
        return super().reached and self.peak <= MOST_MEMORY

    def __str__(self) -> str:
        return f"{super().__str__()}; {self.peak / 1e9:.2f} GB of {MOST_MEMORY / 1e9:g} at the peak"


def time_prefill(tokens: int = 32768, heads: int = HEADS) -> list[Timing]:
    """One DSA layer of the release's widths, float32, but for fewer attention heads.

    Twice the tokens should take twice the time. Each run has a process, and a peak, of its own.
    """
    half, whole = (_in_a_process(count, heads) for count in (tokens // 2, tokens))
    what = f"DSA prefill, {tokens:,} tokens, {heads} heads, float32"
    peer = f"twice the time of {tokens // 2:,}"
    return [Prefill(what, whole["seconds"], 2 * half["seconds"], peer, 0.8, whole["peak"])]


def _in_a_process(tokens: int, heads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "glm5_jax.bench_sparse", str(tokens), str(heads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _prefill(tokens: int, heads: int) -> dict[str, Any]:
    """Seconds of one call, compiled before, and the most memory that the process has had."""
    config = load_config(packaged_config("glm5_3_flash"))
    config = replace(config, num_attention_heads=heads)
    layer = next(x for x in Skeleton.from_config(config).layers if x.indexer == "full")
    leaves = layer_leaves(layer, config)
    at = f"layers.{layer.index}.attn"
    attn = DSA(config, Params(leaves).at(at), owns_indexer=True)
    rng = np.random.default_rng(0)
    fill(
        attn,
        {
            path: rng.standard_normal(leaf.shape, np.float32) * leaf.shape[-1] ** -0.5
            for path, leaf in leaves.items()
            if path.startswith(f"{at}.")
        },
        f"{at}.",
    )
    x = jax.device_put(rng.standard_normal((1, tokens, config.hidden_size), np.float32))
    inputs = attn, x, jnp.ones((1, tokens), bool)
    run: Callable[..., Any] = jax.jit(DSA.__call__).lower(*inputs).compile()
    start = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    return {"seconds": time.perf_counter() - start, "peak": peak_memory()}


if __name__ == "__main__":
    print(json.dumps(_prefill(*map(int, sys.argv[1:]))))
