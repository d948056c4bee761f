"""What a planted mistake is, and how it takes the place of the step that it gets wrong."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

import glm5_jax.model  # noqa: F401  every module whose steps can be replaced


@dataclass(frozen=True)
class Mistake:
    """A wrong version, `replacement`, of the function `step` of `nn` or `pallas_kernels`."""

    name: str
    description: str
    step: Callable[..., Any]
    replacement: Callable[..., Any]


MISTAKES: dict[str, Mistake] = {}


def instead_of(step: Any) -> Callable[[Any], Any]:
    """Register what follows as a mistake in `step`, under its own name and docstring."""

    def register(replacement: Any) -> Any:
        name = replacement.__name__
        description = " ".join(replacement.__doc__.split())
        MISTAKES[name] = Mistake(name, description, step, replacement)
        return replacement

    return register


@contextmanager
def planted(name: str) -> Iterator[Mistake]:
    """Make the mistake of that name wherever its step is called, while the context lasts.

    JAX's caches are cleared before and after, so that no function compiled without the mistake is
    called with it, or the other way round. Raises KeyError for a name that `MISTAKES` lacks.
    """
    mistake = MISTAKES[name]
    with replaced({mistake.step: mistake.replacement}):
        jax.clear_caches()
        try:
            yield mistake
        finally:
            jax.clear_caches()


@contextmanager
def replaced(steps: dict[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Call another function wherever a step is called, while the context lasts.

    What is compiled stays: only for functions that are compiled in this context and nowhere else.
    """
    bindings = {step: list(_bindings(step)) for step in steps}
    _bind((places, steps[step]) for step, places in bindings.items())
    try:
        yield
    finally:
        _bind((places, step) for step, places in bindings.items())


def _bindings(step: Any) -> Iterator[tuple[ModuleType, str]]:
    """Every global name of our modules that means `step`: `from … import` makes copies.

    Those of the catalogue go on meaning the right one.
    """
    for name, module in list(sys.modules.items()):
        ours = name.startswith(("glm5_jax.", "pallas_kernels."))
        if ours and not name.startswith("glm5_jax.numerics.mistakes"):
            yield from ((module, key) for key, value in vars(module).items() if value is step)


def _bind(bindings: Iterable[tuple[list[tuple[ModuleType, str]], Any]]) -> None:
    for places, step in bindings:
        for module, name in places:
            setattr(module, name, step)
