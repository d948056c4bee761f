"""The public KDA operations, and the choice of an implementation."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.kda import base, reference, xla

# name → (q, k, v, g, beta, state, *, scale, use_qk_l2norm) → (o, state). The state's dtype is the
# dtype to compute in. One that cannot run on the inputs or the machine at hand raises
# NotImplementedError with the reason.
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "xla": xla.chunked,
    "reference": reference.recurrence,
}
# Names that users may already write, and why they cannot run.
UNAVAILABLE = {"mosaic_gpu": "there is no Mosaic GPU kernel for KDA in this version"}


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
    use_qk_l2norm: bool = True,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """Kimi Delta Attention over a sequence of any length.

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
      use_qk_l2norm: whether to apply `l2_normalize` to q and k.
      implementation: None chooses one that works; "xla" (chunked) or "reference" (token by token)
        forces that one; a sequence of names takes the first that can run.

    Returns:
      o in v's dtype, and the final state in float32 (or float64), or None if not asked for.

    Raises:
      TypeError: an input is not floating-point.
      ValueError: shapes that do not fit, or an unknown implementation.
      NotImplementedError: none of the named implementations can run; the message says why.
    """
    q, k, v, g, beta = (jnp.asarray(x) for x in (q, k, v, g, beta))
    base.check_inputs(q, k, v, g, beta, initial_state)
    if initial_state is None:
        B, _, H, K = q.shape
        initial_state = jnp.zeros((B, H, K, v.shape[-1]), base.compute_dtype(q, k, v, g, beta))
    o, state = recurrent_kda(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        implementation=implementation,
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

    The arguments, dtypes and errors are those of `chunk_kda`.

    Returns:
      o in v's dtype, and the new state in float32 (or float64).
    """
    q, k, v, g, beta, state = (jnp.asarray(x) for x in (q, k, v, g, beta, state))
    base.check_inputs(q, k, v, g, beta, state)
    state = state.astype(base.compute_dtype(q, k, v, g, beta, state))
    o, state = _run(
        implementation, q, k, v, g, beta, state, scale=scale, use_qk_l2norm=use_qk_l2norm
    )
    return o.astype(v.dtype), state


def _run(implementation: str | Sequence[str] | None, *args, **kwargs) -> tuple[Array, Array]:
    if implementation is None:
        # Decoding too: short inputs are one small chunk, which reads the state once for all tokens.
        implementation = "xla"
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    unknown = [name for name in names if name not in IMPLEMENTATIONS and name not in UNAVAILABLE]
    if unknown or not names:
        known = sorted({*IMPLEMENTATIONS, *UNAVAILABLE})
        raise ValueError(f"implementation must be None or from {known}, got {implementation!r}")
    reasons = []
    for name in names:
        if name in UNAVAILABLE:
            reasons.append(f"{name}: {UNAVAILABLE[name]}")
            continue
        try:
            return IMPLEMENTATIONS[name](*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError("KDA cannot run as asked: " + "; ".join(reasons))
