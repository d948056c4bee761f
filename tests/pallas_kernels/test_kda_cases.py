"""Every implementation on the same inputs, against the recurrence in NumPy and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import chunk_kda

K, V = 7, 13

run = jax.jit(
    functools.partial(chunk_kda, output_final_state=True), static_argnames="implementation"
)


def relative_l2(ours, truth):
    """Of o and of the state, each by the magnitude of the truth; a zero truth must be met."""
    assert all(np.isfinite(x).all() for x in ours)
    return [
        np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-300)
        for a, b in zip(ours, truth, strict=True)
    ]


def assert_as_exact_as_asked(arguments, cast, exact_kda):
    truth = exact_kda(**arguments)
    with jax.enable_x64(True):
        arguments64 = cast(arguments, jnp.float64)
        for implementation in ("reference", "xla"):
            errors = relative_l2(run(**arguments64, implementation=implementation), truth)
            assert max(errors) < 1e-12, implementation
    with jax.enable_x64(False):
        arguments32 = cast(arguments, jnp.float32)
        reference = relative_l2(run(**arguments32, implementation="reference"), truth)
        ours = relative_l2(run(**arguments32, implementation="xla"), truth)
    assert max(reference) < 5e-6
    assert all(a < max(5e-6, 2 * b) for a, b in zip(ours, reference, strict=True))


def test_every_form_equals_the_exact_recurrence(kda_case, kda_arguments, cast, exact_kda):
    assert_as_exact_as_asked(kda_case.arguments(kda_arguments, K, V), cast, exact_kda)


def test_heads_of_the_kernels_size(kda_arguments, cast, exact_kda):
    arguments = kda_arguments(65, B=1, H=1, K=64, V=128)
    arguments = {name: x.astype(np.float32) for name, x in arguments.items()}
    assert_as_exact_as_asked(arguments, cast, exact_kda)
