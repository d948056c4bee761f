"""The spec table: every tensor of the model, once.

A row says how a tensor is called in the released files, its shape in symbolic dims, the dtype it
must have on disk, its role, where it goes in the parameter tree and by which transform, its
logical axes, and whether a release may quantise it. Classification, audit, binding, conversion,
export, byte budgets and shardings are derived from these rows, in ``specs``. No JAX here.

Name templates hold ``{layer}``, ``{expert}`` or ``{block}``; shapes are products and sums of the
letters of ``ModelConfig.dims``, ``[out, in]`` as on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TEXT_PREFIX = "model.language_model."
VISION_PREFIX = "model.visual."
LAYER_PREFIX = TEXT_PREFIX + "layers.{layer}."

ROLES = (
    "embedding",
    "lm_head",
    "final_norm",
    "kda_projection",
    "kda_conv",
    "kda_decay",
    "kda_norm",
    "mla_projection",
    "mla_norm",
    "indexer",
    "indexer_norm",
    "moe_router",
    "moe_expert",
    "moe_shared",
    "dense_ffn",
    "layer_norm",
    "hyper_connection",
    "mtp_projection",
    "mtp_norm",
    "vision",
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model.

    name: released name template.  shape: symbolic dims of the released tensor.
    dtype: "BF16" or "F32", required on disk.  path: dotted leaf in the parameter tree, ``None``
    for what is never bound.  transform: how released tensors become the leaf: ``copy``;
    ``concat`` (q, k, v rows in table order, then the unit axis squeezed); ``stack`` (experts).
    axes: logical axes of the *leaf*.  quantizable: a release may store it quantised.
    native: name template in transformers' modules, ``None`` if the same.  native_part:
    (index, count) of this tensor among the rows of a fused native tensor.
    keep_stored: computed in float32 but left in its stored dtype by a cast to bfloat16.
    """

    name: str
    shape: tuple[str, ...]
    dtype: Literal["BF16", "F32"]
    role: str
    path: str | None
    transform: Literal["copy", "concat", "stack"]
    axes: tuple[str | None, ...]
    quantizable: bool
    native: str | None = None
    native_part: tuple[int, int] = (0, 1)
    keep_stored: bool = False


def _in_layer(
    name: str,
    shape: tuple[str, ...],
    role: str,
    path: str | None,
    axes: tuple[str | None, ...],
    *,
    dtype: Literal["BF16", "F32"] = "BF16",
    quantizable: bool = False,
    transform: Literal["copy", "concat", "stack"] = "copy",
    native: str | None = None,
    native_part: tuple[int, int] = (0, 1),
    keep_stored: bool = False,
) -> TensorSpec:
    return TensorSpec(
        LAYER_PREFIX + name,
        shape,
        dtype,
        role,
        None if path is None else "layers.{layer}." + path,
        transform,
        axes,
        quantizable,
        None if native is None else LAYER_PREFIX + native,
        native_part,
        keep_stored,
    )


def _linear(
    name: str,
    out: str,
    into: str,
    role: str,
    axes: tuple[str | None, str | None],
    path: str | None = None,
    native: str | None = None,
) -> TensorSpec:
    """A matrix [out, in] whose path is its module's name unless one is given."""
    path = path or name.replace("self_attn.", "attn.").replace("mlp.", "ffn.")
    native = native and f"{native}.weight"
    shape = (out, into)
    return _in_layer(f"{name}.weight", shape, role, path, axes, quantizable=True, native=native)


def _kda(
    name: str, out: str, into: str, axes: tuple[str | None, str | None], gate: bool = False
) -> TensorSpec:
    native = f"self_attn.forget_gate.{name}" if gate else None
    return _linear(f"self_attn.{name}", out, into, "kda_projection", axes, native=native)


def _conv(letter: str, index: int) -> TensorSpec:
    # q, k and v have one shape, so a wrong order would be silent: the order is this index.
    return _in_layer(
        f"self_attn.{letter}_conv1d.weight",
        ("H*D", "1", "K"),
        "kda_conv",
        "attn.conv",
        ("kda_channels", None),
        transform="concat",
        native="self_attn.conv1d.weight",
        native_part=(index, 3),
        keep_stored=True,
    )


def _decay(name: str, dim: str) -> TensorSpec:
    return _in_layer(
        f"self_attn.{name}",
        (dim,),
        "kda_decay",
        f"attn.{name}",
        ("kda_heads",),
        dtype="F32",
        native=f"self_attn.forget_gate.{name}",
    )


def _norm(name: str, dim: str, role: str, path: str, axis: str | None = None) -> TensorSpec:
    return _in_layer(name, (dim,), role, path, (axis,))


KDA: tuple[TensorSpec, ...] = (
    _kda("q_proj", "H*D", "X", ("kda_heads", "embed")),
    _kda("k_proj", "H*D", "X", ("kda_heads", "embed")),
    _kda("v_proj", "H*D", "X", ("kda_heads", "embed")),
    _conv("q", 0),
    _conv("k", 1),
    _conv("v", 2),
    _kda("f_a_proj", "D", "X", (None, "embed"), gate=True),
    _kda("f_b_proj", "H*D", "D", ("kda_heads", None), gate=True),
    _kda("g_a_proj", "D", "X", (None, "embed")),
    _kda("g_b_proj", "H*D", "D", ("kda_heads", None)),
    _kda("b_proj", "H", "X", ("kda_heads", "embed")),
    _decay("A_log", "H"),
    _decay("dt_bias", "H*D"),
    _norm("self_attn.o_norm.weight", "D", "kda_norm", "attn.o_norm"),
    _kda("o_proj", "X", "H*D", ("embed", "kda_heads")),
)


def _mla(
    name: str, out: str, into: str, axes: tuple[str | None, str | None], path: str | None = None
) -> TensorSpec:
    return _linear(f"self_attn.{name}", out, into, "mla_projection", axes, path)


MLA: tuple[TensorSpec, ...] = (
    _mla("q_a_proj", "Rq", "X", (None, "embed")),
    _norm("self_attn.q_a_layernorm.weight", "Rq", "mla_norm", "attn.q_a_norm"),
    _mla("q_b_proj", "A*N", "Rq", ("heads", None)),
    _mla("kv_a_proj_with_mqa", "R", "X", (None, "embed"), path="attn.kv_a_proj"),
    _norm("self_attn.kv_a_layernorm.weight", "R", "mla_norm", "attn.kv_a_norm"),
    _mla("kv_b_proj", "A*(N+V)", "R", ("heads", None)),
    _mla("o_proj", "X", "A*V", ("embed", "heads")),
)


def _indexer(
    name: str, out: str, into: str, axes: tuple[str | None, str | None], path: str | None = None
) -> TensorSpec:
    if path is None:
        return _linear(f"self_attn.indexer.{name}", out, into, "indexer", axes)
    return _in_layer(f"self_attn.indexer.{name}", (out, into), "indexer", path, axes)


INDEXER: tuple[TensorSpec, ...] = (
    _indexer("wq_b", "HI*DI", "Rq", ("index_heads", None)),
    _indexer("wk", "DI", "X", (None, "embed")),
    _norm("self_attn.indexer.k_norm.weight", "DI", "indexer_norm", "attn.indexer.k_norm_weight"),
    _norm("self_attn.indexer.k_norm.bias", "DI", "indexer_norm", "attn.indexer.k_norm_bias"),
    _indexer("weights_proj", "HI", "X", ("index_heads", "embed")),
    _indexer("index_kpool_compress_ape", "P", "DI", (None, None), "attn.indexer.ape"),
    _indexer("index_kpool_compress_gate", "DI", "X", (None, "embed"), "attn.indexer.compress_gate"),
)

DSA: tuple[TensorSpec, ...] = MLA + INDEXER


def _hyper_connection(
    site: str, leaf: str, shape: tuple[str, ...], dtype: Literal["BF16", "F32"]
) -> TensorSpec:
    path = f"{site}_hc.{leaf}"
    axes = (None,) * len(shape)
    name = f"hc_{site}_{leaf}"
    return _in_layer(name, shape, "hyper_connection", path, axes, dtype=dtype, native=path)


HYPER_CONNECTION: tuple[TensorSpec, ...] = (
    _hyper_connection("attn", "fn", ("(2+M)*M", "M*X"), "BF16"),
    _hyper_connection("attn", "base", ("(2+M)*M",), "F32"),
    _hyper_connection("attn", "scale", ("3",), "F32"),
    _hyper_connection("ffn", "fn", ("(2+M)*M", "M*X"), "BF16"),
    _hyper_connection("ffn", "base", ("(2+M)*M",), "F32"),
    _hyper_connection("ffn", "scale", ("3",), "F32"),
)

LAYER_NORMS: tuple[TensorSpec, ...] = (
    _norm("input_layernorm.weight", "X", "layer_norm", "attn_norm", "embed"),
    _norm("post_attention_layernorm.weight", "X", "layer_norm", "ffn_norm", "embed"),
)

DENSE: tuple[TensorSpec, ...] = (
    _linear("mlp.gate_proj", "F", "X", "dense_ffn", ("mlp", "embed")),
    _linear("mlp.up_proj", "F", "X", "dense_ffn", ("mlp", "embed")),
    _linear("mlp.down_proj", "X", "F", "dense_ffn", ("embed", "mlp")),
)


def _router(
    name: str, shape: tuple[str, ...], path: str, dtype: Literal["BF16", "F32"], keep_stored: bool
) -> TensorSpec:
    axes = (None, "embed")[: len(shape)]
    return _in_layer(
        f"mlp.gate.{name}", shape, "moe_router", path, axes, dtype=dtype, keep_stored=keep_stored
    )


ROUTER: tuple[TensorSpec, ...] = (
    _router("weight", ("E", "X"), "ffn.router.weight", "BF16", True),
    _router("e_score_correction_bias", ("E",), "ffn.router.bias", "F32", False),
)


def _shared(name: str, out: str, into: str, axes: tuple[str, str]) -> TensorSpec:
    path = f"ffn.shared.{name}"
    return _linear(f"mlp.shared_experts.{name}", out, into, "moe_shared", axes, path)


SHARED: tuple[TensorSpec, ...] = (
    _shared("gate_proj", "Is", "X", ("mlp", "embed")),
    _shared("up_proj", "Is", "X", ("mlp", "embed")),
    _shared("down_proj", "X", "Is", ("embed", "mlp")),
)


def _expert(
    name: str, out: str, into: str, axes: tuple[str, str], native: str, part: tuple[int, int]
) -> TensorSpec:
    return _in_layer(
        f"mlp.experts.{{expert}}.{name}.weight",
        (out, into),
        "moe_expert",
        f"ffn.experts.{name}",
        ("experts", *axes),
        transform="stack",
        quantizable=True,
        native=f"mlp.experts.{native}",
        native_part=part,
    )


EXPERTS: tuple[TensorSpec, ...] = (
    _expert("gate_proj", "I", "X", ("expert_mlp", "embed"), "gate_up_proj", (0, 2)),
    _expert("up_proj", "I", "X", ("expert_mlp", "embed"), "gate_up_proj", (1, 2)),
    _expert("down_proj", "X", "I", ("embed", "expert_mlp"), "down_proj", (0, 1)),
)

MOE: tuple[TensorSpec, ...] = ROUTER + SHARED + EXPERTS


def _plain(
    name: str,
    shape: tuple[str, ...],
    role: str,
    path: str | None,
    axes: tuple[str | None, ...],
    quantizable: bool = False,
) -> TensorSpec:
    return TensorSpec(name, shape, "BF16", role, path, "copy", axes, quantizable)


# Paths of these are whole: they lie beside the MTP layer's own block, not inside it.
MTP: tuple[TensorSpec, ...] = (
    _plain(
        LAYER_PREFIX + "eh_proj.weight",
        ("X", "2*X"),
        "mtp_projection",
        "mtp.eh_proj",
        ("embed", None),
        quantizable=True,
    ),
    _plain(LAYER_PREFIX + "enorm.weight", ("X",), "mtp_norm", "mtp.enorm", ("embed",)),
    _plain(LAYER_PREFIX + "hnorm.weight", ("X",), "mtp_norm", "mtp.hnorm", ("embed",)),
    _plain(
        LAYER_PREFIX + "shared_head.norm.weight",
        ("X",),
        "mtp_norm",
        "mtp.shared_head_norm",
        ("embed",),
    ),
)

_BY_VOCAB = ("vocab", "embed")

# Some releases repeat the embedding and the head in the MTP layer. The main ones are used.
MTP_COPIES: tuple[TensorSpec, ...] = (
    _plain(LAYER_PREFIX + "embed_tokens.weight", ("Vo", "X"), "embedding", None, _BY_VOCAB),
    _plain(LAYER_PREFIX + "shared_head.head.weight", ("Vo", "X"), "lm_head", None, _BY_VOCAB),
)

OUTSIDE: tuple[TensorSpec, ...] = (
    _plain(
        TEXT_PREFIX + "embed_tokens.weight", ("Vo", "X"), "embedding", "embed_tokens", _BY_VOCAB
    ),
    _plain(TEXT_PREFIX + "norm.weight", ("X",), "final_norm", "norm", ("embed",)),
    _plain("lm_head.weight", ("Vo", "X"), "lm_head", "lm_head", _BY_VOCAB, quantizable=True),
)


def _vision(name: str, *shape: str) -> TensorSpec:
    return _plain(VISION_PREFIX + name, shape, "vision", None, (None,) * len(shape))


VISION_BLOCK: tuple[TensorSpec, ...] = (
    _vision("blocks.{block}.attn.q_norm.weight", "vX//vH"),
    _vision("blocks.{block}.attn.k_norm.weight", "vX//vH"),
    _vision("blocks.{block}.attn.qkv.weight", "3*vX", "vX"),
    _vision("blocks.{block}.attn.qkv.bias", "3*vX"),
    _vision("blocks.{block}.attn.proj.weight", "vX", "vX"),
    _vision("blocks.{block}.attn.proj.bias", "vX"),
    _vision("blocks.{block}.mlp.gate_proj.weight", "vF", "vX"),
    _vision("blocks.{block}.mlp.gate_proj.bias", "vF"),
    _vision("blocks.{block}.mlp.up_proj.weight", "vF", "vX"),
    _vision("blocks.{block}.mlp.up_proj.bias", "vF"),
    _vision("blocks.{block}.mlp.down_proj.weight", "vX", "vF"),
    _vision("blocks.{block}.mlp.down_proj.bias", "vX"),
    _vision("blocks.{block}.norm1.weight", "vX"),
    _vision("blocks.{block}.norm2.weight", "vX"),
)

VISION: tuple[TensorSpec, ...] = (
    _vision("patch_embed.proj.weight", "vX", "vC", "vT", "vP", "vP"),
    _vision("patch_embed.proj.bias", "vX"),
    _vision("post_layernorm.weight", "vX"),
    _vision("downsample.weight", "vO", "vX", "vM", "vM"),
    _vision("downsample.bias", "vO"),
    _vision("merger.proj.weight", "vO", "vO"),
    _vision("merger.post_projection_norm.weight", "vO"),
    _vision("merger.post_projection_norm.bias", "vO"),
    _vision("merger.gate_proj.weight", "vI", "vO"),
    _vision("merger.up_proj.weight", "vI", "vO"),
    _vision("merger.down_proj.weight", "vO", "vI"),
)
