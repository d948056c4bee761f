"""The text model of GLM-5.3-Flash.

embedding → M equal streams → decoder layers → mean over the streams → RMSNorm → lm_head.
There are no positions anywhere: order reaches the model through KDA's recurrence and causality.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm5_jax.config import ModelConfig
from glm5_jax.mtp import MTPHead
from glm5_jax.nn.dsa import DSA
from glm5_jax.nn.ffn import MoE, SwiGLU
from glm5_jax.nn.kda import KDA
from glm5_jax.nn.linear import full_precision
from glm5_jax.nn.mhc import HyperConnection, collapse, expand, mean_streams
from glm5_jax.nn.norms import rms_norm
from glm5_jax.nn.params import Params
from glm5_jax.nn.types import (
    Activations,
    GivenMask,
    Logits,
    Mask,
    Record,
    Selection,
    Streams,
    Tokens,
    scoped,
    wide,
)
from glm5_jax.skeleton import Skeleton, SkeletonLayer
from glm5_jax.specs import leaves


class DecoderLayer(nnx.Module):
    """A mixer and a feed-forward layer, each inside its own hyper-connection."""

    def __init__(self, layer: SkeletonLayer, config: ModelConfig, params: Params):
        self.eps = config.rms_norm_eps
        self.attn_hc = HyperConnection(config, params.at("attn_hc"))
        self.attn_norm = params("attn_norm")
        self.attn = _mixer(layer, config, params.at("attn"))
        self.ffn_hc = HyperConnection(config, params.at("ffn_hc"))
        self.ffn_norm = params("ffn_norm")
        self.ffn = _feed_forward(layer, config, params.at("ffn"))

    def __call__(
        self,
        streams: Streams,
        mask: Mask,
        selection: Selection | None = None,
        record: Record | None = None,
    ) -> tuple[Streams, Selection | None]:
        """The streams after this layer, and the selection of a DSA layer (None from KDA).

        `selection` is the one to share, for a DSA layer without an indexer of its own.
        """
        trace = scoped(record, "attn")
        site = self.attn_hc(streams, trace)
        x = collapse(streams, site.pre)
        _note(trace, "collapse", x)
        x = rms_norm(x, self.attn_norm[...], self.eps)
        _note(trace, "norm", x)
        if isinstance(self.attn, KDA):
            y, selection = self.attn(x, mask, trace), None
            _note(trace, "kda", y)
        else:
            y, selection = self.attn(x, mask, selection, trace)
            _note(trace, "dsa", y)
        streams = expand(y, streams, site.post, site.comb)
        _note(trace, "expand", streams)

        trace = scoped(record, "ffn")
        site = self.ffn_hc(streams, trace)
        x = collapse(streams, site.pre)
        _note(trace, "collapse", x)
        x = rms_norm(x, self.ffn_norm[...], self.eps)
        _note(trace, "norm", x)
        y = self.ffn(x, trace)
        _note(trace, "moe" if isinstance(self.ffn, MoE) else "dense", y)
        streams = expand(y, streams, site.post, site.comb)
        _note(trace, "expand", streams)
        return streams, selection


class TextModel(nnx.Module):
    """The 45 layers and what stands before and behind them; built from the skeleton.

    `mtp` is the MTP head that drafts with them, None where it was not loaded.
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

    @classmethod
    def from_leaves(
        cls, config: ModelConfig, arrays: Mapping[str, jax.Array | np.ndarray]
    ) -> "TextModel":
        """The model with the arrays of a parameter tree, keyed by path (`layers.0.attn.q_proj`).

        It has an MTP head if there are leaves under `mtp.`, also where the config is silent about
        one. Raises ValueError when a leaf is missing, left over, or has another shape than its
        spec.
        """
        mtp = any(path.startswith("mtp.") for path in arrays)
        if mtp:
            config = replace(config, num_nextn_predict_layers=1)
        model = cls(config, Params(leaves(config, mtp=mtp)), mtp)
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

    def __call__(
        self, tokens: Tokens, mask: GivenMask | None = None, *, record: Record | None = None
    ) -> Logits:
        """Logits of every position, float32 (float64 for a float64 model).

        `mask` is 1 for real tokens, contiguous in each row; None means that all are real. Logits
        at padded positions are finite and mean nothing. `record(name, value)` is called at every
        trace site, in the order of `skeleton.residual_plan`.

        Outside `jax.jit` each layer is a call of its own, compiled once per kind of layer.

        Raises:
            ValueError: `tokens` or `mask` has another shape or type; `mask` has a hole, or a token
                is outside the vocabulary. Values are checked where they are known, which is outside
                `jax.jit`; inside, a token outside the vocabulary makes its logits NaN.
        """
        tokens, mask = _checked_inputs(tokens, mask, self.config.vocab_size)
        streams = _embed(self.embed_tokens[...], tokens, self.config.hc_mult)
        _note(record, "embedding", streams[:, :, 0])
        selection = None
        for plan, layer in zip(self.skeleton.layers, self.layers, strict=True):
            shared = selection if plan.indexer == "shared" else None
            streams, chosen, sites = _run_layer(layer, streams, mask, shared, record is not None)
            selection = selection if chosen is None else chosen
            for name, value in sites.items():
                _note(record, f"layers.{plan.index}.{name}", value)
        logits, sites = _read_out(
            streams, self.norm[...], self.lm_head[...], self.config.rms_norm_eps, record is not None
        )
        for name, value in sites.items():
            _note(record, name, value)
        return logits


def load(path: str | os.PathLike, dtype: str = "stored", mtp: bool = False) -> TextModel:
    """The text model of a checkpoint: an Orbax directory of `convert`, or safetensors directly.

    Both give the same model, bit for bit. `dtype` is "stored", "bfloat16", "float32" or
    "float64"; what must be float32 stays float32 in a bfloat16 model. `mtp` loads the MTP head
    too, as `.mtp`.

    Raises:
        CheckpointError: the directory is neither, or incomplete, or an array cannot be read, or
            the MTP head is asked for and not there. Bytes that changed and still read are found by
            `verify` alone.
        ConfigError: its config.json describes no model of this family.
    """
    from glm5_jax.checkpoint.restore import load_leaves

    config, arrays = load_leaves(path, dtype=dtype, mtp=mtp)
    return TextModel.from_leaves(config, arrays)


@jax.tree_util.register_pytree_node_class
class _Sites(dict):
    """Trace sites in the order in which they were recorded; a plain dict would be sorted by jit."""

    def tree_flatten(self):
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(zip(names, values, strict=True))


@functools.partial(jax.jit, static_argnames="traced")
def _run_layer(
    layer: DecoderLayer, streams: Streams, mask: Mask, selection: Selection | None, traced: bool
) -> tuple[Streams, Selection | None, _Sites]:
    sites = _Sites()
    streams, selection = layer(streams, mask, selection, sites.__setitem__ if traced else None)
    return streams, selection, sites


@functools.partial(jax.jit, static_argnames="streams")
def _embed(table: jax.Array, tokens: Tokens, streams: int) -> Streams:
    # Under jit an unknown id cannot be refused: it reads as NaN, which no logit hides.
    x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], streams, x.shape[2]))


@functools.partial(jax.jit, static_argnames=("eps", "traced"))
def _read_out(
    streams: Streams, norm: jax.Array, lm_head: jax.Array, eps: float, traced: bool
) -> tuple[Logits, _Sites]:
    sites = _Sites()
    record = sites.__setitem__ if traced else None
    x = mean_streams(streams)
    _note(record, "final.mean", x)
    x = rms_norm(x, norm, eps)
    _note(record, "final.norm", x)
    logits = head_logits(x, lm_head)
    _note(record, "final.head", logits)
    return logits, sites


def head_logits(x: Activations, lm_head: jax.Array) -> Logits:
    """Logits in float32: the operands keep the activation dtype, the sum is not rounded to it."""
    return jnp.einsum(
        "btx,vx->btv",
        x,
        lm_head.astype(x.dtype),
        precision=full_precision(x.dtype),
        preferred_element_type=wide(x.dtype),
    )


def _mixer(layer: SkeletonLayer, config: ModelConfig, params: Params) -> KDA | DSA:
    if layer.mixer == "kda":
        return KDA(config, params)
    return DSA(config, params, owns_indexer=layer.indexer == "full")


def _feed_forward(layer: SkeletonLayer, config: ModelConfig, params: Params) -> MoE | SwiGLU:
    return MoE(config, params) if layer.mlp == "moe" else SwiGLU(config, params)


def _note(record: Record | None, name: str, value: jax.Array) -> None:
    if record is not None:
        record(name, value)


def _checked_inputs(tokens: Tokens, mask: GivenMask | None, vocab_size: int) -> tuple[Tokens, Mask]:
    if not isinstance(tokens, jax.Array):
        tokens = np.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens: expected integers [B, T], at least one, got {tokens.dtype} {tokens.shape}"
        )
    if not isinstance(tokens, jax.core.Tracer):
        low, high = int(np.min(tokens)), int(np.max(tokens))
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"tokens: expected ids from 0 to {vocab_size - 1}, got {low if low < 0 else high}"
            )
    if mask is None:
        return tokens, jnp.ones(tokens.shape, bool)
    if not isinstance(mask, jax.Array):
        mask = np.asarray(mask)
    if mask.shape != tokens.shape:
        raise ValueError(f"mask: expected the tokens' shape {tokens.shape}, got {mask.shape}")
    if not isinstance(mask, jax.core.Tracer):
        known = np.asarray(mask)
        if not np.isin(known, (0, 1)).all():
            raise ValueError("mask: expected 1 for real tokens and 0 for padding, got other values")
        starts = np.diff(known.astype(np.int8), axis=1, prepend=0) == 1
        holes = np.flatnonzero(starts.sum(axis=1) > 1)
        if holes.size:
            raise ValueError(f"mask: the real tokens of row {holes[0]} are not contiguous")
    return tokens, jnp.asarray(mask, bool)
