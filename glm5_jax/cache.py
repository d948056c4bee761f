"""What a batch of sequences remembers, as pytrees: to be carried, donated, saved, taken back.

Rows are compact: the i-th real token of a row stands in slot i, whatever padding it came with, and
pools of P tokens start at slot 0. A row's own counters say how far it is, so rows advance and go
back independently, and one compilation serves every position.
"""

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from glm5_jax.config import ModelConfig
from glm5_jax.nn.padding import shift_tokens
from glm5_jax.nn.placement import Placement
from glm5_jax.nn.types import wide
from glm5_jax.skeleton import Skeleton, SkeletonLayer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replay:
    """What a KDA layer needs to write its last n tokens into a state once more.

    Right-aligned: a row's last token stands last. A row of zeros in front is a token that was not
    there: it neither decays the state nor writes into it. k and v are those behind the convolution,
    in the activation dtype; g (log-decay) and beta are float32.
    """

    k: Float[Array, "B n H D"]
    v: Float[Array, "B n H D"]
    g: Float[Array, "B n H D"]
    beta: Float[Array, "B n H"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDAState:
    """The memory of a KDA layer, of one size whatever the length.

    A recurrent state cannot be un-multiplied, so what can be taken back is not in it yet:
    `recurrent`, float32 in every model dtype, lags behind by the tokens in `replay`. `conv` are the
    last columns of q, k and v before the convolution and before its activation, oldest first: the
    K−1 that the next token needs, and one for each token of `replay`.
    """

    recurrent: Float[Array, "B H K V"]
    conv: Float[Array, "B C 3 HD"]
    replay: Replay

    def place(self, on: Placement) -> "KDAState":
        """Cut by rows and by heads."""
        head, replay = ("batch", None, "kda_heads"), self.replay
        return KDAState(
            on.place(self.recurrent, "batch", "kda_heads", None, None),
            on.place(self.conv, "batch", None, None, "kda_heads"),
            Replay(
                k=on.place(replay.k, *head, None),
                v=on.place(replay.v, *head, None),
                g=on.place(replay.g, *head, None),
                beta=on.place(replay.beta, *head),
            ),
        )

    def rewind(self, distance: Int[Array, " B"]) -> "KDAState":
        """Without the last `distance` tokens of each row, all of which `replay` must hold."""
        conv, replay = jax.tree.map(lambda h: shift_tokens(h, distance), (self.conv, self.replay))
        return replace(self, conv=conv, replay=replay)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DSACache:
    """The memory of a DSA layer, by slot: the latent that is attended to, and what chooses it.

    What stands in a slot that is not `valid`, NaN included, has no effect. `pool_keys` are computed
    once, when a pool's last token arrives. A layer that shares another's selection chooses nothing,
    and has no index keys, gates and pool keys.
    """

    latent: Float[Array, "B S R"]
    valid: Bool[Array, "B S"]
    index_keys: Float[Array, "B S DI"] | None
    gates: Float[Array, "B S DI"] | None
    pool_keys: Float[Array, "B NP DI"] | None

    def place(self, on: Placement) -> "DSACache":
        """Cut by rows: every head attends to the whole of a latent."""
        return jax.tree.map(lambda x: on.place(x, "batch", *[None] * (x.ndim - 1)), self)

    def rewind(self, lengths: Int[Array, " B"]) -> "DSACache":
        """With the first `lengths` slots of each row: the others are written anew in their turn."""
        kept = jnp.arange(self.valid.shape[1]) < lengths[:, None]
        return replace(self, valid=self.valid & kept)


LayerState: TypeAlias = KDAState | DSACache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The state of a batch of sequences: a pytree of arrays; `TextModel.init_cache` makes one.

    `orbax.checkpoint.v1.save(path, cache)` writes it, and `load(path, abstract)` reads it again,
    where abstract is `jax.eval_shape(lambda: model.init_cache(...))` with the sizes it had.

    lengths: the real tokens that each row has seen.
    kept: how many tokens back a rewind of each row may go now.
    layers: one state per layer.
    mtp, mtp_lengths: the MTP head's own cache and the pairs in it, None without a head.
    capacity: how many real tokens a row may have.
    depth: how many tokens back a rewind may go at most.
    """

    lengths: Int[Array, " B"]
    kept: Int[Array, " B"]
    layers: tuple[LayerState, ...]
    mtp: DSACache | None
    mtp_lengths: Int[Array, " B"] | None
    capacity: int = field(metadata={"static": True})
    depth: int = field(metadata={"static": True})

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.lengths.shape[0]

    def place(self, on: Placement | None) -> "Cache":
        """On the devices of a placement: states by rows and heads, counters on all of them."""
        if on is None:
            return self
        return replace(
            self,
            lengths=on.place(self.lengths, None),
            kept=on.place(self.kept, None),
            layers=tuple(state.place(on) for state in self.layers),
            mtp=None if self.mtp is None else self.mtp.place(on),
            mtp_lengths=None if self.mtp_lengths is None else on.place(self.mtp_lengths, None),
        )

    def rewind(self, lengths: ArrayLike) -> "Cache":
        """Forget all but the first `lengths` [B] (or one number) real tokens of each row.

        A row may go back `kept` tokens: as many as it has seen, and at most the `rewind` that the
        cache was made with. The depth r costs, per KDA layer and row, r more columns of the
        convolution, k, v, g and beta of r tokens, and in every call the recurrence of r tokens
        once more; going back itself moves those rows and computes nothing. What follows is the same
        as if the tokens had never been there.

        Under `jax.jit`, where nothing can be refused, a row that is asked to go too far is lost:
        all its logits are NaN from then on.

        Raises:
            ValueError: outside `jax.jit`, a row cannot go to its length; or not one length per row.
        """
        lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
        target = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), self._one_per_row(lengths))
        nearest = self.lengths - self.kept
        possible = (nearest <= target) & (target <= self.lengths)
        if not isinstance(possible, jax.core.Tracer) and not np.all(possible):
            row = int(np.flatnonzero(~np.asarray(possible))[0])
            raise ValueError(
                f"rewind of row {row}: asked for {int(target[row])} of its "
                f"{int(self.lengths[row])} tokens, can go back to {int(nearest[row])} "
                f"(the cache was made with rewind={self.depth})"
            )
        distance = jnp.where(possible, self.lengths - target, 0)
        return replace(
            self,
            lengths=jnp.where(possible, target, self.capacity + 1),
            kept=self.kept - distance,
            layers=tuple(
                state.rewind(distance if isinstance(state, KDAState) else target)
                for state in self.layers
            ),
            # Pair t needs token t + 1.
            mtp=None if self.mtp is None else self.mtp.rewind(target - 1),
            mtp_lengths=None
            if self.mtp_lengths is None
            else jnp.minimum(self.mtp_lengths, jnp.maximum(target - 1, 0)),
        )

    def _one_per_row(self, lengths: jax.Array | np.ndarray) -> tuple[int]:
        shape = lengths.shape
        if shape not in ((), (self.batch,)) or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(
                f"rewind: expected one length for each of {self.batch} rows, "
                f"got {lengths.dtype} {shape}"
            )
        return (self.batch,)


def empty_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    rewind: int,
    dtype: DTypeLike,
    mtp: bool,
    placement: Placement | None = None,
) -> Cache:
    """The cache of `batch` sequences that have not begun, for activations in `dtype`."""
    sizes = (("batch", batch, 1), ("capacity", capacity, 1), ("rewind", rewind, 0))
    for name, value, least in sizes:
        if value < least:
            raise ValueError(f"{name}: expected {least} or more, got {value}")
    skeleton = Skeleton.from_config(config)

    def of(layer: SkeletonLayer) -> LayerState:
        if layer.mixer == "kda":
            return _empty_kda(config, batch, rewind, dtype)
        return _empty_dsa(config, batch, capacity, dtype, layer.indexer == "full")

    def make() -> Cache:
        return Cache(
            lengths=jnp.zeros(batch, jnp.int32),
            kept=jnp.zeros(batch, jnp.int32),
            layers=tuple(of(layer) for layer in skeleton.layers),
            mtp=_empty_dsa(config, batch, capacity, dtype, True) if mtp else None,
            mtp_lengths=jnp.zeros(batch, jnp.int32) if mtp else None,
            capacity=capacity,
            depth=rewind,
        ).place(placement)

    # Compiled, each device makes its own part; otherwise one would make all of it first.
    return make() if placement is None else jax.jit(make)()


def _empty_kda(config: ModelConfig, batch: int, rewind: int, dtype: DTypeLike) -> KDAState:
    H, D = config.linear_num_heads, config.linear_head_dim
    columns = config.linear_conv_kernel_dim - 1 + rewind
    return KDAState(
        recurrent=jnp.zeros((batch, H, D, D), wide(dtype)),
        conv=jnp.zeros((batch, columns, 3, H * D), dtype),
        replay=Replay(
            k=jnp.zeros((batch, rewind, H, D), dtype),
            v=jnp.zeros((batch, rewind, H, D), dtype),
            g=jnp.zeros((batch, rewind, H, D), wide(dtype)),
            beta=jnp.zeros((batch, rewind, H), wide(dtype)),
        ),
    )


def _empty_dsa(
    config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike, owns_indexer: bool
) -> DSACache:
    def zeros(slots: int, width: int) -> Array:
        return jnp.zeros((batch, slots, width), dtype)

    DI, pools = config.index_head_dim, capacity // config.index_kpool
    return DSACache(
        latent=zeros(capacity, config.kv_lora_rank),
        valid=jnp.zeros((batch, capacity), bool),
        index_keys=zeros(capacity, DI) if owns_indexer else None,
        gates=zeros(capacity, DI) if owns_indexer else None,
        pool_keys=zeros(pools, DI) if owns_indexer else None,
    )
