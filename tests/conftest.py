"""Settings of the whole test run, which must be made before JAX makes its first array.

CPU only, 64-bit types, which float64 models need, and code that XLA generates in a hurry: nearly
all the time of these tests is compilation, and this way it is a quarter. What the numbers are is
the same, but for the order of sums; tests marked `codegen`, whose results hang on that, run once
more with the code that users run (test_codegen.py). An XLA_FLAGS of one's own, empty or not, holds.
"""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def call() -> Callable[..., Any]:
    """`call(module, *args)` under jit: one compilation for a module and the shapes it is given."""
    jitted = jax.jit(lambda module, *args: module(*args))
    return lambda module, *args: jax.tree.map(np.asarray, jitted(module, *args))


@pytest.fixture(scope="module", autouse=True)
def room_for_code() -> Iterator[None]:
    """Drops what is compiled when it fills the process.

    A process on Linux may have 65,530 mappings, every compiled program takes some, and past the
    last one XLA crashes.
    """
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a GPU where there is none; the last line then counts it."""
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and jax.default_backend() != "gpu":
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if item not in needs_gpu]
