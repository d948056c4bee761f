"""Hooks that read the oracle's intermediate arrays under the names of our own sites.

Most sites are the input or the output of a module. What the oracle keeps inside one is read where
it passes: the argument of a function (`chunk_kimi_delta_attention`), a method's result
(`get_pooled_states`), or a call of torch (`topk`; `unsqueeze`, which only `pre` goes through).
Choices are put into the order of ours: experts best first, the tail behind all pools.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from ..errors import TraceError

Sites = dict[str, torch.Tensor]
Wanted = Callable[[str], bool]


class _Watch(TorchFunctionMode):
    """Notes arguments and results of the `functions` that are called while `calls` is a list."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions = functions
        self.calls: list[tuple[tuple, dict, Any]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.calls is not None and func in self.functions:
            self.calls.append((args, kwargs, out))
        return out


@contextmanager
def recording(
    text: Any, layers: range | None = None, wanted: Wanted = lambda name: True
) -> Iterator[Sites]:
    """While open, every forward of the oracle's text model fills the yielded dictionary.

    `layers` limits the hooks, `wanted` what is kept; names are listed in `oracle.oracle_sites`.
    """
    with ExitStack() as stack:
        hooks = _Hooks(stack, wanted)
        for i in layers if layers is not None else range(len(text.layers)):
            hooks.layer(text.layers[i], f"layers.{i}")
        if layers is None:
            hooks.output(text.embed_tokens, "embedding")
            hooks.output(text.hc_head, "final.mean")
            hooks.output(text.norm, "final.norm")
        yield hooks.sites


class _Hooks:
    """The hooks of one recording, which end with `stack`."""

    def __init__(self, stack: ExitStack, wanted: Wanted):
        self.sites: Sites = {}
        self._stack, self._wanted = stack, wanted
        self._topk = stack.enter_context(_Watch(torch.topk, torch.Tensor.topk))
        self._unsqueeze = stack.enter_context(_Watch(torch.Tensor.unsqueeze))
        self._batch: tuple[int, int] = (0, 0)
        # Of the last selection: tokens of pools that it has, and that it may have.
        self._in_pools: tuple[int, int] | None = None
        self._kda: tuple[str, torch.Tensor | None] = ("", None)

    def note(self, name: str, value: torch.Tensor) -> None:
        """Keep a site, if it is wanted."""
        if self._wanted(name):
            self.sites[name] = value

    def after(self, module: torch.nn.Module, keep: Callable[[tuple, Any], None]) -> None:
        """Call `keep` with a module's positional arguments and output."""
        handle = module.register_forward_hook(lambda _m, args, out: keep(args, out))
        self._stack.callback(handle.remove)

    def before(self, module: torch.nn.Module, keep: Callable[[tuple, dict], None]) -> None:
        """Call `keep` with a module's arguments."""
        handle = module.register_forward_pre_hook(
            lambda _m, args, kwargs: keep(args, kwargs), with_kwargs=True
        )
        self._stack.callback(handle.remove)

    def output(self, module: torch.nn.Module, name: str) -> None:
        """Keep a module's output, or the first of several."""
        self.after(module, lambda _a, out: self.note(name, out[0] if type(out) is tuple else out))

    def replaced(self, owner: Any, name: str, step: Callable[..., Any]) -> None:
        """Let `step` stand for the attribute `name` of a module or an object."""
        own = vars(owner).get(name)
        setattr(owner, name, step)
        back = (delattr, owner, name) if own is None else (setattr, owner, name, own)
        self._stack.callback(*back)

    def watched(self, module: torch.nn.Module, watch: _Watch, close: Callable[..., None]) -> None:
        """Call `close` with what `watch` saw inside of a module, and with its output."""
        self.before(module, lambda _a, _k: setattr(watch, "calls", []))

        def end(_args: tuple, out: Any) -> None:
            calls, watch.calls = watch.calls or [], None
            close(calls, out)

        self.after(module, end)

    def layer(self, layer: Any, at: str) -> None:
        """Every site of a decoder layer."""

        def begin(args: tuple, kwargs: dict) -> None:
            streams = args[0] if args else kwargs["hidden_states"]
            self._batch = tuple(streams.shape[:2])
            self.note(f"{at}.in", streams)

        self.before(layer, begin)
        self.connection(layer.attn_hc, f"{at}.attn")
        self.output(layer.input_layernorm, f"{at}.attn.norm")
        mixer = self.kda if layer.block_type == "linear_attention" else self.dsa
        mixer(layer.self_attn, f"{at}.attn")
        self.before(layer.ffn_hc, lambda args, _k: self.note(f"{at}.attn.expand", args[0]))
        self.connection(layer.ffn_hc, f"{at}.ffn")
        self.output(layer.post_attention_layernorm, f"{at}.ffn.norm")
        if hasattr(layer.mlp, "experts"):
            self.output(layer.mlp, f"{at}.ffn.moe")
            self.watched(
                *(layer.mlp.gate, self._topk),
                lambda calls, out: self.router(f"{at}.ffn.router", calls, out),
            )
            self.output(layer.mlp.shared_experts, f"{at}.ffn.shared")
            self.after(
                layer.mlp.experts,
                lambda _a, out: self.note(f"{at}.ffn.experts", self.by_token(out)),
            )
        else:
            self.output(layer.mlp, f"{at}.ffn.dense")
        self.output(layer, f"{at}.ffn.expand")

    def connection(self, connection: Any, at: str) -> None:
        """The coefficients and the input of a sublayer."""

        def close(calls: list, out: tuple) -> None:
            ((pre, *_), _, _), *_ = calls
            for name, value in zip(("pre", "post", "comb", "collapse"), (pre, *out), strict=True):
                self.note(f"{at}.{name}", value)

        self.watched(connection, self._unsqueeze, close)

    def kda(self, attention: Any, at: str) -> None:
        """q, k, v and the state are those of the function that the attention calls."""
        self.output(attention, f"{at}.kda")
        self.output(attention.forget_gate, f"{at}.g")
        self.after(attention.b_proj, lambda _a, out: self.note(f"{at}.beta", out.sigmoid()))
        self.before(attention.o_norm, lambda args, _k: self.note(f"{at}.o", args[0]))

        def begin(_args: tuple, kwargs: dict) -> None:
            self._kda = at, kwargs.get("attention_mask")

        self.before(attention, begin)
        module = sys.modules[type(attention).__module__]
        chunked = module.chunk_kimi_delta_attention
        if not hasattr(chunked, "watched"):

            def watching(*qkv: torch.Tensor, output_final_state: bool, **options: Any) -> Any:
                return self.recurrence(chunked, qkv, output_final_state, options)

            watching.watched = True  # type: ignore[attr-defined]
            self.replaced(module, "chunk_kimi_delta_attention", watching)

    def recurrence(
        self, chunked: Callable[..., Any], qkv: tuple, returned: bool, options: dict
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The oracle's chunked KDA, whose inputs and final state are kept."""
        at, mask = self._kda
        for name, value in zip("qkv", qkv, strict=True):
            self.note(f"{at}.{name}", value)
        o, state = chunked(*qkv, output_final_state=True, **options)
        last = state
        if mask is not None and self._wanted(f"{at}.state") and not mask[:, -1].bool().all():
            # Tokens of zeros still decay its state; ours is the one after the last real token.
            real = mask.bool().flip(1).cumsum(1).bool().flip(1)
            still = {
                "g": options["g"] * real[..., None, None],
                "beta": options["beta"] * real[..., None],
            }
            last = chunked(*qkv, output_final_state=True, **options | still)[1]
        self.note(f"{at}.state", last)
        return o, state if returned else None

    def dsa(self, attention: Any, at: str) -> None:
        """What is attended to, and what chooses it."""
        self.output(attention, f"{at}.dsa")
        self.output(attention.kv_a_layernorm, f"{at}.latent")
        heads = (attention.num_heads, attention.v_head_dim)
        self.before(
            attention.o_proj, lambda args, _k: self.note(f"{at}.o", args[0].unflatten(-1, heads))
        )
        indexer = attention.indexer
        if indexer is None:
            self.before(attention, lambda _a, kw: self.selection(at, kw["prev_topk_indices"]))
            return
        self.output(indexer.k_norm, f"{at}.index_keys")
        pooled = indexer.get_pooled_states

        def pools(*args: Any, **kwargs: Any) -> Any:
            keys, indices, valid = pooled(*args, **kwargs)
            missing = self._batch[1] // indexer.index_kpool - keys.shape[1]
            self.note(f"{at}.pool_keys", pad(keys * valid[..., None], (0, 0, 0, missing)))
            return keys, indices, valid

        self.replaced(indexer, "get_pooled_states", pools)

        def close(calls: list, out: torch.Tensor) -> None:
            (((scores, *_), _, top),) = calls
            lowest = torch.finfo(scores.dtype).min
            self.note(f"{at}.selection.scores", scores)
            self.note(f"{at}.selection.k", torch.tensor(top.indices.shape[-1]))
            available = self._batch[1] // indexer.index_kpool
            candidates = scores.masked_fill(scores == lowest, -torch.inf)
            missing = available - scores.shape[-1]
            self.note(f"{at}.index_scores", pad(candidates, (0, missing), value=-torch.inf))
            chosen = top.indices.masked_fill(top.values == lowest, -1)
            missing = min(indexer.index_topk // indexer.index_kpool, available) - chosen.shape[-1]
            self.note(f"{at}.pools", pad(chosen, (0, missing), value=-1))
            self._in_pools = chosen.shape[-1] * indexer.index_kpool, indexer.index_topk
            self.selection(at, out)

        self.watched(indexer, self._topk, close)

    def selection(self, at: str, out: torch.Tensor) -> None:
        """The chosen tokens, the tail moved behind the last pool that there could be."""
        if self._in_pools is not None:
            there, most = self._in_pools
            tail = out.shape[-1] - most
            pools = pad(out[..., :there], (0, most - there), value=-1)
            out = torch.cat([pools, out[..., there : there + tail]], dim=-1)
        self.note(f"{at}.selection", out)

    def router(self, at: str, calls: list, out: tuple[torch.Tensor, ...]) -> None:
        """The router's choice, best expert first, and what it chose by."""
        if len(calls) != 3:
            raise TraceError(
                f"{at}: expected a router that calls topk 3 times, as transformers' own does, and "
                f"it did so {len(calls)} times"
            )
        # The first topk is the sum of a group's best two: no choice hangs on its order.
        _best_two, ((groups, *_), _, best_groups), ((scores, *_), _, best) = calls
        logits, weights, experts = out
        order = scores.gather(-1, experts).argsort(dim=-1, descending=True, stable=True)
        values = {
            "logits": logits,
            "scores": scores,
            "experts": experts.gather(-1, order),
            "weights": weights.gather(-1, order),
            "groups.scores": groups,
            "experts.scores": scores,
        }
        for name, value in values.items():
            self.note(f"{at}.{name}", self.by_token(value))
        self.note(f"{at}.groups.k", torch.tensor(best_groups.indices.shape[-1]))
        self.note(f"{at}.experts.k", torch.tensor(best.indices.shape[-1]))

    def by_token(self, flat: torch.Tensor) -> torch.Tensor:
        """[B·T, …] as [B, T, …]."""
        return flat.reshape(*self._batch, *flat.shape[1:])
