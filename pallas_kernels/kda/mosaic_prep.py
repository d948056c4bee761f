"""The first of the two KDA kernels: everything of a chunk that does not need the state.

One warpgroup for each chunk of 64 tokens and head. With b the running sum of the log-decays of the
chunk, in powers of two and per key channel, and q and k normalised, q scaled as well:

    from_start_k = −k 2^b         from_start_q = q 2^b         to_end = k 2^(b_end − b)
    A[i, j] = Σ_c q_ic k_jc 2^(b_i − b_j)_c,  j ≤ i            decay = 2^b_end
    T = (I + L)⁻¹ diag(β),   L[i, j] = β_i Σ_c k_ic k_jc 2^(b_i − b_j)_c,  j < i

2^(b_i − b_j) is made of 2^(b_i − r) and 2^(r − b_j), r being b at the middle token of i's strip of
16. Within a strip both stay in float32's range, because a log-decay is held at `LEAST`; j in an
earlier strip starts from 2^(r_own − b_j), which 2^(r − r_own) ≤ 1 per channel moves on. That factor
alone can underflow where the product of the three does not, so it is applied in two halves.

L and A come transposed, 16 queries at a time, as the tensor cores want 64 rows: the keys. So does
T: the 16×16 blocks on the diagonal by substitution, row after row in float32, the rest by
substitution with those blocks. Repeated squaring would be shorter, and wrong for parallel keys and
β near 1.

Rounded to bfloat16: every factor of a product (q 2^(b − r), k 2^(b − r), k 2^(r − b), strips of L
and T and their products), and each output but `decay`.
"""

import functools
import math
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.base import CHUNK, KEYS, L2_EPS, STRIP
from pallas_kernels.mosaic_common import (
    COLUMNS,
    ROWS,
    WGMMA,
    accumulate,
    bf16,
    by_column,
    by_row,
    f32,
    kernel,
    mgpu,
    plgpu,
    struct,
    tiled,
    zeros,
)

STRIPS = CHUNK // STRIP
# A stronger log-decay counts as this one, an error of e⁻⁹ = 1.2e-4 of what was to vanish, where
# bfloat16 rounds at 2e-3: half a strip of decays e⁹ is 2^104.
LEAST = -9.0
LOG2_E = math.log2(math.e)

# Rows of the tables of factors that `_decays` leaves in shared memory, each [STRIPS, KEYS].
MOVE = 0  # MOVE + i: the square root of 2^(r_i − r_own), 1 for strip i itself, 0 for later ones
FROM_START = STRIPS  # 2^r_own
TO_END = STRIPS + 1  # 2^(b_end − r_own)

_PITCH = KEYS + 8  # of the float32 decays in shared memory: rows start in different banks
_CHANNELS = plgpu.Layout.WG_STRIDED((KEYS,), vec_size=1)  # one thread for each key channel
_HALVES = [pl.ds(64 * i, 64) for i in range(KEYS // 64)]  # of the channels: registers suffice
_BLOCKS = plgpu.Layout.TILED(  # [STRIPS, STRIP]: one warp for each row, one lane for each column
    plgpu.Tiling(((STRIPS, STRIP), (1,))),
    warp_dims=(-3,),
    lane_dims=(plgpu.Replicated(2), -2),
    vector_dim=-1,
)
_PER_WARP = plgpu.Layout.TILED(  # [STRIPS, N]: one warp for each row, columns as in WGMMA
    plgpu.Tiling(((STRIPS, 8), (2,))),
    warp_dims=(-3,),
    lane_dims=(plgpu.Replicated(8), -2),
    vector_dim=-1,
)


def prepare_chunks(
    q: Float[Array, "B T H 128"],
    k: Float[Array, "B T H 128"],
    g: Float[Array, "B T H 128"],
    beta: Float[Array, "B H T"],
    restarts: Int[Array, "B T/64 64"] | None,
    *,
    scale: float,
    use_qk_l2norm: bool,
    interpret: bool,
) -> tuple[
    Float[Array, "B H T 128"],
    Float[Array, "B H T 128"],
    Float[Array, "B H T 128"],
    Float[Array, "B H T 64"],
    Float[Array, "B H T 64"],
    Float[Array, "B H T/64 128"],
]:
    """from_start_k, from_start_q, to_end, Tᵀ, Aᵀ and decay of the module docstring.

    bfloat16 q and k, g in any float dtype, float32 beta; T a multiple of 64. `restarts` counts the
    tokens of a chunk, from its first to each, that start from a zero state.
    """
    B, T, H, K = q.shape
    tile, square, strip = (B, H, T, K), tiled((CHUNK, CHUNK), 32), tiled((CHUNK, STRIP), 32)
    blocks = plgpu.SMEM((CHUNK, STRIP), f32)
    segmented = restarts is not None
    body = functools.partial(
        _body, segmented=segmented, scale=scale, use_qk_l2norm=use_qk_l2norm, interpret=interpret
    )
    return kernel(
        body,
        "kda_prepare",
        interpret=interpret,
        out_type=(
            struct(*tile),
            struct(*tile),
            struct(*tile),
            struct(B, H, T, CHUNK),
            struct(B, H, T, CHUNK),
            struct(B, H, T // CHUNK, K, dtype=f32),
        ),
        grid=(T // CHUNK, H, B),
        grid_names=("chunk", "head", "batch"),
        scratch_types=[
            *[tiled((CHUNK, K))] * 4,
            plgpu.SMEM((STRIPS + 2, STRIPS, K), f32),
            # The decays are done with when the products begin.
            plgpu.RefUnion(
                [plgpu.SMEM((CHUNK, _PITCH), f32)],
                [square, square, square, strip, blocks, blocks],
            ),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(q, k, g, beta, *([restarts] if segmented else []))


def _body(q, k, g, beta, *refs, segmented, scale, use_qk_l2norm, interpret):
    restarts: Any = refs[0] if segmented else None
    *outputs, q_tile, k_tile, start_k, start_q, factors, union, loaded = refs[segmented:]
    start_k_out, start_q_out, end_out, inverse_out, A_out, decay_out = outputs
    (b_minus_r,), (L_tile, A_tile, inverse_tile, blocks_tile, L_blocks, inverse_blocks) = union
    chunk, head, batch = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
    first = chunk * CHUNK
    tokens = (batch, pl.ds(first, CHUNK), head)
    plgpu.copy_gmem_to_smem(q.at[tokens], q_tile, loaded)
    plgpu.copy_gmem_to_smem(k.at[tokens], k_tile, loaded)

    decay = _decays(lambda i: g.at[batch, first + i, head], b_minus_r, factors)
    if segmented:
        restarted = plgpu.load(restarts.at[batch, chunk], layout=ROWS, optimized=False)
        last = restarts[batch, chunk, CHUNK - 1]
        decay = jnp.where(last == 0, decay, 0.0)
        from_start = by_row(jnp.where(restarted == 0, 1.0, 0.0), (CHUNK, 64))
        to_end = by_row(jnp.where(restarted == last, 1.0, 0.0), (CHUNK, 64))
    decay_out[batch, head, chunk] = decay
    plgpu.commit_smem()
    plgpu.barrier_wait(loaded)

    # 2^(b − r) and its inverse times q and k. The tiles take them in place: a warp reads and
    # writes the same rows.
    q_norm = plgpu.layout_cast(jnp.full((CHUNK,), scale, f32), ROWS)
    k_norm = None
    if use_qk_l2norm:
        q_norm, k_norm = q_norm * _inverse_norm(q_tile), _inverse_norm(k_tile)
    keys = []  # k 2^(r_own − b)
    for half in _HALVES:
        exponent = plgpu.load(b_minus_r.at[:, half], layout=WGMMA, optimized=False)
        grown, shrunk = jnp.exp2(-exponent), jnp.exp2(exponent)
        to_start = strip_rows(factors.at[FROM_START, :, half], interpret)
        if segmented:
            to_start = to_start * from_start
        k_half = plgpu.load(k_tile.at[:, half], layout=WGMMA).astype(f32)
        if k_norm is not None:
            k_half = k_half * by_row(k_norm, (CHUNK, 64))
        keys.append(k_half * grown)
        k_half = k_half * shrunk
        k_tile[:, half] = k_half.astype(bf16)
        start_k[:, half] = (-k_half * to_start).astype(bf16)
        q_half = plgpu.load(q_tile.at[:, half], layout=WGMMA).astype(f32)
        q_half = q_half * by_row(q_norm, (CHUNK, 64)) * shrunk
        q_tile[:, half] = q_half.astype(bf16)
        start_q[:, half] = (q_half * to_start).astype(bf16)
    plgpu.commit_smem()
    rows = (batch, head, pl.ds(first, CHUNK))
    plgpu.copy_smem_to_gmem(start_k, start_k_out.at[rows])
    plgpu.copy_smem_to_gmem(start_q, start_q_out.at[rows])

    # Aᵀ and Lᵀ, a strip of 16 queries at a time.
    shape = (CHUNK, STRIP)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
    query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
    in_strip = [(key >= i * STRIP) & (key < (i + 1) * STRIP) for i in range(STRIPS)]
    diagonal = zeros(*shape)
    for i in range(STRIPS):
        strip = pl.ds(i * STRIP, STRIP)
        moved = []
        for x, half in zip(keys, _HALVES, strict=True):
            move = strip_rows(factors.at[MOVE + i, :, half], interpret)
            moved.append((x * move * move).astype(bf16))

        def products(q_k, k_k, strip=strip, moved=moved):
            for x, half in zip(moved, _HALVES, strict=True):
                q_k.add(x, q_tile.at[strip, half].transpose((1, 0)))
                k_k.add(x, k_tile.at[strip, half].transpose((1, 0)))

        q_k, k_k = accumulate(products, zeros(*shape), zeros(*shape), interpret=interpret)
        seen, before = key <= query + i * STRIP, key < query + i * STRIP
        if segmented:
            of_query = plgpu.load(restarts.at[batch, chunk, strip], layout=COLUMNS, optimized=False)
            same = by_row(restarted, shape) == by_column(of_query, shape)
            seen, before = seen & same, before & same
        beta_strip = beta.at[batch, head, pl.ds(first + i * STRIP, STRIP)]
        beta_query = plgpu.load(beta_strip, layout=COLUMNS, optimized=False)
        A_tile[:, strip] = jnp.where(seen, q_k, 0.0).astype(bf16)
        L = jnp.where(before, k_k * by_column(beta_query, shape), 0.0)
        L_tile[:, strip] = L.astype(bf16)
        diagonal = jnp.where(in_strip[i], L, diagonal)
    L_blocks[...] = diagonal
    plgpu.commit_smem()

    # The products are through with the queries' tile.
    for x, half in zip(keys, _HALVES, strict=True):
        end = x * strip_rows(factors.at[TO_END, :, half], interpret)
        q_tile[:, half] = (end * to_end if segmented else end).astype(bf16)

    _invert_blocks(L_blocks, inverse_blocks, interpret)
    plgpu.commit_smem()
    inverted = plgpu.load(inverse_blocks, layout=WGMMA, optimized=False)
    blocks_tile[...] = inverted.astype(bf16)
    plgpu.commit_smem()
    beta_key = plgpu.load(beta.at[rows], layout=ROWS, optimized=False)
    done: list[Any] = []  # strips of ((I + L)⁻¹)ᵀ
    for i in range(STRIPS):
        strip = pl.ds(i * STRIP, STRIP)
        inverse = jnp.where(in_strip[i], inverted, 0.0)
        if i:

            def against(total, strip=strip):
                for j, x in enumerate(done):
                    total.add(x, L_tile.at[pl.ds(j * STRIP, STRIP), strip])

            (total,) = accumulate(against, zeros(*shape), interpret=interpret)
            total = (-total).astype(bf16)

            def times_block(x, total=total, strip=strip):
                x.add(total, blocks_tile.at[strip])

            (inverse,) = accumulate(times_block, inverse, interpret=interpret)
        done.append(inverse.astype(bf16))
        inverse_tile[:, strip] = (inverse * by_row(beta_key, shape)).astype(bf16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_tile, end_out.at[rows])
    plgpu.copy_smem_to_gmem(inverse_tile, inverse_out.at[rows])
    plgpu.copy_smem_to_gmem(A_tile, A_out.at[rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _decays(row, b_minus_r, factors):
    """b − r of each token and the tables of factors into shared memory; returns 2^b_end."""
    b = plgpu.layout_cast(jnp.zeros((KEYS,), f32), _CHANNELS)
    r = []
    for i in range(STRIPS):
        start = i * STRIP
        sums = []
        gates = [plgpu.load(row(start + j), layout=_CHANNELS) for j in range(STRIP)]
        for gate in gates:
            b = b + jnp.maximum(gate.astype(f32), LEAST) * LOG2_E
            sums.append(b)
        r.append(sums[STRIP // 2])
        for j, x in enumerate(sums):
            b_minus_r.at[start + j, pl.ds(0, KEYS)][...] = x - r[i]
    zero, one = (plgpu.layout_cast(jnp.full((KEYS,), x, f32), _CHANNELS) for x in (0.0, 1.0))
    for own in range(STRIPS):
        for i in range(STRIPS):
            earlier, same = own < i, own == i
            move = jnp.exp2(0.5 * (r[i] - r[own])) if earlier else one if same else zero
            factors[MOVE + i, own] = move
        factors[FROM_START, own] = jnp.exp2(r[own])
        factors[TO_END, own] = jnp.exp2(b - r[own])
    return jnp.exp2(b)


def _inverse_norm(tile):
    """1 / √(Σ x² + ε) of each row."""
    squares = []
    for half in _HALVES:
        x = plgpu.load(tile.at[:, half], layout=WGMMA).astype(f32)
        squares.append(jnp.sum(x * x, axis=1))
    return lax.rsqrt(sum(squares) + L2_EPS)


def strip_rows(ref: Any, interpret: bool) -> Float[Array, "64 N"]:
    """One vector per strip [4, N], along the 16 rows of each: one warp's, so it is loaded once."""
    if interpret:
        return jnp.repeat(ref[...], STRIP, axis=0)
    shape = (CHUNK, ref.shape[1])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(shape, f32, layout=WGMMA),
    )
    def load(_, smem):
        vectors = mgpu.FragmentedArray.load_untiled(
            smem, layout=_PER_WARP.to_mgpu(), is_signed=None, optimized=False
        )
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for index in np.ndindex(registers.shape):
            registers[index] = vectors.registers.flat[index[1]]  # that of its eight columns
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return load(ref)


def _invert_blocks(L_blocks, inverse_blocks, interpret):
    """(I + L)⁻¹, transposed, of the four blocks on the diagonal of Lᵀ, by substitution.

    One warp for each block, one lane for each column, and one row after the other.
    """
    shape = (STRIPS, STRIP)
    blocks = (STRIPS, STRIP, STRIP)
    if interpret:
        L = L_blocks[...].reshape(blocks)
    else:
        L = L_blocks.reshape(*blocks)

    def entry(i, j):
        if interpret:
            return by_row(L[:, j, i], shape, _BLOCKS)
        x = plgpu.load(L.at[:, j, i], layout=_BLOCKS.reduce(1), optimized=False)
        return by_row(x, shape, _BLOCKS)

    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_BLOCKS)
    solved: list[Any] = []
    for i in range(STRIP):
        x = jnp.where(column == i, 1.0, 0.0)
        for j, earlier in enumerate(solved):
            x = x - entry(i, j) * earlier
        solved.append(x)
    if interpret:
        inverse_blocks[...] = jnp.stack(solved, axis=2).reshape(CHUNK, STRIP)
        return
    inverse = inverse_blocks.reshape(*blocks)
    for i, x in enumerate(solved):
        inverse[:, :, i] = x
