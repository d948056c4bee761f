"""The least time that a kernel takes on a card, from what it moves and computes."""

from dataclasses import dataclass


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
