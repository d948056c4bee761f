"""Every implementation against the recurrence: the table of cases, and what no table holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kda import chunk_kda, recurrent_kda

T = 130  # whole chunks and two tokens more; most tests share its compilation

run = jax.jit(
    functools.partial(chunk_kda, output_final_state=True), static_argnames="implementation"
)
chunked = functools.partial(run, implementation="xla")
recurrence = functools.partial(run, implementation="reference")
step = jax.jit(recurrent_kda, static_argnames="implementation")


@pytest.fixture(scope="session")
def assert_exact(cast, exact_kda, relative_l2):
    """Both forms in float64, and the chunked one in float32 where the recurrence itself rounds."""

    def compare(arguments):
        arguments = {
            name: x.astype(np.float32) if x.dtype == np.float64 else x
            for name, x in arguments.items()
        }
        truth = exact_kda(**arguments)
        with jax.enable_x64(True):
            arguments64 = cast(arguments, jnp.float64)
            for implementation in ("reference", "xla"):
                errors = relative_l2(run(**arguments64, implementation=implementation), truth)
                assert max(errors) < 1e-12, implementation
        with jax.enable_x64(False):
            arguments32 = cast(arguments, jnp.float32)
            ours, reference = (relative_l2(f(**arguments32), truth) for f in (chunked, recurrence))
        assert max(reference) < 5e-6
        assert all(a < max(1e-6, 2 * b) for a, b in zip(ours, reference, strict=True))

    return compare


def test_table_of_cases(kda_case, kda_arguments, assert_exact):
    assert_exact(kda_case.arguments(kda_arguments, K=7, V=13))


def test_decoding_goes_on_from_the_state_of_a_short_last_chunk(
    float64, kda_case, kda_arguments, cast, exact_kda, relative_l2
):
    # A state that missed the last token, or decayed for the padding, shows in the next output.
    arguments = kda_case.arguments(kda_arguments, K=7, V=13)
    _, state = chunked(**cast(arguments, jnp.float64))
    token = kda_arguments(1, kda_case.B, kda_case.H, 7, 13, seed=1)
    token["initial_state"] = exact_kda(**arguments)[1]
    truth = exact_kda(**token)
    del token["initial_state"]
    decoded = step(**cast(token, jnp.float64), state=state, implementation="xla")
    assert max(relative_l2(decoded, truth)) < 1e-12


def test_heads_of_the_kernels_size(kda_arguments, assert_exact):
    assert_exact(kda_arguments(65, B=1, H=1, K=64, V=128))


@pytest.mark.parametrize("g", [-50.0, -200.0, -1e30, -np.inf, "-1e4 beside -1e-3"])
def test_no_gate_is_too_strong(kda_arguments, assert_exact, g):
    arguments = kda_arguments(T)
    shape = arguments["g"].shape
    if isinstance(g, str):
        g = np.where(np.random.default_rng(5).random(shape) < 0.1, -1e4, -1e-3)
    assert_exact(arguments | {"g": np.broadcast_to(g, shape)})


@pytest.mark.parametrize("g", [0.0, -1e-4, -0.1, -5.0])
@pytest.mark.parametrize("sign", ["parallel", "antiparallel"])
@pytest.mark.codegen
def test_nearly_parallel_keys_with_beta_near_one_stay_accurate(
    kda_arguments, assert_exact, g, sign
):
    arguments = kda_arguments(T, g=g, beta=0.9999)
    k = arguments["k"]
    k = k[:, :1] + 1e-4 * k
    if sign == "antiparallel":
        k = k * np.where(np.arange(T) % 3, 1.0, -1.0)[:, None, None]
    assert_exact(arguments | {"k": k})


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    decay=st.floats(-6, 4),
    spread=st.floats(-6, 1),
    beta=st.floats(0, 1),
)
def test_chunked_equals_recurrence_for_any_admissible_input(
    kda_arguments, cast, seed, decay, spread, beta, assert_same
):
    arguments = kda_arguments(T, seed=seed)
    rng = np.random.default_rng(seed)
    # Decays over several decades in one chunk, keys from parallel to unrelated, one side of beta.
    arguments["g"] = -(10.0 ** (decay + rng.normal(size=arguments["g"].shape)))
    arguments["k"] = arguments["k"][:, :1] + 10.0**spread * arguments["k"]
    arguments["beta"] = beta + (1 - beta) * arguments["beta"]
    with jax.enable_x64(True):
        arguments = cast(arguments, jnp.float64)
        truth = recurrence(**arguments)
        assert_same(chunked(**arguments), truth, 1e-11)


@pytest.mark.parametrize(
    "lengths", [(1, 127), (63, 65), (64, 64), (127, 1), (15, 16, 17, 16, 64)], ids=str
)
def test_a_sequence_may_be_split_anywhere(float64, kda_arguments, cast, lengths, assert_same):
    arguments = cast(kda_arguments(128), jnp.float64)
    whole = chunked(**arguments)
    state = arguments.pop("initial_state")
    outputs, start = [], 0
    for length in lengths:
        piece = {name: x[:, start : start + length] for name, x in arguments.items()}
        o, state = chunked(**piece, initial_state=state)
        outputs.append(o)
        start += length
    assert_same((jnp.concatenate(outputs, axis=1), state), whole, 1e-12)


def test_decoding_token_by_token_equals_the_whole_sequence(
    float64, kda_arguments, cast, assert_same
):
    arguments = cast(kda_arguments(65), jnp.float64)
    whole = chunked(**arguments)
    state = arguments.pop("initial_state")
    outputs = []
    for t in range(65):
        token = {name: x[:, t : t + 1] for name, x in arguments.items()}
        o, state = step(**token, state=state, implementation="xla")
        outputs.append(o)
    assert_same((jnp.concatenate(outputs, axis=1), state), whole, 1e-12)
