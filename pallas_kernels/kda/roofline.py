"""Bytes and arithmetic of the KDA kernels.

Counted from the shapes: what each kernel reads from and writes to memory if every block of it comes
from there once, and what its tensor cores do, masked halves included.
"""

from pallas_kernels.kda.base import CHUNK, KEYS, STRIP
from pallas_kernels.roofline import Stage

VALUES = 64  # of mosaic_scan.py, which is not imported for it: Pallas takes seconds


def stages(B: int, T: int, H: int, V: int) -> list[Stage]:
    """`kda_prepare` and `kda_scan`: bfloat16 q, k and v, float32 g and beta, 128 key channels."""
    chunks = -(-T // CHUNK) * B * H
    tokens = chunks * CHUNK
    prepared = tokens * 2 * (3 * KEYS + 2 * CHUNK) + chunks * 4 * KEYS
    state = 4 * B * H * KEYS * V
    strips = CHUNK // STRIP
    pairs = strips * (strips - 1) // 2
    products_of_strips = 2 * strips * 2 * CHUNK * STRIP * KEYS
    substitution = (pairs + strips - 1) * 2 * CHUNK * STRIP * STRIP
    with_state = 3 * 2 * CHUNK * KEYS * V
    within = 2 * 2 * CHUNK * CHUNK * V
    return [
        Stage(
            "kda_prepare",
            tokens * (2 * 2 * KEYS + 4 * KEYS + 4) + prepared,
            chunks * (products_of_strips + substitution),
        ),
        Stage(
            "kda_scan",
            prepared + tokens * 2 * 2 * V + 2 * state,
            chunks * (with_state + within),
        ),
    ]


def floor(B: int, T: int, H: int, K: int, V: int) -> Stage:
    """Any implementation: each input read once, each output written once, all in bfloat16."""
    tokens = B * T * H
    return Stage("any kernel", tokens * 2 * (3 * K + 2 * V + 1), 0)
