"""Steps of the model that are one compiled call each, and can still be traced."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from glm5_jax.nn.record import Record, Recorder, Wanted, note
from glm5_jax.nn.types import Mask


@jax.tree_util.register_pytree_node_class
class _Sites(dict):
    """Trace sites in the order in which they were recorded; a plain dict would be sorted by jit."""

    def tree_flatten(self):
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names, values):
        return cls(zip(names, values, strict=True))


def _take(recorder: Recorder, name: str, reduced: jax.Array) -> None:
    recorder.take(f"{recorder.scope}{name}", reduced)


def compiled(
    *static: str, donated: tuple[int, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a step one `jax.jit` call; the arguments named `static` are keywords, and constants.

    What stands at the places `donated` gives its memory to the results, and is gone.

    The step takes `record` as its last keyword. It is called, with what the step recorded and in
    that order, once the compiled call returns: arrays outside an outer `jax.jit`, tracers inside.
    What a `Recorder` does not want is no output of the compiled call, and what it wants is reduced
    in it. `step.jitted` is the jitted function.
    """

    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            *args: Any, wanted: Wanted | bool, real: Mask | None, **options: Any
        ) -> tuple[Any, _Sites]:
            sites = _Sites()
            record: Record | None = sites.__setitem__ if wanted else None
            if isinstance(wanted, Wanted):
                record = Recorder(sites.__setitem__, wanted, real)
            return step(*args, **options, record=record), sites

        run.__name__ = step.__name__  # as profiles and logs of compilations call it
        jitted = jax.jit(run, static_argnames=(*static, "wanted"), donate_argnums=donated)

        @functools.wraps(step)
        def call(*args: Any, record: Record | None = None, **options: Any) -> Any:
            wanted: Wanted | bool = record is not None
            real = None
            if isinstance(record, Recorder):
                # Where it wants nothing, it is the call that nobody looks at.
                wanted = record.wanted if record.wanted.names else False
                real = record.mask if wanted else None
                record = functools.partial(_take, record)
            out, sites = jitted(*args, wanted=wanted, real=real, **options)
            for name, value in sites.items():
                note(record, name, value)
            return out

        call.jitted = jitted  # type: ignore[attr-defined]
        return call

    return wrap
