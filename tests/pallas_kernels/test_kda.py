import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels.kda import chunk_kda, kda_gate, l2_normalize, recurrent_kda
from pallas_kernels.kda.xla import CHUNK, SEGMENT

T = 130  # whole chunks and two tokens more; most tests share its compilation

run = jax.jit(
    functools.partial(chunk_kda, output_final_state=True), static_argnames="implementation"
)
chunked = functools.partial(run, implementation="xla")
recurrence = functools.partial(run, implementation="reference")
step = jax.jit(recurrent_kda, static_argnames="implementation")
both = pytest.mark.parametrize("implementation", ["reference", "xla"])


def assert_same(ours, truth, tolerance):
    """Every output within `tolerance` of its own largest magnitude."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True):
        assert np.isfinite(a).all()
        assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-300))


def relative_l2(ours, truth):
    ours, truth = np.asarray(ours, np.float64), np.asarray(truth, np.float64)
    return np.linalg.norm(ours - truth) / np.linalg.norm(truth)


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


def test_reference_equals_the_oracle(kda_arguments, cast, float32):
    torch = pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    arguments = kda_arguments(T)
    ours = recurrence(**cast(arguments, jnp.float32))
    q, k, v, g, beta, state = (torch.tensor(x, dtype=torch.float32) for x in arguments.values())
    o, state = oracle.recurrent_kimi_delta_attention(q, k, v, g, beta, state, True, True)
    assert_same(ours, (o.numpy(), state.numpy()), 1e-6)


# The chunked form equals the recurrence.


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 130])
def test_state_after_a_short_last_chunk_is_that_of_the_last_token(
    float64, kda_arguments, cast, length
):
    arguments = cast(kda_arguments(length), jnp.float64)
    o, state = chunked(**arguments)
    assert_same((o, state), recurrence(**arguments), 1e-12)

    token = cast(kda_arguments(1, seed=1), jnp.float64)
    del token["initial_state"]
    decoded = step(**token, state=state, implementation="xla")
    assert_same(decoded, step(**token, state=state, implementation="reference"), 1e-12)


def gates(shape, kind):
    rng = np.random.default_rng(5)
    if kind == "channels at -5 beside channels at 0":
        return np.where(np.arange(shape[-1]) % 2, -5.0, 0.0)
    if kind == "tokens at -5 among tokens at 0":
        return np.where(rng.random(shape) < 0.3, -5.0, 0.0)
    if kind == "-1e4 beside -1e-3":
        return np.where(rng.random(shape) < 0.1, -1e4, -1e-3)
    return float(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "0",
        "-5",
        "-50",
        "-200",
        "-1e30",
        "-inf",
        "channels at -5 beside channels at 0",
        "tokens at -5 among tokens at 0",
        "-1e4 beside -1e-3",
    ],
)
def test_no_gate_is_too_strong(kda_arguments, cast, kind):
    arguments = kda_arguments(T)
    arguments["g"] = np.broadcast_to(gates(arguments["g"].shape, kind), arguments["g"].shape)
    assert_chunked_is_exact(arguments, cast)


@pytest.mark.parametrize("g", [0.0, -1e-4, -0.1, -5.0])
@pytest.mark.parametrize("sign", ["parallel", "antiparallel"])
@pytest.mark.codegen
def test_nearly_parallel_keys_with_beta_near_one_stay_accurate(kda_arguments, cast, g, sign):
    arguments = kda_arguments(T, g=g, beta=0.9999)
    k = arguments["k"]
    k = k[:, :1] + 1e-4 * k
    if sign == "antiparallel":
        k = k * np.where(np.arange(T) % 3, 1.0, -1.0)[:, None, None]
    assert_chunked_is_exact(arguments | {"k": k}, cast)


def assert_chunked_is_exact(arguments, cast):
    arguments = {name: np.asarray(x, np.float32) for name, x in arguments.items()}
    with jax.enable_x64(True):
        arguments64 = cast(arguments, jnp.float64)
        truth = recurrence(**arguments64)
        assert_same(chunked(**arguments64), truth, 1e-12)
    with jax.enable_x64(False):
        ours = chunked(**cast(arguments, jnp.float32))
    assert_same(ours, truth, 2e-6)
    assert all(relative_l2(a, b) < 1e-6 for a, b in zip(ours, truth, strict=True))


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    decay=st.floats(-6, 4),
    spread=st.floats(-6, 1),
    beta=st.floats(0, 1),
)
def test_chunked_equals_recurrence_for_any_admissible_input(
    kda_arguments, cast, seed, decay, spread, beta
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
def test_a_sequence_may_be_split_anywhere(float64, kda_arguments, cast, lengths):
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


def test_decoding_token_by_token_equals_the_whole_sequence(float64, kda_arguments, cast):
    arguments = cast(kda_arguments(65), jnp.float64)
    whole = chunked(**arguments)
    state = arguments.pop("initial_state")
    outputs = []
    for t in range(65):
        token = {name: x[:, t : t + 1] for name, x in arguments.items()}
        o, state = step(**token, state=state, implementation="xla")
        outputs.append(o)
    assert_same((jnp.concatenate(outputs, axis=1), state), whole, 1e-12)


@both
def test_without_initial_state_starts_from_zeros(float64, kda_arguments, cast, implementation):
    arguments = cast(kda_arguments(3, initial_state=0.0), jnp.float64)
    from_zeros = run(**arguments, implementation=implementation)
    del arguments["initial_state"]
    assert_same(run(**arguments, implementation=implementation), from_zeros, 0)


def test_no_tokens_leave_the_state(float64, kda_arguments, cast):
    arguments = cast(kda_arguments(0), jnp.float64)
    o, state = chunk_kda(**arguments, output_final_state=True)
    assert o.shape == (2, 0, 2, 12)
    assert_array_equal(state, arguments["initial_state"])


# Gradients.


def gradients(arguments, implementation):
    def loss(arguments, w):
        o, state = chunk_kda(**arguments, output_final_state=True, implementation=implementation)
        return jnp.sum(o * w["v"]) + jnp.sum(state * w["initial_state"])

    weights = {name: jnp.cos(jnp.arange(x.size)).reshape(x.shape) for name, x in arguments.items()}
    return jax.grad(loss)(arguments, weights)


gradients = jax.jit(gradients, static_argnames="implementation")


@pytest.mark.parametrize(
    "replaced",
    [{}, {"g": -5.0}, {"g": 0.0, "beta": 1.0}, {"g": -200.0}, {"g": -1e30}, {"q": 0.0, "k": 0.0}],
    ids=str,
)
def test_gradients_equal_those_of_the_recurrence(float64, kda_arguments, cast, replaced):
    arguments = cast(kda_arguments(T, **replaced), jnp.float64)
    ours, truth = gradients(arguments, "xla"), gradients(arguments, "reference")
    scale = max(np.abs(x).max() for x in truth.values())
    for name, x in truth.items():
        assert np.isfinite(ours[name]).all(), name
        assert_allclose(ours[name], x, rtol=0, atol=1e-9 * min(scale, 1), err_msg=name)


def test_backward_keeps_the_inputs_and_one_state_per_segment(float32, kda_arguments, cast):
    def kept(tokens):
        arguments = cast(kda_arguments(tokens), jnp.float32)
        residuals = jax.eval_shape(lambda x: jax.vjp(lambda x: chunk_kda(**x)[0], x)[1], arguments)
        return sum(x.size for x in jax.tree.leaves(residuals))

    segment = CHUNK * SEGMENT
    tokens, state = segment * 2 * 2 * (8 + 8 + 12 + 8 + 1), 2 * 2 * 8 * 12
    assert kept(6 * segment) - kept(5 * segment) == tokens + state


# Dtypes, batches, transformations.


@both
def test_bfloat16_inputs_compute_in_float32(float32, kda_arguments, cast, implementation):
    arguments = cast(kda_arguments(T), jnp.bfloat16)
    o, state = run(**arguments, implementation=implementation)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)

    widened = cast(arguments, jnp.float32)
    o32, state32 = run(**widened, implementation=implementation)
    assert_array_equal(o, o32.astype(jnp.bfloat16))
    assert_array_equal(state, state32)


def test_output_follows_the_values_and_the_state_never_narrows(float32, kda_arguments, cast):
    arguments = cast(kda_arguments(1), jnp.float32)
    arguments["v"] = arguments["v"].astype(jnp.bfloat16)
    o, state = chunked(**arguments)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    with jax.enable_x64(True):
        o, state = chunked(**cast(arguments, jnp.float64))
        assert (o.dtype, state.dtype) == (jnp.float64, jnp.float64)


@pytest.mark.codegen
def test_rows_do_not_depend_on_their_batch(float32, kda_arguments, cast):
    one = cast(kda_arguments(T, B=1), jnp.float32)
    eight = {name: jnp.repeat(x, 8, axis=0) for name, x in one.items()}
    for repeated, single in zip(chunked(**eight), chunked(**one), strict=True):
        assert_array_equal(repeated, jnp.broadcast_to(repeated[:1], repeated.shape))
        assert_allclose(repeated[:1], single, rtol=0, atol=2e-6 * np.abs(single).max())


def test_vmap_adds_an_axis(float64, kda_arguments, cast):
    stacked = [cast(kda_arguments(3, seed=seed), jnp.float64) for seed in range(2)]
    mapped = jax.vmap(lambda x: chunked(**x))(jax.tree.map(lambda *x: jnp.stack(x), *stacked))
    each = jax.tree.map(lambda *x: jnp.stack(x), *(chunked(**x) for x in stacked))
    assert_same(mapped, each, 1e-13)


# The choice of an implementation, and refusals.


def test_unknown_implementation_is_refused_with_the_known_names(kda_arguments):
    arguments = kda_arguments(1)
    for name in ("triton", ("xla", "triton"), ()):
        with pytest.raises(ValueError, match=r"'mosaic_gpu', 'reference', 'xla'"):
            chunk_kda(**arguments, implementation=name)


def test_forced_implementation_that_cannot_run_says_why(kda_arguments):
    with pytest.raises(NotImplementedError, match="mosaic_gpu: there is no Mosaic GPU kernel"):
        chunk_kda(**kda_arguments(1), implementation="mosaic_gpu")


def test_sequence_of_implementations_falls_back_in_order(float64, kda_arguments, cast):
    arguments = cast(kda_arguments(3), jnp.float64)
    fallen_back = run(**arguments, implementation=("mosaic_gpu", "reference", "xla"))
    assert_same(fallen_back, recurrence(**arguments), 0)


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


# The gate.


def gate(x, A_log, lower_bound, dtype=jnp.float32):
    return kda_gate(
        jnp.full((1, 1), x, dtype), jnp.full(1, A_log, dtype), jnp.zeros(1, dtype), lower_bound
    ).item()


def test_gate_is_a_scale_on_a_sigmoid_and_not_a_clamp(float64):
    assert gate(0.0, 0.0, -5.0) == -2.5
    assert gate(1.0, math.log(2), -5.0) == pytest.approx(-5 / (1 + math.exp(-2)), rel=1e-7)
    assert gate(1.0, math.log(2), -5.0) == pytest.approx(-4.4040, abs=1e-4)


def test_gate_saturates_at_its_bound_and_at_zero(float32):
    assert gate(1e4, 0.0, -5.0) == -5
    assert gate(-1e4, 0.0, -5.0) == 0


def test_gate_without_bound_is_the_softplus_form(float64):
    for x, A_log in [(0.0, 0.0), (1.5, 0.3), (-7.0, -2.0), (-60.0, 50.0), (100.0, 1.0)]:
        expected = -math.exp(A_log) * math.log1p(math.exp(x))
        assert gate(x, A_log, None, jnp.float64) == pytest.approx(expected, rel=1e-13)


def test_gate_of_a_huge_rate_and_a_vanishing_softplus_is_not_nan(float32):
    # exp(100) overflows float32, softplus(−200) underflows it; the product exp(−100) is zero in it.
    assert gate(-200.0, 100.0, None) == pytest.approx(0, abs=1e-37)
    assert gate(-110.0, 100.0, None) == pytest.approx(-math.exp(-10), rel=1e-4)


def test_gate_bias_is_per_head_and_channel(float64):
    f, bias = jnp.zeros((3, 2, 4)), jnp.arange(8.0)
    g = kda_gate(f, jnp.zeros(2), bias, -5.0)
    assert_allclose(g[1], -5 / (1 + np.exp(-np.arange(8.0))).reshape(2, 4), rtol=1e-13)
    assert_array_equal(g, kda_gate(f, jnp.zeros(2), bias.reshape(2, 4), -5.0))


finite = st.floats(-1e4, 1e4, width=32)
gate_and_gradients = jax.jit(
    jax.value_and_grad(lambda x, lower_bound: jnp.sum(kda_gate(*x, lower_bound)), argnums=0),
    static_argnums=1,
)


@settings(deadline=None, max_examples=200)
@given(f=finite, bias=finite, A_log=st.floats(-100, 100, width=32))
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gate_and_its_gradients_are_finite(lower_bound, f, bias, A_log):
    arguments = [jnp.full((1, 1), f, jnp.float32)]
    arguments += [jnp.full(1, x, jnp.float32) for x in (A_log, bias)]
    g, gradient = gate_and_gradients(arguments, lower_bound)
    assert (-5 <= g <= 0) if lower_bound else (-math.inf < g <= 0)
    assert all(np.isfinite(x).all() for x in gradient)


def test_gate_computes_bfloat16_in_float32(float32):
    f = jnp.full((1, 1), 0.3, jnp.bfloat16)
    g = kda_gate(f, jnp.zeros(1), jnp.zeros(1), -5.0)
    assert g.dtype == jnp.float32
    assert_array_equal(g, kda_gate(f.astype(jnp.float32), jnp.zeros(1), jnp.zeros(1), -5.0))


def test_gate_refuses_a_bound_that_is_not_negative():
    with pytest.raises(ValueError, match="must be negative or None, got 5"):
        gate(0.0, 0.0, 5.0)


def test_gate_refuses_parameters_of_other_heads():
    with pytest.raises(ValueError, match=r"got f \(3, 2, 4\), A_log \(4,\), dt_bias \(8,\)"):
        kda_gate(jnp.zeros((3, 2, 4)), jnp.zeros(4), jnp.zeros(8), -5.0)


# The normalisation.


def test_normalisation_adds_its_epsilon_to_the_sum_of_squares(float64):
    # Not a floor under the norm (that gives 1), not under the mean square.
    x = 1e-3 * jnp.eye(1, 4)
    assert_allclose(l2_normalize(x)[0, 0], 1e-3 / math.sqrt(2e-6), rtol=1e-13)


def test_normalisation_of_zero_is_zero_with_a_finite_gradient(float32):
    x = jnp.zeros((2, 4))
    assert_array_equal(l2_normalize(x), x)
    assert_allclose(jax.grad(lambda x: l2_normalize(x).sum())(x), np.full((2, 4), 1e3), rtol=1e-5)


def test_normalisation_widens_bfloat16(float32):
    x = jnp.asarray([[0.3, 0.7]], jnp.bfloat16)
    assert_array_equal(l2_normalize(x), l2_normalize(x.astype(jnp.float32)))
    assert l2_normalize(x).dtype == jnp.float32
