"""Steps of the model that are one compiled call each, and can still be traced."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from glm5_jax.nn.types import Record, note


@jax.tree_util.register_pytree_node_class
class _Sites(dict):
    """Trace sites in the order in which they were recorded; a plain dict would be sorted by jit."""

    def tree_flatten(self):
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(zip(names, values, strict=True))


def compiled(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a step one `jax.jit` call; the arguments named `static` are keywords, and constants.

    The step takes `record` as its last keyword. It is called, with what the step recorded and in
    that order, once the compiled call returns: arrays outside an outer `jax.jit`, tracers inside.
    `step.jitted` is the jitted function.
    """

    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, traced: bool, **options: Any) -> tuple[Any, _Sites]:
            sites = _Sites()
            return step(*args, **options, record=sites.__setitem__ if traced else None), sites

        run.__name__ = step.__name__  # as profiles and logs of compilations call it
        jitted = jax.jit(run, static_argnames=(*static, "traced"))

        @functools.wraps(step)
        def call(*args: Any, record: Record | None = None, **options: Any) -> Any:
            out, sites = jitted(*args, traced=record is not None, **options)
            for name, value in sites.items():
                note(record, name, value)
            return out

        call.jitted = jitted  # type: ignore[attr-defined]
        return call

    return wrap
