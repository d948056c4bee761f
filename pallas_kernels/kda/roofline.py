"""Bytes and arithmetic of the KDA kernels, and the least time that they take on a card.

Counted from the shapes: what each kernel reads from and writes to memory if every block of it comes
from there once, and what its tensor cores do, masked halves included.
"""

from dataclasses import dataclass

CHUNK, STRIP, KEYS, VALUES = 64, 16, 128, 64  # of mosaic_common.py and mosaic_scan.py


@dataclass(frozen=True)
class Card:
    """Bytes and bfloat16 operations per second of a GPU."""

    name: str
    bytes_per_second: float
    flops_per_second: float


# The data sheet's bandwidth; of the arithmetic, what large matrix products reach.
H200 = Card("H200", 4.8e12, 790e12)


@dataclass(frozen=True)
class Stage:
    """What a kernel moves and computes."""

    name: str
    bytes: int
    flops: int

    def bound(self, card: Card) -> tuple[float, str]:
        """The least seconds, and what they are spent on."""
        memory, arithmetic = self.bytes / card.bytes_per_second, self.flops / card.flops_per_second
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")

    def describe(self, card: Card) -> str:
        """One line."""
        seconds, why = self.bound(card)
        return (
            f"{self.name}: {self.bytes / 1e9:.3f} GB, {self.flops / 1e9:.1f} GFLOP, "
            f"at least {seconds * 1e3:.3f} ms on an {card.name} ({why})"
        )


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
