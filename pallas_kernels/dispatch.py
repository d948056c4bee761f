"""The choice between implementations of an operation: by name, in order, or whichever can run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Implementation(NamedTuple):
    """One way to compute an operation; its `api.py` says what `run` takes and returns.

    `supports(*inputs)` is the reason why `run` cannot take inputs of these shapes and dtypes on the
    machine at hand, or None where it can.
    """

    run: Callable[..., Any]
    supports: Callable[..., str | None] = lambda *inputs: None


def choose(
    operation: str,
    implementations: Mapping[str, Implementation],
    names: str | Sequence[str] | None,
    *inputs: Any,
) -> Callable[..., Any]:
    """What runs: the first that can of `names`, or of all `implementations` where that is None.

    Raises:
      ValueError: a name that is not among the implementations, or none at all.
      NotImplementedError: none of them can run; the message says why, for each.
    """
    asked = tuple(implementations) if names is None else names
    asked = (asked,) if isinstance(asked, str) else tuple(asked)
    if not asked or not set(asked) <= implementations.keys():
        known = sorted(implementations)
        raise ValueError(f"implementation must be None or from {known}, got {names!r}")
    reasons = []
    for name in asked:
        reason = implementations[name].supports(*inputs)
        if reason is None:
            return implementations[name].run
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"{operation} cannot run as asked: " + "; ".join(reasons))
