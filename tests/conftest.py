"""Settings of the whole test run: CPU only, and 64-bit types, which float64 models need.

Both must be set before JAX makes its first array.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax

jax.config.update("jax_enable_x64", True)
