"""Sparse MLA in plain JAX: what it computes, what has no effect on it, its gradients, refusals."""

import functools
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.memory import peak_memory
from pallas_kernels.dispatch import choose
from pallas_kernels.sparse_mla import api, sparse_mla_decode, xla

run = jax.jit(
    functools.partial(sparse_mla_decode, return_lse=True),
    static_argnames=("scale", "implementation"),
)
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


@pytest.fixture(scope="module")
def small_case(mla_arguments):
    """Three tokens of two sequences, the second empty; holes, and NaN where nobody looks."""
    return mla_arguments(W=20, T=3, A=4, R=16, holes=0.3, empty=(1,))


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


def test_bfloat16_rounds_the_weights_and_nothing_else(exact_mla, small_case):
    arguments = cast(small_case, "bfloat16")
    truth = exact_mla(**small_case)
    out, lse = run(**arguments, implementation="xla")
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    assert_within((truth[0], lse), truth, 2e-6)
    assert_within((out, truth[1]), truth, 2**-8)
    assert run(**arguments, implementation="reference")[0].dtype == jnp.bfloat16


def test_index_past_the_last_row_is_none(exact_mla, small_case):
    indices = small_case["indices"].copy()
    indices[..., 5] = small_case["kv"].shape[1]
    indices[..., 9] = 2**31 - 1
    changed = small_case | {"indices": indices}
    for implementation in ("reference", "xla"):
        ours = run(**cast(changed, "float64"), implementation=implementation)
        assert_within(ours, exact_mla(**changed), 1e-13)
    assert np.any(exact_mla(**changed)[0] != exact_mla(**small_case)[0])


def test_a_million_rows_of_which_few_are_touched():
    """Half a gigabyte of address space, of which the test writes and reads 66 rows."""
    S, R, W = 2**20, 128, 67
    rng = np.random.default_rng(0)
    kv = np.frombuffer(mmap.mmap(-1, S * R * 4), np.float32).reshape(1, S, R)
    indices = rng.choice(S, (1, 1, W), replace=False).astype(np.int32)
    indices[0, 0, :3] = 0, S - 1, -1
    kv.flags.writeable = True
    kv[0, indices[indices >= 0]] = rng.standard_normal((W - 1, R))
    q = rng.standard_normal((1, 1, 8, R), np.float32)
    before = peak_memory()
    ours = run(q, jax.device_put(kv), indices, scale=0.1, implementation="xla")
    assert peak_memory() - before < kv.nbytes / 4
    few = np.where(indices < 0, -1, np.arange(W)), kv[0, indices[0, 0]][None]
    for a, b in zip(
        ours, run(q, few[1], few[0], scale=0.1, implementation="reference"), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_neither_all_scores_nor_all_selected_rows_are_in_memory():
    B, T, A, R, S, W = 1, 256, 8, 128, 2**16, 2051
    shapes = (((B, T, A, R), "float32"), ((B, S, R), "float32"), ((B, T, W), "int32"))
    q, kv, indices = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    memory = run.lower(q, kv, indices, scale=0.1).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * min(B * T * A * S, B * T * W * R) / 8


# ---- gradients


def test_gradients_are_those_of_the_definition(small_case, monkeypatch):
    """Through out and lse; holes, an empty token and poisoned rows leave zeros, and no NaN."""
    monkeypatch.setattr(xla, "GATHERED", 2 * 20 * 16)  # a token after the other, in four parts
    arguments = cast(small_case, "float64")
    q, kv, indices, scale = (arguments[name] for name in ("q", "kv", "indices", "scale"))

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(q, kv, implementation):
        def loss(q, kv):
            out, lse = sparse_mla_decode(
                q, kv, indices, scale=scale, return_lse=True, implementation=implementation
            )
            lse = jnp.where(jnp.isneginf(lse), 0, lse)
            return jnp.sum(jnp.cos(jnp.arange(out.size)) * out.ravel()) + jnp.sum(lse**2)

        return jax.grad(loss, (0, 1))(q, kv)

    ours, expected = gradients(q, kv, "xla"), gradients(q, kv, "reference")
    for a, b in zip(ours, expected, strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(a, b, atol=1e-12)
    assert not np.any(np.asarray(ours[0])[:, 1])
    unused = np.isnan(kv).any(-1)
    assert unused.any()
    assert not np.any(np.asarray(ours[1])[unused])
    for a, step in zip(expected, (1e-6, 1e-6), strict=True):
        assert np.abs(a).max() > step


# ---- refusals, and the choice of an implementation


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": np.zeros((2, 3, 4, 16), int)}, TypeError, "floating-point q and kv; q is int64"),
        ({"kv": np.zeros((2, 30, 16), int)}, TypeError, "floating-point q and kv; kv is int64"),
        ({"indices": np.zeros((2, 3, 7))}, TypeError, "signed integer indices, got float64"),
        ({"indices": np.zeros((2, 3, 7), np.uint32)}, TypeError, "signed integer indices"),
        ({"q": np.zeros((2, 3, 16))}, ValueError, r"q \[B, T, A, R\], got \(2, 3, 16\)"),
        ({"kv": np.zeros((2, 30, 8))}, ValueError, r"kv \[2, S, 16\] or \[S, 16\] for q"),
        ({"kv": np.zeros((1, 30, 16))}, ValueError, r"kv \[2, S, 16\] or \[S, 16\] for q"),
        ({"indices": np.zeros((2, 1, 7), int)}, ValueError, r"indices \[2, 3, W\] for q"),
        ({"kv": np.zeros((0, 16))}, ValueError, "a row of kv and an index at least"),
        ({"indices": np.zeros((2, 3, 0), int)}, ValueError, "a row of kv and an index at least"),
        ({"implementation": "triton"}, ValueError, r"'reference', 'xla'\], got 'triton'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changed, error, message):
    arguments = {
        "q": np.zeros((2, 3, 4, 16)),
        "kv": np.zeros((2, 30, 16)),
        "indices": np.zeros((2, 3, 7), int),
    }
    with pytest.raises(error, match=message):
        sparse_mla_decode(**arguments | changed, scale=1.0)


def test_on_a_cpu_xla_is_taken():
    inputs = np.zeros((2, 3, 4, 16)), np.zeros((2, 30, 16)), np.zeros((2, 3, 7), int)
    assert choose("sparse MLA", api.IMPLEMENTATIONS, None, *inputs) is xla.attend
