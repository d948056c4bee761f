"""Generation: the prompt into a cache, then one compiled step for token after token.

A step is one call of the trunk, and the choice of the next token in the same call. With drafts the
MTP head guesses some tokens first, and the trunk's call checks them.
"""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from glm5_jax.cache import Cache
from glm5_jax.drafts import Pairs, speculate, write_pairs
from glm5_jax.inputs import checked_inputs
from glm5_jax.model import TextModel, head_logits
from glm5_jax.nn.placement import Placement, place
from glm5_jax.nn.types import Activations, GivenMask, Tokens
from glm5_jax.processes import on_host
from glm5_jax.sampling import Sampling, choose, make_sampling
from glm5_jax.token_batch import right_padded

PREFILL_WIDTHS = (1024, 256, 64, 16)
"""Columns of a prompt that one call brings into the cache.

The first bounds what a call needs; each costs seconds of compilation, so there are few.
"""

OnToken = Callable[[int, int], object]


@dataclass(frozen=True)
class Stats:
    """What a generation took, all rows together.

    trunk_calls: calls of the trunk after the prompt; without drafts one for each further token.
    drafted, accepted: for the first, second, … draft of a call, how often it was checked, and how
        often it and those before it were what the trunk chose. Rows that have ended do not count.
    first_seconds: until the first token was there: the prompt, and what was compiled for it.
    step_seconds: the first step, which may have had to be compiled.
    rest_seconds, rest_tokens: all steps after that, and the tokens that they brought.
    """

    prompt_tokens: int
    new_tokens: int
    trunk_calls: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    first_seconds: float
    step_seconds: float
    rest_seconds: float
    rest_tokens: int

    def __str__(self) -> str:
        parts = [
            f"{self.prompt_tokens} prompt tokens in {self.first_seconds:.2f} s",
            f"{self.new_tokens} new ones, {self.trunk_calls} calls after the prompt's",
        ]
        if self.rest_tokens:
            rate = self.rest_tokens / self.rest_seconds
            parts.append(f"{rate:.1f} tokens/s after a first step of {self.step_seconds:.2f} s")
        if self.drafted:
            shares = zip(self.accepted, self.drafted, strict=True)
            parts.append("drafts accepted: " + ", ".join(f"{a}/{d}" for a, d in shares))
        return "; ".join(parts)


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    tokens: [B, max_new_tokens] int32, the pad id behind the end of a row.
    lengths: [B] int32, the new tokens of each row, the one that ended it included.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    stats: Stats

    @property
    def rows(self) -> list[list[int]]:
        """The new tokens of each row, without what stands behind its end."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]


def generate(
    model: TextModel,
    tokens: Tokens | Sequence[Sequence[int]],
    mask: GivenMask | None = None,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos: int | Sequence[int] | None = None,
    draft_tokens: int = 0,
    on_token: OnToken | None = None,
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens.

    Prompts are an array [B, T], with a `mask` that is 1 for real tokens where they are padded, or a
    list of lists of any lengths. Rows do not influence one another.

    Temperature 0 takes the likeliest token, of equals the lower. Above it, tokens are drawn from
    softmax(logits / temperature), narrowed first to the `top_k` likeliest, then to the likeliest
    that together have the probability `top_p`. A draw hangs on `seed`, the row, and the number of
    tokens before it in its row.

    A row ends with any of the tokens `eos`: those of the config if it is None, no token at all if
    it is empty. Behind the end stands the config's pad id; without one the first of `eos`, or 0.

    `draft_tokens` lets the MTP head guess that many tokens, which the trunk checks in one call. It
    changes no token (other products are rounded otherwise, so where two logits are as close as
    that, it may), and costs what `Cache.rewind` says.

    `on_token(row, token)` is called for each new token as soon as it is there, also for one that
    ends its row. A call of the trunk brings tokens for all rows: they come row by row.

    Shapes are rounded up, so that few of them are compiled: the capacity of the cache to one of
    four sizes an octave, for the step, and prompts to calls of `PREFILL_WIDTHS` columns, for their
    layers.

    Raises:
        ValueError: a prompt is empty or not of token ids, a setting is out of its range, or drafts
            are asked of a model that was loaded without its MTP head.
        FloatingPointError: logits are NaN, so that there is nothing to choose from.
    """
    sampling = make_sampling(temperature, top_k, top_p, seed)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if draft_tokens < 0:
        raise ValueError(f"draft_tokens: expected at least 0, got {draft_tokens}")
    if draft_tokens and model.mtp is None:
        raise ValueError("draft_tokens: the model has no MTP head; load it with mtp=True")
    prompts = _prompt_rows(tokens, mask, model.config.vocab_size)
    ends = _end_tokens(eos, model.config.eos_token_ids)
    pad = model.config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    output = _Output([len(row) for row in prompts], max_new_tokens, ends, pad, on_token)

    # The last new token never goes into the cache; drafts that are refused do for a while.
    room = max(map(len, prompts)) + max_new_tokens - 1 + draft_tokens
    started = time.perf_counter()
    running = begin(model, prompts, _roomy(room), sampling, draft_tokens)
    output.take(np.asarray(running.newest)[:, None], np.ones(len(prompts), int))
    marks = [(time.perf_counter(), output.total)]
    step = make_step(model, sampling, draft_tokens)
    counts = []
    while (active := output.active).any():
        running, chosen, count = step(running, active)
        counts.append(np.where(active, count, 0))
        output.take(np.asarray(chosen), counts[-1])
        marks.append((time.perf_counter(), output.total))

    after_first = marks[min(1, len(counts))]
    checked = np.array(counts).reshape(-1, 1)
    checked = checked[checked > 0, None] - 1 > np.arange(draft_tokens)
    stats = Stats(
        prompt_tokens=sum(map(len, prompts)),
        new_tokens=output.total,
        trunk_calls=len(counts),
        drafted=(len(checked),) * draft_tokens,
        accepted=tuple(checked.sum(axis=0).tolist()),
        first_seconds=marks[0][0] - started,
        step_seconds=after_first[0] - marks[0][0],
        rest_seconds=marks[-1][0] - after_first[0],
        rest_tokens=marks[-1][1] - after_first[1],
    )
    return Generation(output.tokens, output.lengths, stats)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Running:
    """A generation between two steps.

    cache: all tokens of each row but the newest.
    newest: the last token that was chosen, which the trunk has not seen.
    pairs: what the cache of the MTP head lacks, None without drafts.
    """

    cache: Cache
    newest: Int[Array, " B"]
    pairs: Pairs | None

    def place(self, on: Placement | None) -> "Running":
        """On the devices of a placement, always in the same way: one compilation of the step."""
        if on is None:
            return self
        pairs = self.pairs and Pairs(
            hidden=on.place(self.pairs.hidden, "batch", None, None),
            tokens=on.place(self.pairs.tokens, "batch", None),
            count=on.place(self.pairs.count, None),
        )
        return Running(self.cache.place(on), on.place(self.newest, None), pairs)


Active: TypeAlias = Bool[Array | np.ndarray, " B"]
"""Which rows have not ended."""
Step: TypeAlias = Callable[[Running, Active], tuple[Running, Int[Array, "B W"], Int[Array, " B"]]]
"""From one state to the next, which takes its place in memory, for the rows that are active.

Returns the tokens too: of row b the first `count[b]`, one more than its accepted drafts.
"""


def begin(
    model: TextModel,
    prompts: Sequence[np.ndarray],
    capacity: int,
    sampling: Sampling | None,
    drafts: int = 0,
) -> Running:
    """The state after the prompts, with the first new token chosen.

    Outside `jax.jit` the layers compile one by one. The hidden states of one chunk are held at a
    time, and the logits of the last position alone.
    """
    lengths = np.array([len(row) for row in prompts], np.int32)
    widths = _chunk_widths(max(map(len, prompts)))
    tokens = right_padded(prompts, sum(widths) + 1)
    dtype = model.embed_tokens[...].dtype
    # Without drafts nothing asks the MTP head, loaded or not: it gets no cache.
    cache = model.init_cache(len(prompts), capacity, rewind=drafts, mtp=drafts > 0)
    last = jnp.zeros((len(prompts), model.config.hidden_size), dtype)
    start = 0
    for width in widths:
        end = start + width
        count = np.clip(lengths - start, 0, width)
        hidden, cache = model.advance(
            tokens[:, start:end], cache, np.arange(width) < count[:, None], donate=True
        )
        last = _last_hidden(last, hidden, count)
        if drafts:
            # Pair t needs token t + 1, which a row's last token has not got yet.
            count = np.clip(lengths - 1 - start, 0, width)
            following = jnp.asarray(tokens[:, start + 1 : end + 1])
            cache = _write_pairs(model, cache, Pairs(hidden, following, jnp.asarray(count)))
        start = end
    newest = _first_token(last, model.lm_head[...], lengths, sampling)
    pairs = _first_pairs(last, newest, drafts) if drafts else None
    return Running(cache, newest, pairs).place(model.placement)


def make_step(model: TextModel, sampling: Sampling | None, drafts: int = 0) -> Step:
    """The step of this model: decode and choice, or drafts, check and choices, in one `jax.jit`."""
    # Flattened once: the many modules would cost more in each call than a small model's arithmetic.
    leaves, structure = jax.tree.flatten(model)
    arrays = tuple(leaves)

    def step(running: Running, active: Active):
        return _step(arrays, running, active, sampling, structure, drafts)

    return step


@functools.partial(jax.jit, static_argnames=("structure", "drafts"), donate_argnames="running")
def _step(
    arrays: tuple[jax.Array, ...],
    running: Running,
    active: Bool[Array, " B"],
    sampling: Sampling | None,
    structure: jax.tree_util.PyTreeDef,
    drafts: int,
) -> tuple[Running, Int[Array, "B W"], Int[Array, " B"]]:
    model = jax.tree.unflatten(structure, arrays)
    if running.pairs is None:
        # Rows that have ended go on, which costs nothing and changes nothing for the others.
        logits, cache = model.decode(running.newest, running.cache)
        tokens = choose(logits[:, None], cache.lengths[:, None], sampling)
        tokens = place(model.placement, tokens, None, None)
        return Running(cache, tokens[:, 0], None), tokens, jnp.ones_like(running.newest)

    def chosen(logits, positions):
        return choose(logits, positions, sampling)

    verdict, pairs, cache = speculate(model, running.cache, running.pairs, drafts, chosen, active)
    after = Running(cache, pairs.newest, pairs).place(model.placement)
    # On all devices, for whoever calls to read.
    tokens = place(model.placement, verdict.tokens, None, None)
    return after, tokens, place(model.placement, verdict.count, None)


@functools.partial(jax.jit, donate_argnames="cache")
def _write_pairs(model: TextModel, cache: Cache, pairs: Pairs) -> Cache:
    return write_pairs(model, cache, pairs)[2]


@jax.jit
def _last_hidden(
    before: Float[Array, "B X"], hidden: Activations, count: Int[Array, " B"]
) -> Float[Array, "B X"]:
    """The hidden state of each row's last token so far: of the first `count` of these, if any."""
    at = jnp.maximum(count - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, last, before)


@jax.jit
def _first_token(
    hidden: Float[Array, "B X"],
    lm_head: Float[Array, "Vo X"],
    positions: Int[Array, " B"],
    sampling: Sampling | None,
) -> Int[Array, " B"]:
    return choose(head_logits(hidden[:, None], lm_head), positions[:, None], sampling)[:, 0]


def _first_pairs(hidden: Float[Array, "B X"], newest: Int[Array, " B"], drafts: int) -> Pairs:
    """The pairs of the prompts' last tokens, as wide as those of every later step."""
    later = ((0, 0), (0, drafts))
    return Pairs(
        jnp.pad(hidden[:, None], (*later, (0, 0))),
        jnp.pad(newest[:, None], later),
        jnp.ones_like(newest),
    )


class _Output:
    """The tokens of each row until it ends."""

    def __init__(
        self,
        prompt_lengths: list[int],
        limit: int,
        ends: Sequence[int],
        pad: int,
        on_token: OnToken | None,
    ):
        self.prompt_lengths = prompt_lengths
        self.tokens = np.full((len(prompt_lengths), limit), pad, np.int32)
        self.lengths = np.zeros(len(prompt_lengths), np.int32)
        self.active = np.ones(len(prompt_lengths), bool)
        self._ends = frozenset(ends)
        self._on_token = on_token

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    def take(self, tokens: np.ndarray, count: np.ndarray) -> None:
        """The first `count` of `tokens` [B, W], for the rows that have not ended."""
        for row in np.flatnonzero(self.active):
            for token in tokens[row, : count[row]].tolist():
                if token < 0:
                    before = self.prompt_lengths[row] + self.lengths[row]
                    raise FloatingPointError(
                        f"row {row}: after {before} tokens the logits are NaN; is a weight?"
                    )
                self.tokens[row, self.lengths[row]] = token
                self.lengths[row] += 1
                if self._on_token is not None:
                    self._on_token(int(row), token)
                if token in self._ends or self.lengths[row] == self.tokens.shape[1]:
                    self.active[row] = False
                    break


def _prompt_rows(
    tokens: Tokens | Sequence[Sequence[int]], mask: GivenMask | None, vocab_size: int
) -> list[np.ndarray]:
    """The real tokens of each row."""
    if isinstance(tokens, Sequence):
        if mask is not None:
            raise ValueError("mask: expected none beside a list of prompts, which has no padding")
        rows = [np.asarray(row) for row in tokens]
        for i, row in enumerate(rows):
            if row.ndim != 1 or not (row.size and np.issubdtype(row.dtype, np.integer)):
                raise ValueError(
                    "tokens: expected integers [B, T], or a list of lists of at least one, "
                    f"got {row.dtype} {row.shape} for row {i}"
                )
        if not rows:
            raise ValueError("tokens: expected a prompt, got an empty list")
        checked_inputs(np.concatenate(rows)[None], None, vocab_size)
        return rows
    ids, real = map(on_host, checked_inputs(tokens, mask, vocab_size))
    rows = [row[kept] for row, kept in zip(ids, real, strict=True)]
    for i, row in enumerate(rows):
        if not row.size:
            raise ValueError(f"tokens: row {i} has no real token to go on from")
    return rows


def _end_tokens(eos: int | Sequence[int] | None, of_config: tuple[int, ...]) -> tuple[int, ...]:
    if eos is None:
        return of_config
    ends = tuple(eos) if isinstance(eos, Iterable) else (eos,)
    for token in ends:
        if not isinstance(token, Integral) or token < 0:
            raise ValueError(f"eos: expected token ids, got {token!r}")
    return tuple(int(token) for token in ends)


def _roomy(tokens: int) -> int:
    """`tokens` or up to a quarter more, one of four sizes an octave; at least a multiple of 16."""
    step = max(16, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // step) * step


def _chunk_widths(columns: int) -> list[int]:
    """The widths of the calls that bring so many columns into the cache.

    Each call is more than half full, but for one of the narrowest.
    """
    chunks = []
    for width in PREFILL_WIDTHS:
        least = 0 if width == PREFILL_WIDTHS[-1] else width // 2
        while columns > least:
            chunks.append(width)
            columns -= width
    return chunks
