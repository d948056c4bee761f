"""Speculative decoding: the MTP head drafts some tokens, and the trunk checks them in one call.

What is accepted is what the trunk would have chosen anyway, so that drafts change no token, only
how many calls of the trunk they take. Rows advance independently.

The cache of the head has pair t, (h_t, token_{t+1}), in slot t. Pairs with the trunk's own h_t are
written once and for good; a draft that goes on from a draft has the head's output for h_t, and is
forgotten as soon as the trunk has spoken.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm5_jax.cache import Cache, DSACache
from glm5_jax.model import TextModel, embed, head_logits
from glm5_jax.mtp import MTPHead
from glm5_jax.nn.padding import Stretch
from glm5_jax.nn.types import Activations, Logits, Selection

Choose = Callable[[Logits, Int[Array, "B T"]], Int[Array, "B T"]]
"""Tokens for some logits, and for the number of real tokens before each of them in its row.

It must be a function of both alone: a draft is accepted where it is what the trunk's logits give
at the same place, sampled or not.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """Pairs with the trunk's own h_t that the MTP cache lacks: the first `count` of each row.

    hidden: h_t, the trunk's output after the final norm.
    tokens: the token after each. That of a row's last pair is its newest, if the trunk has not seen
        it yet.
    """

    hidden: Float[Array, "B W X"]
    tokens: Int[Array, "B W"]
    count: Int[Array, " B"]

    @property
    def newest(self) -> Int[Array, " B"]:
        """The token of each row's last pair; of a row without pairs it means nothing."""
        return jnp.take_along_axis(self.tokens, self.last, axis=1)[:, 0]

    @property
    def last(self) -> Int[Array, "B 1"]:
        """Where each row's last pair stands."""
        return jnp.maximum(self.count - 1, 0)[:, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verdict:
    """What the trunk says of the drafts of each row.

    tokens: its own choices, one more than drafts; of row b the first `count[b]` hold: the accepted
    drafts, and the token that the trunk puts after them. `count` is 0 for a row at rest.
    """

    tokens: Int[Array, "B k+1"]
    count: Int[Array, " B"]


def speculate(
    model: TextModel,
    cache: Cache,
    pairs: Pairs,
    drafts: int,
    choose: Choose,
    active: Bool[Array, " B"],
) -> tuple[Verdict, Pairs, Cache]:
    """One step: `draft`, then `verify`. The pairs that it returns are those of the next step.

    To begin with, a row's pairs are that of its prompt's last token and the first one chosen, once
    `write_pairs` has had the others of the prompt; W is then best `drafts` + 1, as it is later, for
    one compilation. A row that is not `active` rests: its state and its pairs stay what they are.
    """
    todo = replace(pairs, count=jnp.where(active, pairs.count, 0))
    guesses, cache = draft(model, cache, todo, drafts, choose)
    verdict, done, cache = verify(model, cache, pairs.newest, guesses, choose, active)

    def of_active(new, old):
        return jnp.where(active.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return verdict, jax.tree.map(of_active, done, pairs), cache


def write_pairs(
    model: TextModel, cache: Cache, pairs: Pairs
) -> tuple[Activations, Selection, Cache]:
    """The head's outputs h' [B, W, X] and selections for `pairs`, which the cache then has.

    `pairs` must go on where the MTP cache ends. Raises ValueError where the model or the cache has
    no MTP head.
    """
    head, mtp, written = _head(model, cache)
    embedded = embed(model.embed_tokens[...], pairs.tokens)
    stretch = Stretch(written, pairs.count)
    output, selection, mtp = head.advance(
        pairs.hidden, embedded, stretch, mtp, implementation=model.implementation
    )
    return output, selection, replace(cache, mtp=mtp, mtp_lengths=written + pairs.count)


def draft(
    model: TextModel, cache: Cache, pairs: Pairs, drafts: int, choose: Choose
) -> tuple[Int[Array, "B k"], Cache]:
    """`drafts` tokens after the newest of each row, and the cache with `pairs`.

    The first comes of true pairs and runs the indexer. Those after it feed back the head's own
    output; with the config's `index_share_for_mtp_iteration` they attend to what the last true
    pair selected.
    """
    output, selection, cache = write_pairs(model, cache, pairs)
    head, mtp, written = _head(model, cache)
    hidden, selection = (
        jnp.take_along_axis(h, pairs.last[..., None], axis=1) for h in (output, selection)
    )
    shared = selection if model.config.index_share_for_mtp_iteration else None
    lm_head, table = model.lm_head[...], model.embed_tokens[...]

    def next_draft(carry, index):
        hidden, token, mtp = carry
        stretch = Stretch(written + index, jnp.ones_like(written))
        hidden, _, mtp = head.advance(
            hidden, embed(table, token), stretch, mtp, shared, model.implementation
        )
        token = choose(head_logits(hidden, lm_head), cache.lengths[:, None] + 2 + index)
        return (hidden, token, mtp), token[:, 0]

    first = choose(head_logits(hidden, lm_head), cache.lengths[:, None] + 1)
    carry = hidden, first, mtp
    (_, _, mtp), others = jax.lax.scan(next_draft, carry, jnp.arange(drafts - 1))
    guesses = jnp.concatenate([first, jnp.moveaxis(others, 0, 1)], axis=1)
    return guesses, replace(cache, mtp=mtp.rewind(written))


def verify(
    model: TextModel,
    cache: Cache,
    newest: Int[Array, " B"],
    guesses: Int[Array, "B k"],
    choose: Choose,
    active: Bool[Array, " B"],
) -> tuple[Verdict, Pairs, Cache]:
    """The trunk's choices after `newest` and after each draft, in one call of k+1 tokens.

    A row keeps the tokens up to its last accepted draft; the others never were. Rows that are not
    `active` stay as they are. The pairs are those of the tokens that were kept.
    """
    drafts = guesses.shape[1]
    if cache.depth < drafts:
        raise ValueError(
            f"{drafts} drafts need a cache that can go back as far: init_cache with rewind="
            f"{drafts} or more, got {cache.depth}"
        )
    start = cache.lengths
    tokens = jnp.concatenate([newest[:, None], guesses], axis=1)
    mask = jnp.broadcast_to(active[:, None], tokens.shape)
    hidden, cache = model.advance(tokens, cache, mask)
    position = start[:, None] + 1 + jnp.arange(drafts + 1)
    choices = choose(head_logits(hidden, model.lm_head[...]), position)
    agrees = jnp.cumprod(guesses == choices[:, :-1], axis=1)
    count = jnp.where(active, 1 + jnp.sum(agrees, axis=1, dtype=jnp.int32), 0)
    return Verdict(choices, count), Pairs(hidden, choices, count), cache.rewind(start + count)


def _head(model: TextModel, cache: Cache) -> tuple[MTPHead, DSACache, Int[Array, " B"]]:
    """The head, its cache, and how many pairs that has."""
    if model.mtp is None or cache.mtp is None or cache.mtp_lengths is None:
        lacking = "model was loaded" if model.mtp is None else "cache was made"
        raise ValueError(
            f"drafts need the MTP head, which this {lacking} without: "
            "load(path, mtp=True), and init_cache of that model"
        )
    return model.mtp, cache.mtp, cache.mtp_lengths
