"""Rows of a cache in memory, gathered by index into a tile that the tensor cores read.

Hopper's copy engine has no gather, so each thread of a warpgroup copies 16 bytes at a time past the
registers (`cp.async`), to where the copy engine would have put them: in tiles of 8 rows and 64
columns, the 16-byte pieces of a row of a tile exchanged by the row's number (the 128-byte swizzle).
A hole is a copy of no bytes: the hardware writes zeros and reads nothing.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic_common import bf16, mgpu, plgpu
from pallas_kernels.sparse_mla.base import TILE, WIDTH

THREADS = 128
PIECE = 16  # bytes
PASSES = 4  # 16 rows at a time, eight threads for each
BANDS = 8  # 64 columns at a time

ROW_BYTES = 2 * WIDTH
BAND_BYTES = ROW_BYTES // BANDS
GROUP = 8  # rows whose bands lie together
GROUP_BYTES = GROUP * ROW_BYTES
_TRANSFORMS = (plgpu.TilingTransform((GROUP, BAND_BYTES // 2)), plgpu.SwizzleTransform(BAND_BYTES))


def first_piece(thread: Any) -> tuple[Any, Any, Any]:
    """The row, the byte in the row and the byte in the tile of a thread's first piece."""
    row, piece = thread >> 3, thread & 7
    in_group, swizzled = row & 7, (piece ^ row) & 7
    return (
        row,
        piece * PIECE,
        (row >> 3) * GROUP_BYTES + in_group * BAND_BYTES + swizzled * PIECE,
    )


def further_piece(number: int, band: int) -> tuple[int, int, int]:
    """What to add to the three for the piece of pass `number` and of columns 64 · `band` on."""
    rows = number * (TILE // PASSES)
    return rows, band * BAND_BYTES, rows * ROW_BYTES + band * GROUP * BAND_BYTES


def gather(kv: Any, indices: Any, tile: Any, *, interpret: bool) -> None:
    """Starts copying rows `indices` [64] of `kv` [S, 512] into `tile`; zeros where there is none.

    `indices` and `tile` are in shared memory. `wait_for_rows` waits.
    """
    S = kv.shape[0]
    if interpret:
        rows = indices[...]
        there = ((rows >= 0) & (rows < S))[:, None]
        tile[...] = jnp.where(there, kv[...][jnp.clip(rows, 0, S - 1)], jnp.zeros((), bf16))
        return

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(_TRANSFORMS)),
    )
    def copy(_, kv, indices, tile):
        utils, ir = mgpu.utils, mgpu.utils.ir
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))

        def number(x):
            x = utils.c(x, i32) if isinstance(x, int) else x
            return mgpu.FragmentedArray.splat(x, (), is_signed=False)

        def value(x):
            return x.registers.item()

        def plus(pointer, offset):
            return utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))

        row, byte, place = first_piece(number(utils.thread_idx()) & (THREADS - 1))
        source, target = plus(utils.memref_ptr(kv), value(byte)), utils.memref_ptr(tile)
        target = plus(target, value(place))
        for i in range(PASSES):
            rows, _, _ = further_piece(i, 0)
            at = utils.arith.index_castui(ir.IndexType.get(), value(row + rows))
            index = number(utils.memref.load(indices, [at]))
            there = index < S  # as an unsigned number, so that no negative one is
            index, size = there.select(index, number(0)), there.select(number(PIECE), number(0))
            offset = utils.arith.extui(i64, value(index))
            start = plus(source, utils.arith.muli(offset, utils.c(ROW_BYTES, i64)))
            for band in range(BANDS):
                _, from_byte, to_byte = further_piece(i, band)
                utils.inline_ptx(
                    "cp.async.cg.shared.global.L2::128B "
                    f"[$0 + {to_byte}], [$1 + {from_byte}], {PIECE}, $2;",
                    target,
                    start,
                    value(size),
                    has_side_effects=True,
                )
        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    copy(kv, indices, tile)


def wait_for_rows(pending: int, *, interpret: bool) -> None:
    """Until all tiles but the last `pending` have arrived.

    The tensor cores see them after a `commit_smem` by who reads them, not by who copied: there it
    could wait for the copies that are still on their way.
    """
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        mgpu.utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True)

    wait()
