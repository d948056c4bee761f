"""The public KDA operations, and the choice of an implementation."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.kda import base, mosaic_gpu, reference, xla

# In order of preference: None takes the first that can run.
#
# `run(q, k, v, g, beta, state, starts, lengths, *, scale, use_qk_l2norm)` returns o and the state.
# The inputs are checked; the state's dtype is the dtype to compute in. `starts` [B, T] is True
# where a token starts from zeros, `lengths` [B] counts the real tokens; both may be None.
# `supports(q, k, v, g, beta, state)` sees the same arrays.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "mosaic_gpu": Implementation(mosaic_gpu.chunked, mosaic_gpu.supports),
    "xla": Implementation(xla.chunked),
    "reference": Implementation(reference.recurrence),
}


def chunk_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    use_qk_l2norm: bool = True,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """Kimi Delta Attention over sequences of any length.

    Per head, with the state S `[K, V]` and for one token after another:

        S ← exp(g)[:, None] * S
        S ← S + k ⊗ (beta * (v − kᵀ S))
        o = qᵀ S

    All of it in float32, or in float64 as soon as one input is float64.

    Args:
      q, k: queries and keys, not yet normalised.
      v: values.
      g: log-decay per head and key channel, at most 0, without lower bound. See `kda_gate`.
      beta: how much of the old value a key replaces, per head, in [0, 1].
      scale: the factor on q, `K ** -0.5` by default, applied after the normalisation.
      initial_state: the state before the first token, zeros by default.
      output_final_state: whether to return the state after the last token.
      segment_ids: documents packed into one row. Wherever the id of a token differs from that of
        the token before, the state restarts from zeros; so `initial_state` belongs to a row's first
        document, and the final state to its last.
      lengths: the number of real tokens of each row, which come first. The final state is that
        after the last of them; what stands in the inputs past it, NaN included, has no effect, and
        o is zero there.
      use_qk_l2norm: whether to apply `l2_normalize` to q and k.
      implementation: None takes the first of `IMPLEMENTATIONS` that can run; a name forces that
        one; a sequence of names takes the first of them that can run.

    Returns:
      o in v's dtype, and the final state in float32 (or float64), or None if not asked for.

    Raises:
      TypeError: a dtype that does not fit.
      ValueError: shapes that do not fit, or an unknown implementation.
      NotImplementedError: none of the named implementations can run; the message says why.
    """
    q, k, v, g, beta = (jnp.asarray(x) for x in (q, k, v, g, beta))
    base.check_inputs(q, k, v, g, beta, initial_state)
    if initial_state is None:
        B, _, H, K = q.shape
        initial_state = jnp.zeros((B, H, K, v.shape[-1]), base.compute_dtype(q, k, v, g, beta))
    starts = None
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        base.check_integers("segment_ids", segment_ids, q.shape[:2])
        starts = base.segment_starts(segment_ids)
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        base.check_integers("lengths", lengths, q.shape[:1])
    o, state = _run(
        implementation,
        (q, k, v, g, beta, jnp.asarray(initial_state)),
        starts,
        lengths,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )
    return o, state if output_final_state else None


def recurrent_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """A few more tokens (decoding: T = 1) on a state that is carried along.

    The arguments, dtypes and errors are those of `chunk_kda`, but that None means "xla": a kernel
    would compute a whole chunk of 64 tokens. The new state has the shape and dtype
    of a float32 (or float64) `state`, so it takes the old one's place in memory where the caller
    donates that: `jax.jit(…, donate_argnames="state")` around this call or around the whole step.

    Returns:
      o in v's dtype, and the new state in float32 (or float64).
    """
    q, k, v, g, beta, state = (jnp.asarray(x) for x in (q, k, v, g, beta, state))
    base.check_inputs(q, k, v, g, beta, state)
    return _run(
        "xla" if implementation is None else implementation,
        (q, k, v, g, beta, state),
        None,
        None,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
    )


def _run(
    implementation: str | Sequence[str] | None,
    inputs: tuple[Array, ...],
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
    **options,
) -> tuple[Array, Array]:
    *tokens, state = inputs
    state = state.astype(base.compute_dtype(*inputs))
    run = choose("KDA", IMPLEMENTATIONS, implementation, *tokens, state)
    o, state = run(*tokens, state, starts, lengths, **options)
    return o.astype(tokens[2].dtype), state
