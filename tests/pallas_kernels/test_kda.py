"""What KDA is, by hand; its dtypes; the choice of an implementation."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels.dispatch import choose
from pallas_kernels.kda import api, chunk_kda, recurrent_kda

run = jax.jit(
    functools.partial(chunk_kda, output_final_state=True), static_argnames="implementation"
)
both = pytest.mark.parametrize("implementation", ["reference", "xla"])

# The recurrence, by hand.


@both
def test_first_token_returns_its_value_times_the_scale(float64, implementation):
    K = 16
    e1 = jnp.zeros((1, 1, 1, K)).at[..., 0].set(1.0)
    o, _ = chunk_kda(
        e1,
        e1,
        jnp.ones((1, 1, 1, 3)),
        jnp.full((1, 1, 1, K), -3.0),
        jnp.ones((1, 1, 1)),
        implementation=implementation,
    )
    # Two normalisations of a unit vector, each with 1e-6 under the root; the scale once.
    assert_allclose(o, np.full((1, 1, 1, 3), K**-0.5 / (1 + 1e-6)), rtol=1e-12)


@both
def test_state_decays_before_the_key_reads_it(float64, implementation):
    one = jnp.ones((1, 2, 1, 1))
    o, state = chunk_kda(
        one,
        one,
        jnp.array([4.0, 3.0]).reshape(1, 2, 1, 1),
        jnp.log(0.5) * one,
        jnp.full((1, 2, 1), 0.5),
        scale=1.0,
        use_qk_l2norm=False,
        initial_state=jnp.full((1, 1, 1, 1), 4.0),
        output_final_state=True,
        implementation=implementation,
    )
    # 4 → 2, + (4 − 2) / 2 = 3; 3 → 1.5, + (3 − 1.5) / 2 = 2.25. Read first: 3, then 1.5 in place.
    assert_allclose(o.ravel(), [3.0, 2.25], rtol=1e-14)
    assert_allclose(state.ravel(), [2.25], rtol=1e-14)


@both
def test_state_is_keys_by_values(float64, implementation):
    state = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    o, new = recurrent_kda(
        jnp.array([1.0, 10.0]).reshape(1, 1, 1, 2),
        jnp.zeros((1, 1, 1, 2)),
        jnp.ones((1, 1, 1, 3)),
        jnp.log(jnp.array([0.5, 0.25])).reshape(1, 1, 1, 2),
        jnp.ones((1, 1, 1)),
        state[None, None],
        scale=1.0,
        use_qk_l2norm=False,
        implementation=implementation,
    )
    assert_allclose(new[0, 0], [[0.5, 1.0, 1.5], [1.0, 1.25, 1.5]], rtol=1e-14)
    assert_allclose(o[0, 0, 0], [10.5, 13.5, 16.5], rtol=1e-14)


@both
def test_a_key_written_with_beta_one_reads_back_its_value(float64, implementation):
    keys = jnp.eye(4)[jnp.array([0, 1, 0, 2])].reshape(1, 4, 1, 4)
    values = jnp.arange(1.0, 9.0).reshape(1, 4, 1, 2)
    _, state = chunk_kda(
        keys,
        keys,
        values,
        jnp.zeros((1, 4, 1, 4)),
        jnp.ones((1, 4, 1)),
        use_qk_l2norm=False,
        output_final_state=True,
        implementation=implementation,
    )
    # The third token replaces what the first stored under the same key.
    assert_allclose(state[0, 0], [[5, 6], [3, 4], [7, 8], [0, 0]], atol=1e-14)


def test_reference_equals_the_oracle(kda_arguments, cast, float32, assert_same):
    torch = pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    arguments = kda_arguments(130)
    ours = run(implementation="reference", **cast(arguments, jnp.float32))
    q, k, v, g, beta, state = (torch.tensor(x, dtype=torch.float32) for x in arguments.values())
    o, state = oracle.recurrent_kimi_delta_attention(q, k, v, g, beta, state, True, True)
    assert_same(ours, (o.numpy(), state.numpy()), 1e-6)


@both
def test_without_initial_state_starts_from_zeros(
    float64, kda_arguments, cast, implementation, assert_same
):
    arguments = cast(kda_arguments(3, initial_state=0.0), jnp.float64)
    from_zeros = run(**arguments, implementation=implementation)
    del arguments["initial_state"]
    assert_same(run(**arguments, implementation=implementation), from_zeros, 0)


def test_no_tokens_leave_the_state(float64, kda_arguments, cast):
    arguments = cast(kda_arguments(0), jnp.float64)
    o, state = chunk_kda(**arguments, output_final_state=True)
    assert o.shape == (2, 0, 2, 12)
    assert_array_equal(state, arguments["initial_state"])


# Dtypes, batches, transformations.


@both
def test_bfloat16_inputs_compute_in_float32(float32, kda_arguments, cast, implementation):
    arguments = cast(kda_arguments(130), jnp.bfloat16)
    o, state = run(**arguments, implementation=implementation)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)

    widened = cast(arguments, jnp.float32)
    o32, state32 = run(**widened, implementation=implementation)
    assert_array_equal(o, o32.astype(jnp.bfloat16))
    assert_array_equal(state, state32)


def test_output_follows_the_values_and_the_state_never_narrows(float32, kda_arguments, cast):
    arguments = cast(kda_arguments(1), jnp.float32)
    arguments["v"] = arguments["v"].astype(jnp.bfloat16)
    o, state = run(implementation="xla", **arguments)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    with jax.enable_x64(True):
        o, state = run(implementation="xla", **cast(arguments, jnp.float64))
        assert (o.dtype, state.dtype) == (jnp.float64, jnp.float64)


@pytest.mark.codegen
def test_rows_do_not_depend_on_their_batch(float32, kda_arguments, cast):
    one = cast(kda_arguments(130, B=1), jnp.float32)
    eight = {name: jnp.repeat(x, 8, axis=0) for name, x in one.items()}
    for repeated, single in zip(
        run(implementation="xla", **eight), run(implementation="xla", **one), strict=True
    ):
        assert_array_equal(repeated, jnp.broadcast_to(repeated[:1], repeated.shape))
        assert_allclose(repeated[:1], single, rtol=0, atol=2e-6 * np.abs(single).max())


def test_vmap_adds_an_axis(float64, kda_arguments, cast, assert_same):
    stacked = [cast(kda_arguments(3, seed=seed), jnp.float64) for seed in range(2)]
    mapped = jax.vmap(lambda x: run(implementation="xla", **x))(
        jax.tree.map(lambda *x: jnp.stack(x), *stacked)
    )
    each = jax.tree.map(lambda *x: jnp.stack(x), *(run(implementation="xla", **x) for x in stacked))
    assert_same(mapped, each, 1e-13)


@pytest.mark.parametrize("B", [1, 2])
def test_decoding_updates_a_donated_state_in_place(float32, kda_arguments, cast, B):
    token = cast(kda_arguments(1, B=B, K=32, V=32), jnp.float32)
    state = token.pop("initial_state")
    decode = jax.jit(recurrent_kda, donate_argnames="state")
    memory = decode.lower(**token, state=state).compile().memory_analysis()
    assert memory.alias_size_in_bytes == state.nbytes
    assert memory.temp_size_in_bytes < state.nbytes  # no second copy on the way either


# The choice of an implementation, and refusals.


@pytest.fixture
def choices(monkeypatch):
    """Three implementations by name, of which the first cannot run, and what ran."""
    ran = []

    def implementation(name, reason):
        def run(*inputs, **options):
            ran.append(name)
            return api.IMPLEMENTATIONS["reference"].run(*inputs, **options)

        return api.Implementation(run, lambda q, *inputs: reason and f"{reason} {q.shape[1]}")

    table = {"first": "cannot do T =", "second": None, "third": None}
    reference = api.IMPLEMENTATIONS["reference"]
    made = {name: implementation(name, reason) for name, reason in table.items()}
    monkeypatch.setattr(api, "IMPLEMENTATIONS", made | {"reference": reference})
    return ran


def test_none_takes_the_first_that_can_run(choices, kda_arguments):
    chunk_kda(**kda_arguments(3))
    assert choices == ["second"]


def test_sequence_of_implementations_falls_back_in_order(choices, kda_arguments):
    chunk_kda(**kda_arguments(3), implementation=("first", "third", "second"))
    assert choices == ["third"]


def test_forced_implementation_that_cannot_run_says_why(choices, kda_arguments):
    for name in ("first", ("first",)):
        with pytest.raises(NotImplementedError, match="first: cannot do T = 3"):
            chunk_kda(**kda_arguments(3), implementation=name)
    assert choices == []


def test_unknown_implementation_is_refused_with_the_known_names(kda_arguments):
    for name in ("triton", ("xla", "triton"), ()):
        with pytest.raises(ValueError, match=r"'reference', 'xla'\]"):
            chunk_kda(**kda_arguments(1), implementation=name)


def test_on_a_cpu_xla_is_taken(kda_arguments):
    inputs = [jnp.asarray(x) for x in kda_arguments(1).values()]
    assert choose("KDA", api.IMPLEMENTATIONS, None, *inputs) is api.IMPLEMENTATIONS["xla"].run


def test_final_state_is_none_unless_asked_for(kda_arguments):
    o, state = chunk_kda(**kda_arguments(1))
    assert o.shape == (2, 1, 2, 12)
    assert state is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("k", (2, 3, 2, 9)),
        ("g", (2, 3, 2)),
        ("beta", (2, 3, 2, 1)),
        ("initial_state", (2, 2, 12, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_named(kda_arguments, name, shape):
    arguments = kda_arguments(3) | {name: np.zeros(shape)}
    message = re.escape(f", got {shape}")
    with pytest.raises(ValueError, match=rf"{name.removeprefix('initial_')} should be .*{message}"):
        chunk_kda(**arguments)


def test_integer_inputs_are_refused(kda_arguments):
    with pytest.raises(TypeError, match="beta is int32"):
        chunk_kda(**kda_arguments(3) | {"beta": np.ones((2, 3, 2), np.int32)})


@pytest.mark.parametrize("name", ["segment_ids", "lengths"])
def test_document_ids_and_lengths_that_do_not_fit_are_refused(kda_arguments, name):
    expected = {"segment_ids": (2, 3), "lengths": (2,)}[name]
    with pytest.raises(TypeError, match=f"integer {name}, got float"):
        chunk_kda(**kda_arguments(3), **{name: np.ones(expected)})
    message = re.escape(f"{name} of shape {expected}, got (3,)")
    with pytest.raises(ValueError, match=message):
        chunk_kda(**kda_arguments(3), **{name: np.ones(3, np.int32)})
