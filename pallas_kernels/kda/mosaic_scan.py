"""The second of the two KDA kernels: the state through the chunks of a sequence.

One block for each head and 64 value channels: a warpgroup that computes and one that loads ahead.
With the outputs of mosaic_prep.py, and u [64, V] what the tokens of a chunk write:

    u = T (v + from_start_k S)
    o = from_start_q S + A u
    S ← decay · S + to_endᵀ u

All of it transposed, with the value channels as the 64 rows that the tensor cores want: Sᵀ stays
in float32 registers from the first chunk to the last, and neither its bfloat16 copy nor those of
the two intermediates leave registers, being left sides of products.

Rounded to bfloat16: S, v + from_start_k S and u where they enter a product, and o.
"""

import functools

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.kda.base import CHUNK, KEYS
from pallas_kernels.mosaic_common import (
    COLUMNS,
    WGMMA,
    accumulate,
    bf16,
    by_column,
    f32,
    kernel,
    plgpu,
    struct,
    tiled,
    zeros,
)

VALUES = 64  # value channels of a block
STAGES = 2  # chunks in shared memory at a time
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


def scan_chunks(
    v: Float[Array, "B T H V"],
    from_start_k: Float[Array, "B H T 128"],
    from_start_q: Float[Array, "B H T 128"],
    to_end: Float[Array, "B H T 128"],
    inverse: Float[Array, "B H T 64"],
    A: Float[Array, "B H T 64"],
    decay: Float[Array, "B H T/64 128"],
    state: Float[Array, "B H 128 V"],
    *,
    interpret: bool,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H 128 V"]]:
    """o and the final state, from bfloat16 v and what `prepare_chunks` returns; V in 64s."""
    B, T, H, V = v.shape
    wide, square, narrow = (tiled((STAGES, CHUNK, columns)) for columns in (KEYS, CHUNK, VALUES))
    tiles = [wide, wide, wide, square, square, plgpu.SMEM((STAGES, KEYS), f32), narrow]
    return kernel(
        functools.partial(_body, chunks=T // CHUNK, interpret=interpret),
        "kda_scan",
        interpret=interpret,
        out_type=(struct(B, T, H, V), struct(B, H, KEYS, V, dtype=f32)),
        grid=(V // VALUES, H, B),
        grid_names=("values", "head", "batch"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            *tiles,
            tiled((CHUNK, VALUES)),
            plgpu.Barrier(num_arrivals=len(tiles), num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(from_start_k, from_start_q, to_end, inverse, A, decay, v, state)


def _body(*refs, chunks, interpret):
    *inputs, state = refs[:8]
    o, final_state = refs[8:10]
    *tiles, o_tile, full, empty, finished = refs[10:]
    values, head, batch = (lax.axis_index(name) for name in ("values", "head", "batch"))
    columns = pl.ds(values * VALUES, VALUES)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def compute():
        plgpu.set_max_registers(232, action="increase")
        state_tile = (batch, head, pl.ds(0, KEYS), columns)
        if interpret:
            S = state[state_tile].T
        else:
            S = plgpu.load(
                state.at[state_tile].transpose((1, 0)), layout=_TRANSPOSED, optimized=False
            )
            S = plgpu.layout_cast(S, WGMMA)

        def chunk(c, S):
            slot = lax.rem(c, jnp.int32(STAGES))
            plgpu.barrier_wait(full.at[slot])
            o_transposed, S = _chunk(S, [tile.at[slot] for tile in tiles], interpret)
            # The last chunk's output has left its tile, and all threads are through with the slot.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()
            plgpu.barrier_arrive(empty.at[slot])
            o_tile.transpose((1, 0))[...] = o_transposed
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_tile, o.at[batch, pl.ds(c * CHUNK, CHUNK), head, columns])
            return S

        S = lax.fori_loop(jnp.int32(0), jnp.int32(chunks), chunk, S)
        if interpret:
            final_state[state_tile] = S.T
        else:
            S = plgpu.layout_cast(S, _TRANSPOSED)
            final_state.at[state_tile].transpose((1, 0))[...] = S
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(finished)
        plgpu.barrier_wait(finished)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def load_ahead():
        plgpu.set_max_registers(40, action="decrease")

        def load(c, _):
            slot = lax.rem(c, jnp.int32(STAGES))

            @pl.when(c >= STAGES)
            def wait():
                plgpu.barrier_wait(empty.at[slot])

            rows = pl.ds(c * CHUNK, CHUNK)
            places = [(batch, head, rows)] * 5 + [(batch, head, c), (batch, rows, head, columns)]
            for source, place, tile in zip(inputs, places, tiles, strict=True):
                plgpu.copy_gmem_to_smem(source.at[place], tile.at[slot], full.at[slot])

        lax.fori_loop(jnp.int32(0), jnp.int32(chunks), load, None)
        for c in range(max(0, chunks - STAGES), chunks):
            plgpu.barrier_wait(empty.at[c % STAGES])
        plgpu.barrier_arrive(finished)
        plgpu.barrier_wait(finished)


def _chunk(S, tiles, interpret):
    """oᵀ in bfloat16 and the new Sᵀ, by the three lines of the module docstring."""
    from_start_k, from_start_q, to_end, inverse, A, decay, v = tiles
    S_rounded = S.astype(bf16)
    v_transposed = plgpu.load(v.transpose((1, 0)), layout=WGMMA, optimized=False).astype(f32)
    factor = plgpu.load(decay, layout=COLUMNS, optimized=False)
    S = S * by_column(factor, (VALUES, KEYS))

    def products(y, o, u, S):
        y.add(S_rounded, from_start_k.transpose((1, 0)))
        o.add(S_rounded, from_start_q.transpose((1, 0)))  # runs while y is rounded
        u.add(y.load(1).astype(bf16), inverse)
        u = u.load(0).astype(bf16)
        o.add(u, A)
        S.add(u, to_end)

    empty = zeros(VALUES, CHUNK)
    _, o, _, S = accumulate(products, v_transposed, empty, empty, S, interpret=interpret)
    return o.astype(bf16), S
