"""Settings of the whole test run: CPU only, and 64-bit types, which float64 models need.

Both must be set before JAX makes its first array.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def quick_jit() -> Callable[..., Any]:
    """`jax.jit` with LLVM's optimisations off, which are most of the time of these tests."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return functools.partial(jax.jit, compiler_options=options)


@pytest.fixture(scope="session")
def call(quick_jit) -> Callable[..., Any]:
    """`call(module, *args)` under jit: one compilation for a module and the shapes it is given."""
    jitted = quick_jit(lambda module, *args: module(*args))
    return lambda module, *args: jax.tree.map(np.asarray, jitted(module, *args))
