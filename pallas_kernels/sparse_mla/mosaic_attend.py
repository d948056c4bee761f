"""One kernel: a token's heads over a part of its selection, gathered 64 rows at a time.

A block for each token and part, of three warpgroups. The third gathers rows into one of two tiles
[64, 512] while the others work on the other. With q [64 heads, 512], tile after tile:

    s = scale · log2 e · q tileᵀ,  −∞ at holes         [64, 64]
    m' = max(m, max s);  p = 2^(s − m');  shrink = 2^(m − m')
    total ← shrink · total + Σ p;  o ← shrink · o + p tile;  m ← m'

The first computes all of it but for the right half of o, 256 columns, which the second does from
the p and shrink that the first leaves in shared memory. At the end o / total, and ln of the sum of
the part's exponentials. Without any row m stays at a finite −1e30 and total at zero: out is zero.

Rounded to bfloat16: p where it enters a product, and out where its dtype is that.
"""

import functools
import math

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_common import (
    COLUMNS,
    ROWS,
    accumulate,
    by_column,
    by_row,
    f32,
    kernel,
    plgpu,
    struct,
    tiled,
    zeros,
)
from pallas_kernels.sparse_mla.base import HEADS, TILE, WIDTH
from pallas_kernels.sparse_mla.mosaic_gather import gather, wait_for_rows

HALF = WIDTH // 2  # columns of an accumulator: with it, s and p fill a thread's registers
STAGES = 2  # tiles in shared memory at a time
LEAST = -1e30  # what a maximum starts from; finite, so that an empty tile leaves no NaN


def attend(
    q: Float[Array, "N 64 512"],
    kv: Float[Array, "G S 512"],
    indices: Int[Array, "N parts tiles 64"],
    *,
    scale: float,
    dtype: jnp.dtype,
    interpret: bool,
) -> tuple[Float[Array, "N parts 64 512"], Float[Array, "N parts 64"]]:
    """Each part's softmax over its own rows, and its natural log-sum-exp in float32.

    Consecutive N/G tokens select from the same kv.
    """
    N, parts, tiles, _ = indices.shape
    body = functools.partial(
        _body,
        tokens=N // kv.shape[0],
        tiles=tiles,
        scale=scale * math.log2(math.e),
        interpret=interpret,
    )
    return kernel(
        body,
        "sparse_mla",
        interpret=interpret,
        out_type=(
            struct(N, parts, HEADS, WIDTH, dtype=dtype),
            struct(N, parts, HEADS, dtype=f32),
        ),
        grid=(parts, N),
        grid_names=("part", "token"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=[
            tiled((WIDTH // HALF, HEADS, HALF)),
            tiled((STAGES, TILE, WIDTH)),
            tiled((STAGES, HEADS, TILE)),
            plgpu.SMEM((STAGES, HEADS), f32),
            plgpu.SMEM((HEADS,), f32),
            plgpu.SMEM((tiles, TILE), jnp.int32),
            plgpu.Barrier(num_arrivals=WIDTH // HALF),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=3),
        ],
    )(q, kv, indices)


def _body(q, kv, indices, out, lse, *scratch, tokens, tiles, scale, interpret):
    q_tile, kv_tiles, p_tiles, shrinks, inverse, index_tile, *barriers = scratch
    q_loaded, indices_loaded, full, weighed, empty, summed, finished = barriers
    part, token = lax.axis_index("part"), lax.axis_index("token")
    left, right = pl.ds(0, HALF), pl.ds(HALF, HALF)
    rows = kv.shape[1]

    def add_rows(o, shrink, slot, columns):
        """shrink · o + p tile, in some columns."""

        def products(o):
            o.add(p_tiles.at[slot], kv_tiles.at[slot, :, columns])

        (o,) = accumulate(products, o * by_row(shrink, (HEADS, HALF)), interpret=interpret)
        plgpu.barrier_arrive(empty.at[slot])
        return o

    def finish():
        # No warpgroup leaves while another may still arrive at its barriers.
        plgpu.barrier_arrive(finished)
        plgpu.barrier_wait(finished)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def weigh():
        plgpu.set_max_registers(248, action="increase")
        plgpu.barrier_wait(indices_loaded)
        plgpu.barrier_wait(q_loaded)

        def step(t, carry):
            m, total, o = carry
            slot = lax.rem(t, jnp.int32(STAGES))
            plgpu.barrier_wait(full.at[slot])
            plgpu.commit_smem()

            def products(s):
                for i, columns in enumerate((left, right)):
                    s.add(q_tile.at[i], kv_tiles.at[slot, :, columns].transpose((1, 0)))

            (s,) = accumulate(products, zeros(HEADS, TILE), interpret=interpret)
            index = plgpu.load(index_tile.at[t], layout=COLUMNS, optimized=False)
            hole = jnp.where((index >= 0) & (index < rows), 0.0, -jnp.inf)
            s = s * scale + by_column(hole, (HEADS, TILE))
            top = jnp.maximum(m, jnp.max(s, axis=1))
            shrink = jnp.exp2(m - top)
            p = jnp.exp2(s - by_row(top, (HEADS, TILE)))
            total = total * shrink + jnp.sum(p, axis=1)
            # Both warpgroups are through with the slot's last p: else it could not be full again.
            shrinks[slot] = shrink
            p_tiles[slot] = p.astype(p_tiles.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighed.at[slot])
            return top, total, add_rows(o, shrink, slot, left)

        empty_rows = [plgpu.layout_cast(jnp.full((HEADS,), x, f32), ROWS) for x in (LEAST, 0.0)]
        m, total, o = lax.fori_loop(
            jnp.int32(0), jnp.int32(tiles), step, (*empty_rows, zeros(HEADS, HALF))
        )
        factor = jnp.where(total > 0, 1 / total, 0.0)
        inverse[...] = factor
        plgpu.barrier_arrive(summed)
        lse[token, part] = m * math.log(2) + jnp.log(total)
        out[token, part, :, left] = (o * by_row(factor, o.shape)).astype(out.dtype)
        finish()

    @pl.when(lax.axis_index("warpgroup") == 1)
    def add_right_half():
        plgpu.set_max_registers(232, action="increase")

        def step(t, o):
            slot = lax.rem(t, jnp.int32(STAGES))
            plgpu.barrier_wait(weighed.at[slot])
            plgpu.commit_smem()
            shrink = plgpu.load(shrinks.at[slot], layout=ROWS, optimized=False)
            return add_rows(o, shrink, slot, right)

        o = lax.fori_loop(jnp.int32(0), jnp.int32(tiles), step, zeros(HEADS, HALF))
        plgpu.barrier_wait(summed)
        factor = plgpu.load(inverse, layout=ROWS, optimized=False)
        out[token, part, :, right] = (o * by_row(factor, o.shape)).astype(out.dtype)
        finish()

    @pl.when(lax.axis_index("warpgroup") == 2)
    def load_ahead():
        plgpu.set_max_registers(24, action="decrease")
        plgpu.copy_gmem_to_smem(indices.at[token, part], index_tile, indices_loaded)
        for i, columns in enumerate((left, right)):
            plgpu.copy_gmem_to_smem(q.at[token, :, columns], q_tile.at[i], q_loaded)
        plgpu.barrier_wait(indices_loaded)
        rows_of_token = kv.at[lax.div(token, jnp.int32(tokens))]

        def publish(t, pending):
            wait_for_rows(pending, interpret=interpret)
            plgpu.barrier_arrive(full.at[lax.rem(t, jnp.int32(STAGES))])

        def is_free(slot, used):
            if not interpret:
                return plgpu.barrier_test(empty.at[slot])
            # No interpreter tests a barrier. One slot is always found free, if need be by waiting
            # until it is, and the other one never.
            found = slot == 1

            @pl.when(used & found)
            def wait():
                plgpu.barrier_wait(empty.at[slot])

            return found

        def load(t, _):
            slot = lax.rem(t, jnp.int32(STAGES))
            # A slot that is free is filled before the tile before it has arrived, so that memory is
            # never idle; while it is not, nothing keeps that tile from being published.
            used = t >= STAGES
            late = used & jnp.logical_not(is_free(slot, used))

            @pl.when(late)
            def wait():
                publish(t - 1, 0)
                plgpu.barrier_wait(empty.at[slot])

            gather(rows_of_token, index_tile.at[t], kv_tiles.at[slot], interpret=interpret)

            @pl.when((t > 0) & jnp.logical_not(late))
            def publish_one_before():
                publish(t - 1, 1)

        lax.fori_loop(jnp.int32(0), jnp.int32(tiles), load, None)
        publish(jnp.int32(tiles - 1), 0)
        for t in range(max(0, tiles - STAGES), tiles):
            plgpu.barrier_wait(empty.at[t % STAGES])
        finish()
