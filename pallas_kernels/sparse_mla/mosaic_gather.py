"""Rows of a cache in memory, gathered by index into a tile that the tensor cores read.

Hopper's copy engine has no gather, so each thread of a warpgroup copies 16 bytes at a time past the
registers (`cp.async`), to where the copy engine would have put them: in tiles of 8 rows and 64
columns, the 16-byte pieces of a row of a tile exchanged by the row's number (the 128-byte swizzle).
A hole is a copy of no bytes: the hardware writes zeros and reads nothing.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_common import bf16, mgpu, plgpu

ROWS = 64  # of a tile; the rows of one wgmma
COLUMNS = 512
THREADS = 128

PIECE = 16  # bytes
PASSES = 4  # 16 rows at a time, eight threads for each
BANDS = 8  # 64 columns at a time

_ROWS_OF_PASS = ROWS // PASSES
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def first_piece(thread: Any) -> tuple[Any, Any, Any]:
    """The row, the byte in the row and the byte in the tile of a thread's first piece."""
    row, piece = thread >> 3, thread & 7
    swizzled = piece ^ (row & 7)
    return row, piece * PIECE, (row >> 3) * 8192 + (row & 7) * 128 + swizzled * PIECE


def next_pieces(number: int, band: int) -> tuple[int, int, int]:
    """What a thread adds to the three in pass `number` and in columns 64 · `band` and on."""
    return number * _ROWS_OF_PASS, band * 128, number * 16384 + band * 1024


def gather(kv: Any, indices: Any, tile: Any, *, interpret: bool) -> None:
    """Starts copying rows `indices` [64] of `kv` [S, 512] into `tile`; zeros where there is none.

    `indices` and `tile` are in shared memory. `arrived` waits.
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
        i32, i64, index_type = (
            ir.IntegerType.get_signless(32),
            ir.IntegerType.get_signless(64),
            ir.IndexType.get(),
        )

        def number(x):
            return mgpu.FragmentedArray.splat(x, (), is_signed=False)

        thread = number(utils.thread_idx()) & (THREADS - 1)
        row, byte, place = (x.registers.item() for x in first_piece(thread))
        source = utils.getelementptr(utils.memref_ptr(kv), [byte], utils.ir.IntegerType.get_signless(8))
        target = utils.getelementptr(utils.memref_ptr(tile), [place], utils.ir.IntegerType.get_signless(8))
        row = utils.arith.index_castui(index_type, row)
        for i in range(PASSES):
            add, _, _ = next_pieces(i, 0)
            at = utils.arith.addi(row, utils.c(add, index_type))
            index = number(utils.memref.load(indices, [at]))
            there = index < S  # unsigned, so that no negative one is
            count = there.select(number(utils.c(PIECE, i32)), number(utils.c(0, i32)))
            safe = there.select(index, number(utils.c(0, i32)))
            offset = utils.arith.muli(
                utils.arith.extui(i64, safe.registers.item()), utils.c(2 * COLUMNS, i64)
            )
            start = utils.getelementptr(source, [offset], utils.ir.IntegerType.get_signless(8))
            for band in range(BANDS):
                _, from_byte, to_byte = next_pieces(i, band)
                utils.inline_ptx(
                    "cp.async.cg.shared.global.L2::128B "
                    f"[$0 + {to_byte}], [$1 + {from_byte}], {PIECE}, $2;",
                    target,
                    start,
                    count.registers.item(),
                    has_side_effects=True,
                )
        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    copy(kv, indices, tile)


def arrived(pending: int, *, interpret: bool) -> None:
    """Waits for all tiles but the last `pending`, and shows them to the tensor cores."""
    if not interpret:

        @plgpu.inline_mgpu()
        def wait(_):
            mgpu.utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True)

        wait()
    plgpu.commit_smem()
