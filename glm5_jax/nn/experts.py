"""Running only the experts that were chosen, with static shapes.

`jax.lax.ragged_dot` on a CPU computes every expert for every token. Here the (token, expert) pairs
are sorted by expert and cut into blocks of rows that share one expert; a scan runs the blocks and
skips those that the worst case reserved and this batch does not need.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_MAX_BLOCK = 128


def apply_experts(
    expert: Callable[[Int[Array, ""], Float[Array, "n X"]], Float[Array, "n X"]],
    tokens: Float[Array, "t X"],
    chosen: Int[Array, "t k"],
    num_experts: int,
    at_hand: int | None = None,
) -> Float[Array, "t k X"]:
    """`expert(chosen[i, j], tokens[i])` for every pair (i, j).

    `expert(index, rows)` computes one expert on some rows; it sees each pair exactly once. Only
    the experts below `at_hand` are there, all `num_experts` by default; pairs of others are zero.
    Whatever else is there, a pair gets the same bits: its row has the same place in its block.
    """
    t, k = chosen.shape
    pairs = t * k
    at_hand = num_experts if at_hand is None else at_hand
    blocks, block = block_plan(pairs, num_experts, at_hand)

    of_pair = jnp.minimum(chosen.reshape(-1), at_hand)  # those that are not there come last
    order = jnp.argsort(of_pair, stable=True)
    counts = jnp.bincount(of_pair, length=at_hand)
    end_block = jnp.cumsum(-(-counts // block))
    first_block = end_block - -(-counts // block)
    first_rank = jnp.cumsum(counts) - counts
    sorted_expert = of_pair[order]
    rank = jnp.arange(pairs) - first_rank[sorted_expert]
    slot = first_block[sorted_expert] * block + rank
    slot = jnp.where(sorted_expert < at_hand, slot, blocks * block)

    # Slots that no pair fills read token 0; nobody reads what comes of it.
    token_of_slot = jnp.zeros(blocks * block, order.dtype).at[slot].set(order // k, mode="drop")
    expert_of_block = jnp.searchsorted(end_block, jnp.arange(blocks), side="right")

    def run_block(_, block_input):
        index, rows = block_input
        return None, jax.lax.cond(
            index < at_hand,
            lambda: expert(index, tokens[rows]),
            lambda: jnp.zeros((block, tokens.shape[1]), tokens.dtype),
        )

    _, outputs = jax.lax.scan(
        run_block, None, (expert_of_block, token_of_slot.reshape(blocks, block))
    )
    slot_of_pair = jnp.zeros(pairs, slot.dtype).at[order].set(slot)
    outputs = outputs.reshape(blocks * block, -1)
    return outputs.at[slot_of_pair].get(mode="fill", fill_value=0).reshape(t, k, -1)


def block_plan(pairs: int, num_experts: int, at_hand: int) -> tuple[int, int]:
    """How many blocks are enough for so many pairs, however they fall, and the rows of a block.

    That is a power of two near the mean number of pairs of an expert.
    """
    mean = max(1, pairs // num_experts)
    block = min(_MAX_BLOCK, 1 << (mean - 1).bit_length())
    # Σ ceil(count / block) is at most this.
    return min(pairs, (pairs + min(pairs, at_hand) * (block - 1)) // block), block
