"""The text model of GLM-5.3-Flash.

embedding → M equal streams → decoder layers → mean over the streams → RMSNorm → lm_head.
There are no positions anywhere: order reaches the model through KDA's recurrence and causality.
"""

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from glm5_jax.cache import Cache, empty_cache
from glm5_jax.compiled import compiled
from glm5_jax.config import ModelConfig
from glm5_jax.errors import ConfigError
from glm5_jax.inputs import checked_inputs
from glm5_jax.layer import DecoderLayer
from glm5_jax.mtp import MTPHead
from glm5_jax.nn.dsa import DSA
from glm5_jax.nn.ffn import Experts
from glm5_jax.nn.indexer import Indexer
from glm5_jax.nn.kda import KDA
from glm5_jax.nn.linear import full_precision
from glm5_jax.nn.mhc import mean_streams
from glm5_jax.nn.norms import rms_norm
from glm5_jax.nn.padding import Stretch, roll_tokens
from glm5_jax.nn.params import Params
from glm5_jax.nn.placement import Placement, place
from glm5_jax.nn.record import Record, note, scoped
from glm5_jax.nn.spread import Spread
from glm5_jax.nn.types import (
    Activations,
    GivenMask,
    Implementation,
    Logits,
    Mask,
    Selection,
    Streams,
    Tokens,
    wide,
)
from glm5_jax.sharding import ShardingRules, find_rules, read_sharded
from glm5_jax.skeleton import Skeleton, SkeletonLayer
from glm5_jax.specs import leaves


class TextModel(nnx.Module):
    """The 45 layers and what stands before and behind them; built from the skeleton.

    `mtp` is the MTP head that drafts with them, None where it was not loaded. `implementation` is
    what runs KDA and DSA where a call does not say: a name, several of which the first that
    can run does, or None for whatever suits the machine (see `pallas_kernels.kda.chunk_kda`).
    """

    def __init__(self, config: ModelConfig, params: Params, mtp: bool = False):
        self.config = config
        self.skeleton = Skeleton.from_config(config)
        self.embed_tokens = params("embed_tokens")
        self.layers = nnx.List(
            DecoderLayer(layer, config, params.at(f"layers.{layer.index}"))
            for layer in self.skeleton.layers
        )
        self.norm = params("norm")
        self.lm_head = params("lm_head")
        self.mtp = MTPHead(config, params.at("mtp")) if mtp else None
        self.implementation: Implementation = None
        self.placement: Placement | None = None

    @classmethod
    def from_leaves(
        cls, config: ModelConfig, arrays: Mapping[str, jax.Array | np.ndarray]
    ) -> "TextModel":
        """The model with the arrays of a parameter tree, keyed by path (`layers.0.attn.q_proj`).

        A leaf that is given quantised, as `<path>.codes` and its scales, stays so and is decoded
        where it is used, to the activation dtype. It has an MTP head if there are leaves under
        `mtp.`, also where the config is silent about one. Raises ValueError when a leaf is missing,
        left over, or has another shape than its spec.
        """
        mtp = any(path.startswith("mtp.") for path in arrays)
        if mtp:
            config = replace(config, num_nextn_predict_layers=1)
        dtype = arrays["embed_tokens"].dtype if "embed_tokens" in arrays else jnp.bfloat16
        block = None if config.quantization is None else config.quantization.weight_block_size
        params = Params(leaves(config, mtp=mtp), arrays, block, dtype)
        model = cls(config, params, mtp)
        remaining = dict(arrays)
        for path, variable in nnx.iter_graph(model):
            if not isinstance(variable, nnx.Variable):
                continue
            name = ".".join(map(str, path))
            array = remaining.pop(name, None)
            if array is None:
                raise ValueError(f"{name}: expected an array of shape {variable.shape}, got none")
            if array.shape != variable.shape:
                raise ValueError(f"{name}: expected shape {variable.shape}, got {array.shape}")
            variable.set_value(jnp.asarray(array))
        if remaining:
            raise ValueError(f"no parameter of the model is called {sorted(remaining)[0]}")
        return model

    def place(self, placement: Placement) -> None:
        """Tell all modules how the arrays of this model, which have shardings, are cut."""
        for _, module in nnx.iter_graph(self):
            if isinstance(module, Experts):
                module.spread = Spread.of(module, placement)
            elif isinstance(module, TextModel | KDA | DSA | Indexer):
                module.placement = placement

    @property
    def dtype(self) -> jnp.dtype:
        """That of the activations, which is the embedding's."""
        return self.embed_tokens[...].dtype

    def __call__(
        self,
        tokens: Tokens,
        mask: GivenMask | None = None,
        *,
        record: Record | None = None,
        implementation: Implementation = None,
    ) -> Logits:
        """Logits of every position, float32 (float64 for a float64 model).

        `mask` is 1 for real tokens, contiguous in each row; None means that all are real. Logits
        at padded positions are finite and mean nothing. `record(name, value)` is called at every
        trace site, in the order of `skeleton.residual_plan`. `implementation` is for this call.

        Outside `jax.jit` each layer is a call of its own, compiled once per kind of layer.

        Raises:
            ValueError: `tokens` or `mask` has another shape or type; `mask` has a hole, or a token
                is outside the vocabulary. Values are checked where they are known, which is outside
                `jax.jit`; inside, a token outside the vocabulary makes its logits NaN.
        """
        tokens, mask = checked_inputs(tokens, mask, self.config.vocab_size)
        tokens = place(self.placement, tokens, "batch", "sequence")
        mask = place(self.placement, mask, "batch", None)
        table, M = self.embed_tokens[...], self.config.hc_mult
        streams = embed_streams(table, tokens, streams=M, record=record)
        layers = zip(self.skeleton.layers, self.layers, strict=True)
        implementation = implementation or self.implementation
        streams = run_layers(layers, streams, mask, record, implementation)
        norm, lm_head = self.norm[...], self.lm_head[...]
        return read_out(streams, norm, lm_head, eps=self.config.rms_norm_eps, record=record)

    def init_cache(
        self, batch: int, capacity: int, rewind: int = 0, mtp: bool | None = None
    ) -> Cache:
        """The state of `batch` sequences before their first token.

        `capacity` is how many real tokens a row may have; `rewind` how many tokens back
        `Cache.rewind`, which says what that costs, may go. The latents, index keys and replayed
        tokens are in the model's activation dtype (that of its embedding); recurrent states and
        decays are float32, or float64 in a float64 model. `state_budget` counts the bytes. `mtp`
        says whether to keep the MTP head's own state, by default that of a model that has one. On
        a mesh each device holds the rows and heads that the model's rules give it.

        Raises:
            ValueError: no row, no capacity, or a negative rewind.
        """
        mtp = self.mtp is not None if mtp is None else mtp
        sizes = (batch, capacity, rewind)
        return empty_cache(self.config, *sizes, self.dtype, mtp, self.placement)

    def advance(
        self,
        tokens: Tokens,
        cache: Cache,
        mask: GivenMask | None = None,
        *,
        record: Record | None = None,
        implementation: Implementation = None,
        donate: bool = False,
    ) -> tuple[Activations, Cache]:
        """The hidden states `[B, T, X]` of more tokens, after the final norm, and the new cache.

        `mask` is 1 for real tokens, contiguous in each row: rows of a batch may bring any number of
        tokens, none included, padded on the left or right. Padding enters no state; its hidden
        states are finite and mean nothing. However a sequence is cut into calls, the result is that
        of one call of the whole.

        Outside `jax.jit` each layer is a call of its own, compiled once per kind of layer and shape
        of `tokens`, wherever in the sequence it stands; the given cache stays valid, unless
        `donate` lets the new one take its place in memory, layer after layer. Under an outer
        `jax.jit` that donates the cache, that is so without.

        `record` is called at the sites around every sublayer and for each selection, of slots of
        the cache; what it gets is left-aligned. `implementation` is for this call.

        Raises:
            ValueError: the tokens do not fit into the capacity; `tokens` or `mask` is not as
                expected, or not of the cache's batch. Values are checked outside `jax.jit`; inside,
                nothing is written past the capacity, and all logits of such a row are NaN.
        """
        tokens, mask = checked_inputs(tokens, mask, self.config.vocab_size)
        if tokens.shape[0] != cache.batch:
            raise ValueError(f"tokens: expected the cache's {cache.batch} rows, got {len(tokens)}")
        # Counters are on every device, so that whoever asks can read them.
        tokens, mask = (place(self.placement, x, None, None) for x in (tokens, mask))
        tokens, first, stretch = _left_aligned(tokens, mask, cache.lengths)
        stretch = jax.tree.map(lambda x: place(self.placement, x, None), stretch)
        _check_room(stretch, cache.capacity)
        tokens = place(self.placement, tokens, "batch", "sequence")
        table, M = self.embed_tokens[...], self.config.hc_mult
        streams = embed_streams(table, tokens, streams=M, record=record)
        selection: Selection | None = None
        states = []
        for plan, layer, state in zip(self.skeleton.layers, self.layers, cache.layers, strict=True):
            shared = selection if plan.indexer == "shared" else None
            trace = scoped(record, f"layers.{plan.index}")
            streams, chosen, state = layer.advance(
                *(streams, stretch, state, shared, trace),
                implementation or self.implementation,
                donate,
            )
            selection = selection if chosen is None else chosen
            states.append(state)
        hidden = _final_hidden(
            streams, self.norm[...], stretch, first, self.config.rms_norm_eps, cache.capacity
        )
        return place(self.placement, hidden, "batch", "sequence", None), replace(
            cache,
            lengths=stretch.start + stretch.count,
            kept=jnp.minimum(cache.kept + stretch.count, cache.depth),
            layers=tuple(states),
        ).place(self.placement)

    def prefill(
        self,
        tokens: Tokens,
        cache: Cache,
        mask: GivenMask | None = None,
        *,
        implementation: Implementation = None,
        donate: bool = False,
    ) -> tuple[Logits, Cache]:
        """The logits `[B, T, vocab]` of more tokens, and the cache after them: see `advance`."""
        hidden, cache = self.advance(
            tokens, cache, mask, implementation=implementation, donate=donate
        )
        return _head(hidden, self.lm_head[...]), cache

    def decode(
        self,
        token: Int[Array | np.ndarray, " B"],
        cache: Cache,
        *,
        implementation: Implementation = None,
    ) -> tuple[Array, Cache]:
        """The logits `[B, vocab]` after one more token of every row: see `advance`."""
        if jnp.ndim(token) != 1:
            raise ValueError(f"token: expected integers [B], got shape {jnp.shape(token)}")
        token = token if isinstance(token, jax.Array) else np.asarray(token)
        logits, cache = self.prefill(token[:, None], cache, implementation=implementation)
        return logits[:, 0], cache


def abstract_model(
    config: ModelConfig,
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    placement: Placement | None = None,
) -> TextModel:
    """A model of shapes, dtypes and shardings alone, to be lowered and measured without memory.

    `arrays` are those of `TextModel.from_leaves`; with a `placement` they have shardings.
    """
    model = jax.eval_shape(functools.partial(TextModel.from_leaves, config), dict(arrays))
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):
            variable.set_value(arrays[".".join(map(str, path))])
    if placement is not None:
        model.place(placement)
    return model


def load(
    path: str | os.PathLike,
    dtype: str = "stored",
    mtp: bool = False,
    implementation: Implementation = None,
    mesh: Mesh | None = None,
    rules: ShardingRules | str | None = None,
) -> TextModel:
    """The text model of a checkpoint: an Orbax directory of `convert`, or safetensors directly.

    Both give the same model, bit for bit. `dtype` is "stored", "bfloat16", "float32" or
    "float64"; what must be float32 stays float32 in a bfloat16 model. "stored" keeps quantised
    weights quantised in memory and decodes them where they are used, to the embedding's dtype; any
    other decodes them once. `mtp` loads the MTP head too, as `.mtp`. `implementation` is the
    model's own, see `TextModel`.

    `mesh`: spread the model over the devices of a mesh, cut by `rules`: `ShardingRules`, or the
    name of a preset, `tp_ep` by default (see `sharding`). Each process reads the parts that its
    devices hold and no more. What they send each other under `jax.jit`: along `tensor` sums of
    activations, behind the embedding, every mixer, MLP, shared expert and layer of experts; along
    `expert` a layer's tokens with their choices and weights, and their sums back (one sum where a
    batch does not divide); along `sequence` see `KDA` and `DSA`; nothing along the `data` of `tp`.
    What `fsdp` sends is left to XLA: weights, or sums of activations.

    Raises:
        CheckpointError: the directory is neither, or incomplete, or an array cannot be read, or
            the MTP head is asked for and not there. Bytes that changed and still read are found by
            `verify` alone.
        ConfigError: its config.json describes no model of this family; or mesh and rules are none,
            or do not divide it evenly.
    """
    from glm5_jax.checkpoint.restore import open_leaves

    if rules is not None and mesh is None:
        raise ConfigError(f"rules {rules!r}: expected a mesh beside them, to cut the model over")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(
            f"mesh: expected a jax.sharding.Mesh, as jax.make_mesh gives, got {mesh!r}"
        )
    rules = find_rules(rules)
    reader = open_leaves(path, dtype, mtp)
    if mesh is None:
        # Where they are: the arrays lie as JAX wants them, and nobody else has them.
        arrays = jax.device_put(reader.read_all())
    else:
        # Shardings are XLA's to find, whether or not the mesh was made for types that carry them.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        arrays = read_sharded(reader, mesh, rules)
    model = TextModel.from_leaves(reader.config, arrays)
    if mesh is not None:
        model.place(Placement(mesh, rules))
    model.implementation = implementation
    return model


@jax.jit
def _left_aligned(
    tokens: Int[Array, "B T"], mask: Mask, lengths: Int[Array, " B"]
) -> tuple[Tokens, Int[Array, " B"], Stretch]:
    """The tokens with each row's real ones first, where those stood, and the slots they get."""
    first = jnp.argmax(mask, axis=1)
    stretch = Stretch(lengths, jnp.sum(mask, axis=1, dtype=jnp.int32))
    return roll_tokens(tokens, -first), first, stretch


@functools.partial(jax.jit, static_argnames=("eps", "capacity"))
def _final_hidden(
    streams: Streams,
    norm: jax.Array,
    stretch: Stretch,
    first: Int[Array, " B"],
    eps: float,
    capacity: int,
) -> Activations:
    x = rms_norm(mean_streams(streams), norm, eps)
    fits = stretch.start + stretch.count <= capacity
    return jnp.where(fits[:, None, None], roll_tokens(x, first), jnp.nan)


def _check_room(stretch: Stretch, capacity: int) -> None:
    if isinstance(stretch.start, jax.core.Tracer) or isinstance(stretch.count, jax.core.Tracer):
        return
    used, asked = np.asarray(stretch.start), np.asarray(stretch.count)
    full = np.flatnonzero(used + asked > capacity)
    if full.size:
        row = full[0]
        raise ValueError(
            f"the cache has a capacity of {capacity} tokens a row; row {row} has {used[row]} and "
            f"was given {asked[row]} more: make one with init_cache(..., capacity=...)"
        )


def run_layers(
    layers: Iterable[tuple[SkeletonLayer, Callable[..., tuple[Streams, Selection | None]]]],
    streams: Streams,
    mask: Mask,
    record: Record | None = None,
    implementation: Implementation = None,
) -> Streams:
    """The streams after layers that are called as `DecoderLayer` is, each with its plan."""
    selection: Selection | None = None
    for plan, layer in layers:
        shared = selection if plan.indexer == "shared" else None
        streams, chosen = layer(
            *(streams, mask, shared, scoped(record, f"layers.{plan.index}")),
            implementation=implementation,
        )
        selection = selection if chosen is None else chosen
    return streams


@compiled("streams")
def embed_streams(
    table: jax.Array, tokens: Tokens, *, streams: int, record: Record | None
) -> Streams:
    """The streams before the first layer: so many copies of each token's embedding."""
    x = embed(table, tokens)
    note(record, "embedding", x)
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], streams, x.shape[2]))


def embed(table: jax.Array, tokens: Tokens) -> Activations:
    """The rows of the embedding for `tokens`; NaN for a token outside the vocabulary.

    Under jit such a token cannot be refused, and no logit hides a NaN.
    """
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@compiled("eps")
def read_out(
    streams: Streams, norm: jax.Array, lm_head: jax.Array, *, eps: float, record: Record | None
) -> Logits:
    """The logits after the last layer: the mean over the streams, the final norm, the head."""
    x = mean_streams(streams)
    note(record, "final.mean", x)
    x = rms_norm(x, norm, eps)
    note(record, "final.norm", x)
    logits = head_logits(x, lm_head)
    note(record, "final.head", logits)
    return logits


@jax.jit
def _head(x: Activations, lm_head: jax.Array) -> Logits:
    return head_logits(x, lm_head)


def head_logits(x: Activations, lm_head: jax.Array) -> Logits:
    """Logits in float32: the operands keep the activation dtype, the sum is not rounded to it."""
    return jnp.einsum(
        "btx,vx->btv",
        x,
        lm_head.astype(x.dtype),
        precision=full_precision(x.dtype),
        preferred_element_type=wide(x.dtype),
    )
