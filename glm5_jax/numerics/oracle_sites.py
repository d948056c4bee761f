"""Hooks that read the oracle's intermediate arrays under the names of our residual plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Sites = dict[str, torch.Tensor]


class _TopK(TorchFunctionMode):
    """Notes the scores and width of every `topk` that the watched module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, int]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.calls is not None and func in (torch.topk, torch.Tensor.topk):
            k = kwargs["k"] if "k" in kwargs else args[1]
            self.calls.append((args[0], int(k)))
        return func(*args, **kwargs)


@contextmanager
def recording(text: Any, layers: range | None = None) -> Iterator[Sites]:
    """While open, every forward of the oracle's text model fills the yielded dictionary.

    `layers` limits the hooks; the names are listed in `oracle.oracle_sites`.
    """
    sites: Sites = {}
    topk = _TopK()
    with ExitStack() as stack:
        stack.enter_context(topk)

        def after(module: torch.nn.Module, keep: Callable[[tuple, Any], None]) -> None:
            handle = module.register_forward_hook(lambda _m, args, out: keep(args, out))
            stack.callback(handle.remove)

        def before(module: torch.nn.Module, keep: Callable[[tuple], None]) -> None:
            def hook(_m: torch.nn.Module, args: tuple, kwargs: dict) -> None:
                keep(args or tuple(kwargs.values()))

            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

        def output(module: torch.nn.Module, name: str) -> None:
            def keep(_args: tuple, out: Any) -> None:
                sites[name] = out[0] if isinstance(out, tuple) else out

            after(module, keep)

        for i in layers if layers is not None else range(len(text.layers)):
            _hook_layer(text.layers[i], f"layers.{i}", sites, topk, before, after, output)
        if layers is None:
            output(text.embed_tokens, "embedding")
            output(text.hc_head, "final.mean")
            output(text.norm, "final.norm")
        yield sites


def _hook_layer(
    layer: Any, at: str, sites: Sites, topk: _TopK, before: Any, after: Any, output: Any
) -> None:
    before(layer, lambda args: sites.update({f"{at}.in": args[0]}))
    _hook_connection(layer.attn_hc, f"{at}.attn", sites, after)
    output(layer.input_layernorm, f"{at}.attn.norm")
    attention = layer.self_attn
    if layer.block_type == "linear_attention":
        output(attention, f"{at}.attn.kda")
        output(attention.forget_gate, f"{at}.attn.g")
        after(attention.b_proj, lambda _a, out: sites.update({f"{at}.attn.beta": out.sigmoid()}))
        before(attention.o_norm, lambda args: sites.update({f"{at}.attn.o": args[0]}))
    else:
        output(attention, f"{at}.attn.dsa")
        output(attention.kv_a_layernorm, f"{at}.attn.latent")
        heads = (attention.num_heads, attention.v_head_dim)
        before(
            attention.o_proj,
            lambda args: sites.update({f"{at}.attn.o": args[0].unflatten(-1, heads)}),
        )
        if attention.indexer is not None:
            _hook_indexer(attention.indexer, f"{at}.attn.selection", sites, topk, before, after)
    before(layer.ffn_hc, lambda args: sites.update({f"{at}.attn.expand": args[0]}))
    _hook_connection(layer.ffn_hc, f"{at}.ffn", sites, after)
    output(layer.post_attention_layernorm, f"{at}.ffn.norm")
    if hasattr(layer.mlp, "experts"):
        output(layer.mlp, f"{at}.ffn.moe")
        _hook_router(layer.mlp.gate, f"{at}.ffn.router", sites, topk, before, after, f"{at}.in")
        output(layer.mlp.shared_experts, f"{at}.ffn.shared")

        def routed(_args: tuple, out: torch.Tensor) -> None:
            sites[f"{at}.ffn.experts"] = _per_token(out, sites[f"{at}.in"])

        after(layer.mlp.experts, routed)
    else:
        output(layer.mlp, f"{at}.ffn.dense")
    output(layer, f"{at}.ffn.expand")


def _per_token(flat: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    return flat.reshape(*streams.shape[:2], *flat.shape[1:])


def _hook_connection(connection: Any, at: str, sites: Sites, after: Any) -> None:
    names = (f"{at}.post", f"{at}.comb", f"{at}.collapse")
    after(connection, lambda _a, out: sites.update(zip(names, out, strict=True)))


def _hook_indexer(
    indexer: Any, at: str, sites: Sites, topk: _TopK, before: Any, after: Any
) -> None:
    def close(_args: tuple, out: torch.Tensor) -> None:
        ((scores, k),), topk.calls = topk.calls or [], None
        sites.update({at: out, f"{at}.scores": scores, f"{at}.k": torch.tensor(k)})

    before(indexer, lambda _args: setattr(topk, "calls", []))
    after(indexer, close)


def _hook_router(
    router: Any, at: str, sites: Sites, topk: _TopK, before: Any, after: Any, streams: str
) -> None:
    def close(_args: tuple, out: tuple[torch.Tensor, ...]) -> None:
        # The first topk is the sum of a group's best two: no choice hangs on its order.
        (_best_two, (groups, groups_k), (biased, k)), topk.calls = topk.calls or [], None
        logits, weights, experts = out
        values = {"logits": logits, "weights": weights, "experts": experts}
        values |= {"groups.scores": groups, "experts.scores": biased}
        sites.update({f"{at}.{n}": _per_token(v, sites[streams]) for n, v in values.items()})
        sites[f"{at}.groups.k"], sites[f"{at}.experts.k"] = torch.tensor(groups_k), torch.tensor(k)

    before(router, lambda _args: setattr(topk, "calls", []))
    after(router, close)
