"""Looking on: the trace sites of a step, handed out while it runs.

A step takes `record`, None where nobody looks, and calls it at each of its sites. A `Recorder`
looks at some of them: inside a compiled step the others are not outputs, so nothing is computed
for them alone, and what leaves it is reduced already.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax

from glm5_jax.nn.types import Mask

Record: TypeAlias = Callable[[str, jax.Array], None]
"""Called with the name and the value of every trace site."""

Reduce: TypeAlias = Callable[[str, jax.Array, Mask | None], Mapping[str, jax.Array]]
"""From a site's last name, its value and the mask to what is kept of it, by what its name gets
appended. Hashable, and equal where it does the same: it is a constant of compiled steps."""


@dataclass(frozen=True)
class Wanted:
    """Which sites, by their names in the scope that they are called in, and what of them."""

    names: frozenset[str]
    reduce: Reduce

    def within(self, scope: str) -> "Wanted":
        """The sites of an inner scope."""
        at = f"{scope}."
        names = (name.removeprefix(at) for name in self.names if name.startswith(at))
        return replace(self, names=frozenset(names))


@dataclass(frozen=True)
class Recorder:
    """A `Record` that hands on to `take`, reduced, what is `wanted`; `scope` stands before it."""

    take: Record
    wanted: Wanted
    mask: Mask | None = None
    scope: str = ""

    def within(self, scope: str) -> "Recorder":
        """For the sites of an inner scope."""
        return replace(self, wanted=self.wanted.within(scope), scope=f"{self.scope}{scope}.")

    def __call__(self, name: str, value: jax.Array) -> None:
        """Take a site, if it is wanted."""
        if name in self.wanted.names:
            last = name.rpartition(".")[2]
            for part, kept in _reduced(self.wanted.reduce, last, value, self.mask).items():
                self.take(f"{self.scope}{name}{part}", kept)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reduced(
    reduce: Reduce, name: str, value: jax.Array, mask: Mask | None
) -> Mapping[str, jax.Array]:
    return reduce(name, value, mask)


def scoped(record: Record | None, scope: str) -> Record | None:
    """`record` with `scope.` in front of every name."""
    if record is None:
        return None
    if isinstance(record, Recorder):
        return record.within(scope)
    return lambda name, value: record(f"{scope}.{name}", value)


def note(record: Record | None, name: str, value: jax.Array) -> None:
    """`record(name, value)`, where anything is traced."""
    if record is not None:
        record(name, value)


def wants(record: Record | None, name: str) -> bool:
    """Whether a site is to be recorded, for what would be computed for it alone."""
    if isinstance(record, Recorder):
        return name in record.wanted.names
    return record is not None
