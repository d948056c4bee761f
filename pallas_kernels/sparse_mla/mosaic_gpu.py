"""Sparse MLA as a Mosaic GPU kernel for Hopper (sm_90a): bfloat16 products, float32 softmax.

`mosaic_attend.py` is the kernel, and says what it rounds; `mosaic_gather.py` is how its rows come.
Where the tokens are fewer than the card's multiprocessors, each selection is split into parts, and
what the parts found is merged here, in float32. The gradient is that of `xla.py`.

The kernel reads selections in tiles of 64 indices. One of another width is filled up with −1 first,
which an indexer saves by handing over a multiple of 64: −1 may stand anywhere.

Expected time on an H200 at B 128, T 1, A 64, W 2048, R 512: computed, not yet measured on hardware.

    memory    rows 268 MB, queries and output 8 MB each, at 4.8 TB/s      60 µs: 1.8 µs a tile
    products  34 GFLOP, at the 790 TFLOP/s of large products              44 µs
    a tile    scores: 32 wgmma m64n64k16, held back by shared memory (128 bytes a cycle) as much
              as by the tensor cores                                      1000 to 1300 cycles
              softmax, p into shared memory, two barriers                 600
              output: 4 wgmma m64n256k16 of each of two warpgroups        1000
              2600 to 2900 cycles, at 1.75 GHz                            1.5 to 1.7 µs

One tile is worked on while the next one comes, so the slower of the two sets the pace, the memory:
32 tiles of 1.8 µs, 5 to 10 µs for the queries, the first tile and the output: 65 to 75 µs. The goal
is under 80. 128 blocks leave 4 of the 132 multiprocessors idle. One token takes the whole card: 33
parts of one tile, 10 to 12 µs with the merge and both launches.

Source: FlashAttention-2 (arXiv:2307.08691), the softmax of tiles and of parts; FlashMLA, the two
halves of the output.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.sparse_mla import xla
from pallas_kernels.sparse_mla.base import HEADS, TILE, WIDTH

MULTIPROCESSORS = 132  # of an H100 or H200; the kernel takes one each
MOST_TILES = 48  # of a part: its indices are in shared memory


def supports(q: Array, kv: Array, indices: Array) -> str | None:
    """Why the kernel cannot take inputs of these shapes and dtypes here; None where it can."""
    if reason := hopper.reason_against_jax():
        return reason
    if wrong := [f"{n} is {x.dtype}" for n, x in (("q", q), ("kv", kv)) if x.dtype != jnp.bfloat16]:
        return "needs bfloat16 q and kv; " + ", ".join(wrong)
    A, R = q.shape[2:]
    if R != WIDTH:
        return f"needs latents of {WIDTH} numbers, got {R}"
    if A > HEADS:
        return f"needs at most {HEADS} heads, got {A}"
    if 0 in q.shape:
        return f"needs at least one token, got q {q.shape}"
    return hopper.reason_against_device()


def attend(
    q: Float[Array, "B T A 512"],
    kv: Float[Array, "B S 512"] | Float[Array, "S 512"],
    indices: Int[Array, "B T W"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T A 512"], Float[Array, "B T A"]]:
    """bfloat16 q and kv; out in bfloat16, the natural log-sum-exp in float32."""
    return _differentiable((float(scale), hopper.interpret()), q, kv, indices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(static: tuple, q: Array, kv: Array, indices: Array) -> tuple[Array, Array]:
    # Only here: importing Pallas takes seconds, which users of other implementations need not pay.
    from pallas_kernels.sparse_mla import mosaic_attend

    scale, interpret = static
    (B, T, A, _), W = q.shape, indices.shape[2]
    parts, tiles = split(B * T, -(-W // TILE))
    padding = parts * tiles * TILE - W
    indices = jnp.pad(indices, ((0, 0), (0, 0), (0, padding)), constant_values=-1)
    out, lse = mosaic_attend.attend(
        jnp.pad(q, ((0, 0), (0, 0), (0, HEADS - A), (0, 0))).reshape(B * T, HEADS, WIDTH),
        kv if kv.ndim == 3 else kv[None],
        indices.reshape(B * T, parts, tiles, TILE),
        scale=scale,
        dtype=q.dtype if parts == 1 else jnp.float32,
        interpret=interpret,
    )
    out, lse = (x[:, :A].reshape(B, T, A, *x.shape[2:]) for x in merge(out, lse))
    return out.astype(q.dtype), lse


def split(tokens: int, tiles: int) -> tuple[int, int]:
    """Into how many parts each selection is cut, and the tiles of one: what takes the least time.

    In units of a tile, for a wave of blocks: the tiles of each, and 3 for its queries, its output
    and the time until its first rows arrive. The output of a part is twice as wide as a whole
    one's, and is read again.
    """

    def time(parts: int) -> int:
        waves = -(-tokens * parts // MULTIPROCESSORS)
        return waves * (-(-tiles // parts) + (6 if parts > 1 else 3))

    parts = min(range(-(-tiles // MOST_TILES), tiles + 1), key=time)
    each = -(-tiles // parts)
    return -(-tiles // each), each


def merge(
    out: Float[Array, "N P A R"], lse: Float[Array, "N P A"]
) -> tuple[Float[Array, "N A R"], Float[Array, "N A"]]:
    """Softmax over all parts from that over each of them; a part without rows has lse −inf."""
    if out.shape[1] == 1:
        return out[:, 0], lse[:, 0]
    top = jnp.max(lse, axis=1)
    weights = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0)[:, None])
    total = jnp.sum(weights, axis=1)
    weights = weights / jnp.where(total == 0, 1, total)[:, None]
    return jnp.sum(weights[..., None] * out, axis=1), top + jnp.log(jnp.where(total == 0, 1, total))


def _forward(static: tuple, *inputs: Array) -> tuple:
    return _differentiable(static, *inputs), inputs


def _gradient(static: tuple, inputs: tuple, cotangents: tuple[Array, Array]) -> tuple:
    scale, _ = static
    q, kv, indices = inputs
    (out, lse), pull_back = jax.vjp(lambda q, kv: xla.attend(q, kv, indices, scale=scale), q, kv)
    given = (x.astype(y.dtype) for x, y in zip(cotangents, (out, lse), strict=True))
    return *pull_back(tuple(given)), np.zeros(indices.shape, jax.dtypes.float0)


_differentiable.defvjp(_forward, _gradient)
