"""The next token from its logits: the likeliest, or a draw from a narrowed distribution.

The narrowing is transformers': temperature, then top-k, then top-p. What a row draws hangs on the
seed, the row and the position alone, so that neither the other rows nor drafts change it.
"""

from dataclasses import dataclass
from numbers import Integral, Real

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from glm5_jax.nn.types import Logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Its numbers are arrays: other numbers compile nothing anew.

    `top_k` is None where it is not asked for, and so is `tail`, 1 − top_p, the probability that may
    be cut off.
    """

    key: Key[Array, ""]
    temperature: Float[Array, ""]
    top_k: Int[Array, ""] | None
    tail: Float[Array, ""] | None


def make_sampling(
    temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0
) -> Sampling | None:
    """The settings of `generate`, checked; None is greedy, which temperature 0 asks for.

    Raises:
        ValueError: a number outside its range; `top_k` or `top_p` without a temperature.
    """
    if not _is_real(temperature) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a number of at least 0, got {temperature!r}")
    if top_k is not None and (not _is_integer(top_k) or top_k < 1):
        raise ValueError(f"top_k: expected an integer of at least 1, got {top_k!r}")
    if top_p is not None and (not _is_real(top_p) or not 0 < top_p <= 1):
        raise ValueError(f"top_p: expected a number above 0 and up to 1, got {top_p!r}")
    if not _is_integer(seed) or not 0 <= seed < 2**32:
        raise ValueError(f"seed: expected an integer from 0 to {2**32 - 1}, got {seed!r}")
    if temperature == 0:
        for name, value in (("top_k", top_k), ("top_p", top_p)):
            if value is not None:
                raise ValueError(f"{name}={value} needs a temperature above 0, which is greedy")
        return None
    return Sampling(
        key=jax.random.key(seed),
        # What is smaller than float32's normal numbers is flushed to zero on the way.
        temperature=jnp.float32(max(temperature, float(jnp.finfo(jnp.float32).tiny))),
        top_k=None if top_k is None else jnp.int32(min(top_k, 2**31 - 1)),
        tail=None if top_p is None else jnp.float32(1 - top_p),
    )


def choose(
    logits: Logits, positions: Int[Array, "B T"], sampling: Sampling | None
) -> Int[Array, "B T"]:
    """A token for each of the logits; −1 where one of them is NaN, since nothing follows from it.

    `positions` are how many real tokens stand before each token in its row.
    """
    if sampling is None:
        tokens = jnp.argmax(logits, axis=-1)
    else:
        places = jax.vmap(jax.vmap(_place_key, (None, None, 0)), (None, 0, 0))
        keys = places(sampling.key, jnp.arange(positions.shape[0]), positions)
        tokens = jax.vmap(jax.vmap(jax.random.categorical))(keys, narrow(logits, sampling))
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, tokens).astype(jnp.int32)


def narrow(logits: Logits, sampling: Sampling) -> Logits:
    """Scores whose softmax is drawn from: −inf for what top-k and top-p leave out."""
    # From their largest, lest a small temperature makes infinities that cancel.
    scores = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k is not None:
        scores = keep_top_k(scores, sampling.top_k)
    if sampling.tail is not None:
        scores = cut_tail(scores, sampling.tail)
    return scores


def keep_top_k(scores: Logits, k: Int[Array, ""]) -> Logits:
    """−inf for scores below the k-th largest; what equals it stays."""
    size = scores.shape[-1]
    kth = jnp.sort(scores, axis=-1)[..., jnp.maximum(size - k, 0)]
    return jnp.where(scores < kth[..., None], -jnp.inf, scores)


def cut_tail(scores: Logits, tail: Float[Array, ""]) -> Logits:
    """−inf for the least likely, as many as together have a probability of at most `tail`.

    The likeliest always stays. Of equals those with a lower index go first, as in transformers.
    """
    order = jnp.argsort(scores, axis=-1, stable=True)
    rising = jnp.take_along_axis(scores, order, axis=-1)
    cut = jnp.cumsum(jax.nn.softmax(rising, axis=-1), axis=-1) <= tail
    cut = cut.at[..., -1].set(False)
    cut = jnp.put_along_axis(jnp.zeros_like(cut), order, cut, axis=-1, inplace=False)
    return jnp.where(cut, -jnp.inf, scores)


def _place_key(
    key: Key[Array, ""], row: Int[Array, ""], position: Int[Array, ""]
) -> Key[Array, ""]:
    return jax.random.fold_in(jax.random.fold_in(key, row), position)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
