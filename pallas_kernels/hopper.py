"""Whether Mosaic GPU kernels written for Hopper can run: on the machine at hand, or interpreted."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

CAPABILITY = "9.0"

_interpreted = contextvars.ContextVar("_interpreted", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it the kernels run on a CPU, step by step and with the race detector on."""
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def interpret() -> bool:
    """Whether a kernel called now is to be interpreted."""
    return _interpreted.get()


def reason_against_jax() -> str | None:
    """Why the kernels cannot run in this release of JAX; None where they can."""
    # 0.10 cannot interpret the kernels, and 0.12.0.1 refuses to compile a store of KDA's.
    if jax.__version_info__[:2] != (0, 11):
        return f"needs JAX 0.11, this is {jax.__version__}"
    return None


def reason_against_device() -> str | None:
    """Why they cannot run on the device at hand; None where they can, or are interpreted."""
    if interpret():
        return None
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:  # compiled for a machine that is not at hand (aot.py)
        kind = device.device_kind
        return None if "H200" in kind or "H100" in kind else f"needs a Hopper GPU, not {kind}"
    if jax.default_backend() != "gpu":
        return f"needs a Hopper GPU, JAX runs on {jax.default_backend()}"
    capability = jax.devices()[0].compute_capability
    return None if capability == CAPABILITY else f"needs a Hopper GPU (9.0), not {capability}"
