"""When the Mosaic GPU kernels of KDA run, and that they compute what they say."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import hopper
from pallas_kernels.kda import chunk_kda, mosaic_gpu

KERNELS = Path(__file__).with_name("kda_kernels.py")


def inputs(dtype=jnp.bfloat16, K=128, V=128, T=3, state=jnp.float32):
    q, v = jnp.zeros((1, T, 1, K), dtype), jnp.zeros((1, T, 1, V), dtype)
    g, beta = jnp.zeros((1, T, 1, K)), jnp.zeros((1, T, 1))
    return q, q, v, g, beta, jnp.zeros((1, 1, K, V), state)


def run_kernel_tests(**environment):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(KERNELS)],
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if jax.__version_info__[:2] == (0, 11):

    def test_kernels_interpreted_on_a_cpu():
        """Correct, free of races and differentiable: the tests in `kda_kernels.py`."""
        run_kernel_tests(JAX_PLATFORMS="cpu", NPROC="8")

    @pytest.mark.gpu
    def test_kernels_on_a_gpu():
        """The same, compiled, with every case at every size (H03 among them)."""
        run_kernel_tests()

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            ({"dtype": jnp.float32}, "needs bfloat16 q, k and v; q is float32, k is float32"),
            ({"state": jnp.float64}, "computes in float32, not in float64"),
            ({"K": 96}, "needs 64 or 128 key and value channels, got 96 and 128"),
            ({"V": 256}, "needs 64 or 128 key and value channels, got 128 and 256"),
            ({"T": 0}, "needs at least one token"),
            ({}, "needs a Hopper GPU, JAX runs on cpu"),
        ],
        ids=str,
    )
    def test_kernels_say_what_they_cannot_run(changed, reason):
        assert mosaic_gpu.supports(*inputs(**changed)).startswith(reason)

    def test_kernels_run_where_they_can():
        with hopper.interpreted():
            for K in (64, 128):
                for V in (64, 128):
                    assert mosaic_gpu.supports(*inputs(K=K, V=V, T=1)) is None


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 12, 0)])
def test_kernels_need_a_jax_that_can_run_them(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    q, k, v, g, beta, _ = inputs()
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: needs JAX 0\.11, this is 0\.1[02]"):
        chunk_kda(q, k, v, g, beta, implementation="mosaic_gpu")
    with hopper.interpreted():
        o, _ = chunk_kda(q, k, v, g, beta)  # falls back
    assert o.dtype == jnp.bfloat16
