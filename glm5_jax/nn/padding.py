"""Padded positions: what a mixer, which looks along time, has to be kept from seeing.

Without a cache a row's real tokens stand anywhere in it (`Mask`). With one, `left_align` has put
them first, and `Stretch` says which slots of the cache they get.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from glm5_jax.nn.types import Activations, Mask


def mask_padding(x: Activations, mask: Mask) -> Activations:
    """Zeros where `mask` is False, whatever `x` holds there, NaN included.

    So a convolution sees before the first real token what it sees before the first position, and
    a padded token writes nothing into a recurrent state.
    """
    return jnp.where(mask[..., None], x, 0)


def end_of_rows(mask: Mask) -> Int[Array, " B"]:
    """The position after the last real token of each row; 0 where there is none."""
    return jnp.max(jnp.where(mask, jnp.arange(mask.shape[1]) + 1, 0), axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stretch:
    """The tokens that one call brings to a cache: of row b the first `count[b]`.

    They get the slots from `start` on, which is how many tokens the row had before.
    """

    start: Int[Array, " B"]
    count: Int[Array, " B"]

    def mask(self, tokens: int) -> Mask:
        """Which of the call's `tokens` positions are real."""
        return jnp.arange(tokens) < self.count[:, None]

    def seen(self, tokens: int) -> Int[Array, "B T"]:
        """How many tokens of its row each token sees, itself included; 0 for padding."""
        position = self.start[:, None] + jnp.arange(tokens)
        return jnp.where(self.mask(tokens), position + 1, 0)

    def write(
        self, slots: Shaped[Array, "B S *_"], values: Shaped[Array, "B T *_"]
    ) -> Shaped[Array, "B S *_"]:
        """`slots` with the real tokens' `values` in their slots; none is past the end."""
        T = values.shape[1]
        slot = jnp.where(self.mask(T), self.start[:, None] + jnp.arange(T), slots.shape[1])
        return write_rows(slots, slot, values)


def write_rows(
    slots: Shaped[Array, "B S *_"], slot: Int[Array, "B T"], values: Shaped[Array, "B T *_"]
) -> Shaped[Array, "B S *_"]:
    """In each row of a batch, `values` in their slots; those past the end are dropped."""
    # By `vmap`, as everywhere that rows look up their own: a batch that is cut over devices stays
    # cut, where an index of the row would make XLA gather it.
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(slots, slot, values)


def shift_tokens(x: Shaped[Array, "B T *_"], distance: Int[Array, " B"]) -> Shaped[Array, "B T *_"]:
    """Row b moved `distance[b]` positions later (earlier where negative), zeros moving in."""
    T = x.shape[1]
    source = jnp.arange(T) - distance[:, None]
    source = jnp.where(source < 0, T, source)  # a negative index would count from the end
    return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(x, source)


def roll_tokens(x: Shaped[Array, "B T *_"], distance: Int[Array, " B"]) -> Shaped[Array, "B T *_"]:
    """Row b moved `distance[b]` positions later, what leaves at the end coming in at the front."""
    T = x.shape[1]
    return jax.vmap(lambda row, at: row[at])(x, (jnp.arange(T) - distance[:, None]) % T)
