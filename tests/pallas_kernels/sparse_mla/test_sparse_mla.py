"""Sparse MLA in plain JAX: what it computes, what has no effect on it, its gradients, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import sparse_mla_decode

run = jax.jit(
    functools.partial(sparse_mla_decode, return_lse=True),
    static_argnames=("scale", "implementation"),
)
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


def cast(arguments, dtype):
    return arguments | {name: jnp.asarray(arguments[name], dtype) for name in ("q", "kv")}


def assert_within(ours, truth, tolerance):
    """out within `tolerance` of its own largest magnitude, lse of its own scale; none exactly."""
    for a, b in zip(ours, truth, strict=True):
        a, some = np.asarray(a, np.float64), np.isfinite(b)
        np.testing.assert_array_equal(a[~some], b[~some])
        scale = max(np.abs(b[some]).max(initial=0), 1.0)
        np.testing.assert_allclose(a[some], b[some], rtol=0, atol=tolerance * scale)
    empty = np.isneginf(truth[1])
    np.testing.assert_array_equal(np.asarray(ours[0])[empty], 0)


@both
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 2e-6)])
def test_every_case_is_that_of_the_definition(
    mla_case, exact_mla, implementation, dtype, tolerance
):
    arguments = mla_case.arguments()
    ours = run(**cast(arguments, dtype), implementation=implementation)
    assert ours[0].dtype == ours[1].dtype == dtype
    assert_within(ours, exact_mla(**arguments), tolerance)
