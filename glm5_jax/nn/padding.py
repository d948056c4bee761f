"""Padded positions: what a mixer, which looks along time, has to be kept from seeing."""

import jax.numpy as jnp

from glm5_jax.nn.types import Activations, Mask


def mask_padding(x: Activations, mask: Mask) -> Activations:
    """Zeros where `mask` is False, whatever `x` holds there, NaN included.

    So a convolution sees before the first real token what it sees before the first position, and
    a padded token writes nothing into a recurrent state.
    """
    return jnp.where(mask[..., None], x, 0)
