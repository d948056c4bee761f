"""The model in parts, each of which can be run by itself from numbers that a trace has."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..layer import DecoderLayer, enter_site
from ..model import TextModel, embed, read_out
from ..nn.ffn import Routing, add_shared
from ..nn.mhc import expand
from ..nn.record import Record
from ..skeleton import SkeletonLayer
from ..streaming import LayerStream
from .mistakes import MISTAKES, replaced

# Inputs that are float32 in a bfloat16 model.
_WIDE = ("post", "comb", "weights")


class Part(NamedTuple):
    """Some steps of the model, from the sites that they read to the sites that they give.

    `run(modules(), inputs, mask, constant, record)` calls them. `record` gets names without
    `scope`, so that the parts of one kind are compiled once.
    """

    name: str
    run: Callable[..., None]
    modules: Callable[[], tuple[Any, ...]]
    constant: float | int | None
    scope: str
    reads: tuple[str, ...]
    gives: tuple[str, ...]


def parts_of(model: TextModel | LayerStream) -> list[Part]:
    """The parts of a model in their order; a part reads what earlier ones give, or `tokens`.

    A part ends where the model chooses (experts, tokens): what comes after is run from the choice
    that the other engine made. `layers.i.in` goes by the name of what it equals, the layer
    before's `ffn.expand`. Of a streamed model one layer at a time is in memory.
    """
    if isinstance(model, LayerStream):
        layer_of: Callable[[int], DecoderLayer] = functools.lru_cache(1)(model.layer)
        leaf: Callable[[str], Any] = functools.cache(model.leaf)
    else:
        layer_of, leaf = model.layers.__getitem__, functools.partial(getattr, model)

    def outside(*names: str) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(map(leaf, names))

    eps, M = model.config.rms_norm_eps, model.config.hc_mult
    streams, selection = "layers.0.in", ""
    table, given = outside("embed_tokens"), ("embedding", streams)
    parts = [Part("embedding", _embed, table, M, "", ("tokens",), given)]
    for plan in model.skeleton.layers:
        at = f"layers.{plan.index}."
        if plan.mixer == "dsa" and plan.indexer != "shared":
            selection = f"{at}attn.selection"
        layer = functools.partial(layer_of, plan.index)
        parts += _layer_parts(plan, layer, at, streams, selection, eps)
        streams = f"{at}ffn.expand"
    ends, logits = outside("norm", "lm_head"), ("final.mean", "final.norm", "final.head")
    return [*parts, Part("final", _final, ends, eps, "", (streams,), logits)]


def _layer_parts(
    plan: SkeletonLayer,
    layer: Callable[[], Any],
    at: str,
    streams: str,
    selection: str,
    eps: float,
) -> Iterator[Part]:
    attn, ffn = f"{at}attn.", f"{at}ffn."

    def of_layer(*paths: str) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(operator.attrgetter(path)(layer()) for path in paths)

    def gives(scope: str, names: str) -> tuple[str, ...]:
        return tuple(scope + name for name in names.split())

    def enter(site: str, scope: str, streams: str) -> Part:
        modules = of_layer(f"{site}_hc", f"{site}_norm")
        given = gives(scope, "pre post comb collapse norm")
        return Part(f"{scope}connection", _enter, modules, eps, scope, (streams,), given)

    def leave(scope: str, streams: str, sublayer: str) -> Part:
        reads = (scope + sublayer, streams, f"{scope}post", f"{scope}comb")
        return Part(f"{scope}expand", _expand, tuple, None, scope, reads, (f"{scope}expand",))

    yield enter("attn", attn, streams)
    x, mixer = f"{attn}norm", of_layer("attn")
    if plan.mixer == "kda":
        given = gives(attn, "q k v g beta state o kda")
        yield Part(f"{attn}kda", _kda, mixer, None, attn, (x,), given)
    else:
        if plan.indexer != "shared":
            given = gives(attn, "index_keys pool_keys index_scores pools selection")
            yield Part(f"{attn}indexer", _indexer, mixer, None, attn, (x,), given)
        given = gives(attn, "latent o dsa")
        yield Part(f"{attn}attention", _attention, mixer, None, attn, (x, selection), given)
    yield leave(attn, streams, plan.mixer)

    streams, x = f"{attn}expand", f"{ffn}norm"
    yield enter("ffn", ffn, streams)
    if plan.mlp == "moe":
        given = gives(f"{ffn}router.", "logits scores experts weights")
        router = of_layer("ffn.router")
        yield Part(f"{ffn}router", _router, router, None, f"{ffn}router.", (x,), given)
        reads = (x, f"{ffn}router.experts", f"{ffn}router.weights")
        experts = of_layer("ffn.experts", "ffn.shared")
        given = gives(ffn, "experts shared moe")
        yield Part(f"{ffn}experts", _experts, experts, None, ffn, reads, given)
    else:
        yield Part(f"{ffn}dense", _dense, of_layer("ffn"), None, ffn, (x,), (f"{ffn}dense",))
    yield leave(ffn, streams, plan.mlp)


def run_part(
    part: Part, values: Mapping[str, Any], mask: np.ndarray, dtype: Any, mistake: str | None = None
) -> dict[str, jax.Array]:
    """The sites that a part gives from `values`, in a dtype and perhaps with a mistake."""
    steps = {}
    if mistake is not None:
        steps[MISTAKES[mistake].step] = MISTAKES[mistake].replacement
    run = _compiled(part.run, mistake)
    with replaced(steps):
        sites = run(part.modules(), _inputs(part, values, dtype), mask, part.constant)
    return {part.scope + name: value for name, value in sites.items()}


@functools.cache
def _compiled(run: Callable[..., None], mistake: str | None) -> Callable[..., dict[str, jax.Array]]:
    """A function of its own for each mistake in a part: none is run that was compiled without."""

    def sites_of(modules: Any, inputs: Any, mask: Any, constant: Any) -> dict[str, jax.Array]:
        sites: dict[str, jax.Array] = {}
        run(modules, inputs, mask, constant, sites.__setitem__)
        return sites

    return jax.jit(sites_of, static_argnums=3)


def mistakes_in(part: Part, values: Mapping[str, Any], mask: np.ndarray) -> tuple[str, ...]:
    """The mistakes that can be made in a part: those in the steps that it calls."""
    modules = part.modules()
    key = (part.run, jax.tree.structure(modules))
    if key not in _CALLED:
        _CALLED[key] = _steps_called(part, modules, values, mask)
    return tuple(name for name, mistake in MISTAKES.items() if mistake.step in _CALLED[key])


_CALLED: dict[Any, set[Callable[..., Any]]] = {}


def _steps_called(
    part: Part, modules: tuple[Any, ...], values: Mapping[str, Any], mask: np.ndarray
) -> set[Callable[..., Any]]:
    called = set()

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(step)
            return step(*args, **kwargs)

        return call

    def run(modules: Any, inputs: Any, mask: Any) -> None:
        part.run(modules, inputs, mask, part.constant, lambda name, value: None)

    with replaced({mistake.step: watched(mistake.step) for mistake in MISTAKES.values()}):
        jax.eval_shape(run, modules, _inputs(part, values, jnp.float32), mask)
    return called


def _inputs(part: Part, values: Mapping[str, Any], dtype: Any) -> tuple[Any, ...]:
    def cast(name: str) -> Any:
        value = values[name]
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        is_wide = name.rpartition(".")[2] in _WIDE
        return value.astype(jnp.promote_types(jnp.float32, dtype) if is_wide else dtype)

    return tuple(cast(name) for name in part.reads)


# What parts run. Nothing here is compiled by itself: it would keep the steps that it was compiled
# with.


def _embed(modules, inputs, mask, streams, record: Record):
    x = embed(modules[0][...], inputs[0])
    record("embedding", x)
    shape = (*x.shape[:2], streams, x.shape[2])
    record("layers.0.in", jnp.broadcast_to(x[:, :, None], shape))


def _enter(modules, inputs, mask, eps, record: Record):
    (hc, norm), (streams,) = modules, inputs
    enter_site(hc, norm, eps, streams, record)


def _expand(modules, inputs, mask, _, record: Record):
    record("expand", expand(*inputs))


def _kda(modules, inputs, mask, _, record: Record):
    # Token by token compiles in a quarter of the time that chunks take.
    implementation = "reference" if mask.shape[1] <= 256 else None
    record("kda", modules[0](*inputs, mask, record, implementation))


def _indexer(modules, inputs, mask, _, record: Record):
    modules[0](*inputs, mask, None, record)


def _attention(modules, inputs, mask, _, record: Record):
    x, selection = inputs
    # The form that has keys and values, which mistakes are made in.
    record("dsa", modules[0](x, mask, selection, record, "reference")[0])


def _router(modules, inputs, mask, _, record: Record):
    modules[0](*inputs, record)


def _experts(modules, inputs, mask, _, record: Record):
    experts, shared = modules
    x, *routing = inputs
    record("moe", add_shared(shared, x, experts(x, Routing(*routing)), record))


def _dense(modules, inputs, mask, _, record: Record):
    record("dense", modules[0](*inputs))


def _final(modules, inputs, mask, eps, record: Record):
    norm, lm_head = modules
    step = inspect.unwrap(read_out)  # without its jax.jit
    step(*inputs, norm[...], lm_head[...], eps=eps, record=record)
