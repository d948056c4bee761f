"""How transformers is made to make each mistake of the catalogue: its counterpart there.

A model's modules are changed in place: a weight, an attribute, what goes in or comes out, or, where
the step has no name, a few characters of a method's text.
"""

import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from glm5_jax.numerics.oracle import oracle_module

torch = pytest.importorskip("torch", reason="the oracle extra is not installed")
F = torch.nn.functional


class Kinds:
    """The modules of a transformers model, by what they are."""

    def __init__(self, model: Any):
        text = model.model.language_model
        self.text, self.layers = text, list(text.layers)
        self.connections = [hc for layer in text.layers for hc in (layer.attn_hc, layer.ffn_hc)]
        self.kda, self.dsa = text.layers[0].self_attn, text.layers[1].self_attn
        self.indexer, self.moe = self.dsa.indexer, text.layers[1].mlp
        self.router, self.experts = self.moe.gate, self.moe.experts
        self.mlps = [text.layers[0].mlp, self.moe.shared_experts]
        kinds = "Glm5NextTextRMSNorm", "Glm5NextTextRMSNormGated", "Glm5NextTextUnweightedRMSNorm"
        self.norms, self.gated, self.unweighted = (
            [m for m in text.modules() if type(m).__name__ == kind] for kind in kinds
        )


class Plant(NamedTuple):
    """How transformers is made to make a mistake, and the first site where that shows."""

    site: str
    make: Callable[[Kinds, pytest.MonkeyPatch], Any]


def rewrite(module: Any, method: str, *changes: tuple[str, str], count: int = 0) -> None:
    """Change the text of one module's method, by regular expressions that must be found."""
    function = getattr(type(module), method)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        source, found = re.subn(old, new, source, count=count)
        assert found, f"{type(module).__name__}.{method} has no {old}"
    namespace = dict(vars(sys.modules[type(module).__module__]))
    exec(source, namespace)
    setattr(module, method, types.MethodType(namespace[method], module))


def rewrite_all(modules: list[Any], method: str, *changes: tuple[str, str], count: int = 0) -> None:
    for module in modules:
        rewrite(module, method, *changes, count=count)


def change_output(module: Any, change: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda _module, _args, out: change(out))


def change_inputs(module: Any, change: Callable[[dict], dict]) -> None:
    module.register_forward_pre_hook(lambda _m, args, kw: (args, kw | change(kw)), with_kwargs=True)


def change_weight(tensor: Any, change: Callable[[Any], Any]) -> None:
    with torch.no_grad():
        tensor.copy_(change(tensor.clone()))


def channel_major(kinds: Kinds) -> None:
    for hc in kinds.connections:
        M = hc.hc_mult
        change_weight(hc.fn, lambda w, M=M: w.unflatten(1, (-1, M)).transpose(1, 2).flatten(1))


def swap_pre_and_post(kinds: Kinds) -> None:
    for hc in kinds.connections:
        M = hc.hc_mult
        order = [*range(M, 2 * M), *range(M), *range(2 * M, len(hc.fn))]
        for tensor in (hc.fn, hc.base):
            change_weight(tensor, lambda w, order=order: w[order])
        change_weight(hc.scale, lambda w: w[[1, 0, 2]])


def each_head(dsa: Any, change: Callable[[Any], Any]) -> None:
    A, R = dsa.num_heads, dsa.kv_lora_rank
    change_weight(dsa.kv_b_proj.weight, lambda w: change(w.view(A, -1, R)).reshape(w.shape))


def keys_of_all_heads_first(dsa: Any) -> None:
    A, N, R = dsa.num_heads, dsa.qk_nope_head_dim, dsa.kv_lora_rank

    def change(w):
        keys, values = w[: A * N].view(A, N, R), w[A * N :].view(A, -1, R)
        return torch.cat([keys, values], dim=1).view(w.shape)

    change_weight(dsa.kv_b_proj.weight, change)


def taps(order: str) -> Callable[..., None]:
    def make(kinds: Kinds, patch: pytest.MonkeyPatch) -> None:
        def change(w):
            of = dict(zip("qkv", w.chunk(3), strict=True))
            return torch.cat([of[name] for name in order])

        change_weight(kinds.kda.conv1d.weight, change)

    return make


def unbounded_gate_clamped(kinds: Kinds, patch: pytest.MonkeyPatch) -> None:
    gate = kinds.kda.forget_gate
    bound, gate.safe_gate_lower_bound = gate.safe_gate_lower_bound, None
    change_output(gate, lambda g: g.clamp(min=bound))


def no_mask_for_pools(kinds: Kinds, patch: pytest.MonkeyPatch) -> None:
    def change(kw):
        mask = kw["attention_mask"]
        hidden = kw["hidden_states"] * mask[..., None]
        return {"attention_mask": torch.ones_like(mask), "hidden_states": hidden}

    change_inputs(kinds.indexer, change)


def query_itself_selected(selection: Any) -> Any:
    itself = torch.arange(selection.shape[1], dtype=selection.dtype)[None, :, None]
    free = (selection == -1).int().argmax(-1, keepdim=True)
    is_there = (selection == itself).any(-1, keepdim=True) | (selection != -1).all(-1, keepdim=True)
    return torch.where(is_there, selection, selection.scatter(-1, free, itself.expand_as(free)))


def without_tail(indexer: Any) -> None:
    slots = torch.arange(indexer.index_topk + indexer.index_kpool - 1)
    change_output(indexer, lambda out: out.masked_fill(slots >= indexer.index_topk, -1))


def set_all(modules: list[Any], **values: Any) -> None:
    for module in modules:
        for name, value in values.items():
            setattr(module, name, value)


RSQRT = r"torch\.rsqrt\((.*) \+ self\.(\w*eps\w*)\)", r"(1 / (torch.sqrt(\1) + self.\2))"
ROWS = r"comb = comb / (comb.sum(-1, keepdim=True) + self.hc_eps)"


def norms_with_eps_outside(kinds: Kinds, patch: pytest.MonkeyPatch) -> None:
    rewrite_all([*kinds.norms, *kinds.gated, *kinds.unweighted], "forward", RSQRT)


def swiglu(*changes: tuple[str, str]) -> Callable[..., None]:
    def make(kinds: Kinds, patch: pytest.MonkeyPatch) -> None:
        rewrite_all(kinds.mlps, "forward", *changes)
        rewrite(kinds.experts, "_apply_gate", *changes)

    return make


def connection(*changes: tuple[str, str], count: int = 0) -> Callable[..., None]:
    def make(kinds: Kinds, patch: pytest.MonkeyPatch) -> None:
        rewrite_all(kinds.connections, "forward", *changes, count=count)

    return make


def index_scores(*changes: tuple[str, str]) -> Callable[..., None]:
    return lambda kinds, patch: rewrite(kinds.indexer, "forward", *changes)


def router(*changes: tuple[str, str]) -> Callable[..., None]:
    return lambda kinds, patch: rewrite(kinds.router, "forward", *changes)


def l2norm(normalise: Callable[[Any], Any]) -> Callable[..., None]:
    return lambda kinds, patch: patch.setattr(
        oracle_module(), "l2norm", lambda x, **_: normalise(x)
    )


PLANTS: dict[str, Plant] = {
    "comb_not_transposed": Plant(
        "layers.0.attn.expand",
        lambda kinds, _: rewrite_all(kinds.layers, "forward", (r"\.transpose\(-1, -2\)", "")),
    ),
    "post_without_factor_two": Plant("layers.0.attn.post", connection((r"2 \* torch", "torch"))),
    "pre_without_eps": Plant(
        "layers.0.attn.pre", connection((r"pre_b\) \+ self\.hc_eps", "pre_b)"))
    ),
    "hc_eps_in_the_norm": Plant(
        "layers.0.attn.pre",
        lambda kinds, _: [setattr(hc.input_norm, "eps", hc.hc_eps) for hc in kinds.connections],
    ),
    "streams_flattened_channel_major": Plant(
        "layers.0.attn.pre", lambda kinds, _: channel_major(kinds)
    ),
    "pre_and_post_swapped": Plant("layers.0.attn.pre", lambda kinds, _: swap_pre_and_post(kinds)),
    "sinkhorn_rows_first": Plant(
        "layers.0.attn.comb",
        connection((r"(\n\s+)(comb = comb / \(comb\.sum\(dim=-2)", rf"\1{ROWS}\1\2"), count=1),
    ),
    "sinkhorn_rows_last": Plant(
        "layers.0.attn.comb", connection((r"(\n\s+)(collapsed = )", rf"\1{ROWS}\1\2"))
    ),
    "sinkhorn_one_iteration_fewer": Plant(
        "layers.0.attn.comb", lambda kinds, _: set_all(kinds.connections, hc_sinkhorn_iters=2)
    ),
    "comb_transposed_where_made": Plant(
        "layers.0.attn.comb", connection((r"return post, comb,", "return post, comb.mT,"))
    ),
    "comb_logits_transposed": Plant(
        "layers.0.attn.comb",
        connection((r"(comb_w \* comb_scale \+ comb_b)", r"(\1).mT")),
    ),
    "streams_summed_at_the_end": Plant(
        "final.mean", lambda kinds, _: rewrite(kinds.text.hc_head, "forward", ("mean", "sum"))
    ),
    "norm_weight_plus_one": Plant(
        "layers.0.attn.norm",
        lambda kinds, _: [change_weight(norm.weight, lambda w: 1 + w) for norm in kinds.norms],
    ),
    "eps_outside_the_root": Plant("layers.0.attn.pre", norms_with_eps_outside),
    "layer_norm_bias_dropped": Plant(
        "layers.1.attn.index_keys",
        lambda kinds, _: change_weight(kinds.indexer.k_norm.bias, torch.zeros_like),
    ),
    "layer_norm_eps_of_torch": Plant(
        "layers.1.attn.index_keys", lambda kinds, _: set_all([kinds.indexer.k_norm], eps=1e-5)
    ),
    "output_gate_silu": Plant(
        "layers.0.attn.kda", lambda kinds, _: set_all(kinds.gated, activation="silu")
    ),
    "padding_not_zeroed": Plant(
        "layers.0.attn.q",
        lambda kinds, _: change_inputs(kinds.kda, lambda kw: {"attention_mask": None}),
    ),
    "query_and_key_taps_swapped": Plant("layers.0.attn.q", taps("kqv")),
    "query_and_value_taps_swapped": Plant("layers.0.attn.q", taps("vkq")),
    "key_and_value_taps_swapped": Plant("layers.0.attn.k", taps("qvk")),
    "taps_reversed": Plant(
        "layers.0.attn.q",
        lambda kinds, _: change_weight(kinds.kda.conv1d.weight, lambda w: w.flip(-1)),
    ),
    "decay_without_sigmoid": Plant("layers.0.attn.g", unbounded_gate_clamped),
    "rate_outside_the_sigmoid": Plant(
        "layers.0.attn.g",
        lambda kinds, _: rewrite(
            kinds.kda.forget_gate,
            "forward",
            (r"torch\.sigmoid\(decay_rate \* g\)", "decay_rate * torch.sigmoid(g)"),
        ),
    ),
    "dt_bias_ignored": Plant(
        "layers.0.attn.g",
        lambda kinds, _: change_weight(kinds.kda.forget_gate.dt_bias, torch.zeros_like),
    ),
    "dt_bias_transposed": Plant(
        "layers.0.attn.g",
        lambda kinds, _: change_weight(
            kinds.kda.forget_gate.dt_bias,
            lambda bias: bias.view(kinds.kda.head_dim, kinds.kda.num_heads).T.flatten(),
        ),
    ),
    "write_strength_of_one": Plant(
        "layers.0.attn.beta",
        lambda kinds, _: change_output(kinds.kda.b_proj, lambda x: torch.full_like(x, 1e3)),
    ),
    "decay_after_the_read": Plant(
        "layers.0.attn.o",
        lambda kinds, _: rewrite(
            kinds.kda, "forward", (r"g=g,", "g=F.pad(g, (0, 0, 0, 0, 1, 0))[:, :-1],")
        ),
    ),
    "l2_eps_as_a_floor": Plant(
        "layers.0.attn.state", l2norm(lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6))
    ),
    "l2_eps_of_a_mean": Plant(
        "layers.0.attn.state",
        l2norm(lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6) * x.shape[-1] ** -0.5),
    ),
    "query_scaled_twice": Plant(
        "layers.0.attn.o",
        lambda kinds, _: rewrite(
            kinds.kda, "forward", (r"self\.o_norm\(", "self.o_norm(self.head_dim**-0.5 * ")
        ),
    ),
    "attention_scaled_by_the_latent": Plant(
        "layers.1.attn.o",
        lambda kinds, _: set_all([kinds.dsa], scaling=kinds.dsa.kv_lora_rank**-0.5),
    ),
    "kv_b_values_first": Plant(
        "layers.1.attn.o",
        lambda kinds, _: each_head(kinds.dsa, lambda w: w.roll(-kinds.dsa.v_head_dim, 1)),
    ),
    "kv_b_keys_of_all_heads_first": Plant(
        "layers.1.attn.o", lambda kinds, _: keys_of_all_heads_first(kinds.dsa)
    ),
    "pools_from_index_zero": Plant("layers.1.attn.pool_keys", no_mask_for_pools),
    "ape_ignored": Plant(
        "layers.1.attn.pool_keys",
        lambda kinds, _: change_weight(kinds.indexer.index_kpool_compress_ape, torch.zeros_like),
    ),
    "pool_gate_ignored": Plant(
        "layers.1.attn.pool_keys",
        lambda kinds, _: change_weight(kinds.indexer.index_kpool_compress_gate, torch.zeros_like),
    ),
    "pool_weights_shared_by_channels": Plant(
        "layers.1.attn.pool_keys",
        lambda kinds, _: [
            change_weight(w, lambda w, axis=axis: w.mean(axis, keepdim=True).expand_as(w))
            for w, axis in (
                (kinds.indexer.index_kpool_compress_ape, 1),
                (kinds.indexer.index_kpool_compress_gate, 0),
            )
        ],
    ),
    "index_weights_absolute": Plant(
        "layers.1.attn.index_scores",
        lambda kinds, _: change_output(kinds.indexer.weights_proj, torch.abs),
    ),
    "index_weights_softmax": Plant(
        "layers.1.attn.index_scores",
        lambda kinds, _: change_output(
            kinds.indexer.weights_proj,
            lambda x: (x * x.shape[-1] ** -0.5).softmax(-1) * x.shape[-1] ** 0.5,
        ),
    ),
    "index_relu_dropped": Plant(
        "layers.1.attn.index_scores", index_scores((r"F\.relu\((.*)\)\n", r"\1\n"))
    ),
    "index_relu_after_the_sum": Plant(
        "layers.1.attn.index_scores",
        index_scores((r"F\.relu\((.*)\)\n", r"\1\n"), (r"\.squeeze\(-2\)", ".squeeze(-2).relu()")),
    ),
    "pool_visible_from_its_first_token": Plant(
        "layers.1.attn.pools",
        index_scores((r"pool_indices\[\.\.\., -1\]\.clamp", "pool_indices[..., 0].clamp")),
    ),
    "tail_dropped": Plant("layers.1.attn.selection", lambda kinds, _: without_tail(kinds.indexer)),
    "every_query_sees_itself": Plant(
        "layers.1.attn.selection",
        lambda kinds, _: change_output(kinds.indexer, query_itself_selected),
    ),
    "clamp_missing": Plant(
        "layers.0.ffn.dense",
        lambda kinds, _: set_all([*kinds.mlps, kinds.experts], swiglu_limit=float("inf")),
    ),
    "gate_clamped_on_both_sides": Plant(
        "layers.0.ffn.dense", swiglu((r"min=None", "min=-self.swiglu_limit"))
    ),
    "clamp_after_silu": Plant(
        "layers.0.ffn.dense",
        swiglu(
            (r"gate = gate\.clamp", "_ = gate.clamp"),
            (r"((self\.act_fn|F\.silu)\(gate\))", r"\1.clamp(max=self.swiglu_limit)"),
        ),
    ),
    "correction_bias_in_the_weights": Plant(
        "layers.1.ffn.router.weights",
        router((r"= scores\.gather", "= (scores + self.e_score_correction_bias).gather")),
    ),
    "correction_bias_ignored": Plant(
        "layers.1.ffn.router.scores",
        lambda kinds, _: change_weight(kinds.router.e_score_correction_bias, torch.zeros_like),
    ),
    "expert_weights_not_scaled": Plant(
        "layers.1.ffn.router.weights",
        lambda kinds, _: set_all([kinds.router], routed_scaling_factor=1.0),
    ),
    "expert_weights_not_normalised": Plant(
        "layers.1.ffn.router.weights",
        lambda kinds, _: set_all([kinds.router], norm_topk_prob=False),
    ),
    "router_softmax": Plant(
        "layers.1.ffn.router.scores",
        router((r"router_logits\.sigmoid\(\)", "router_logits.softmax(-1)")),
    ),
    "expert_groups_ignored": Plant(
        "layers.1.ffn.router.experts",
        router((r"~score_mask\.bool\(\)", "torch.zeros_like(score_mask).bool()")),
    ),
    "groups_ranked_by_their_best_expert": Plant(
        "layers.1.ffn.router.experts", router((r"\.topk\(2,", ".topk(1,"))
    ),
    "router_in_bfloat16": Plant(
        "layers.1.ffn.router.logits",
        router(
            (r"float32", "bfloat16"), (r"router_logits\.sigmoid", "router_logits.float().sigmoid")
        ),
    ),
    "correction_bias_in_bfloat16": Plant(
        "layers.1.ffn.router.scores",
        lambda kinds, _: change_weight(
            kinds.router.e_score_correction_bias, lambda bias: bias.bfloat16().float()
        ),
    ),
    "experts_gate_and_up_swapped": Plant(
        "layers.1.ffn.experts",
        lambda kinds, _: change_weight(
            kinds.experts.gate_up_proj, lambda w: torch.cat(w.chunk(2, dim=1)[::-1], dim=1)
        ),
    ),
    "routed_layer_taken_for_dense": Plant(
        "layers.1.ffn.moe",
        lambda kinds, _: set_all([kinds.moe], forward=kinds.moe.shared_experts.forward),
    ),
}
