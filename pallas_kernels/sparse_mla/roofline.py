"""Bytes and arithmetic of the sparse MLA kernel, and of any other.

Counted from the shapes, every selected row read once for each token that selects it: what tokens of
one sequence share may come from the L2 cache.
"""

from pallas_kernels.roofline import Stage
from pallas_kernels.sparse_mla.base import HEADS, TILE, WIDTH
from pallas_kernels.sparse_mla.mosaic_gpu import split


def stages(B: int, T: int, W: int) -> list[Stage]:
    """`sparse_mla` and, where selections are split, what merges the parts; bfloat16, R 512."""
    tokens = B * T
    parts, tiles = split(tokens, -(-W // TILE))
    heads = tokens * HEADS
    indices = 4 * tokens * parts * tiles * TILE
    queries, rows = 2 * heads * WIDTH, 2 * tokens * W * WIDTH
    out, merged = (heads * (size * WIDTH + 4) for size in (4, 2))
    found = merged if parts == 1 else parts * out
    attend = Stage(
        "sparse_mla",
        queries + rows + indices + found,
        4 * heads * parts * tiles * TILE * WIDTH,
    )
    return [attend] if parts == 1 else [attend, Stage("merge", found + merged, 0)]


def floor(B: int, T: int, A: int, W: int, R: int) -> Stage:
    """Any implementation: each input read once, each output written once, in bfloat16."""
    tokens = B * T
    moved = 2 * tokens * (2 * A + W) * R + 4 * tokens * W
    return Stage("any kernel", moved, 4 * tokens * A * W * R)
