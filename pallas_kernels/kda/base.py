"""What every KDA implementation shares: its dtype, its two activations, its shape checks.

Dimensions: B batch, T tokens, H heads, K key channels, V value channels.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

L2_EPS = 1e-6

# Of the GPU kernels.
CHUNK = 64  # tokens; the rows of one wgmma
STRIP = 16  # tokens of a chunk whose decays share a reference; the rows that one warp holds
KEYS = 128  # key channels; fewer are filled up with zeros


def compute_dtype(*arrays: Array) -> jnp.dtype:
    """float32, or float64 as soon as one array is: narrower inputs are widened, never followed."""
    return jnp.result_type(jnp.float32, *arrays)


def l2_normalize(x: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
    """`x / sqrt(sum(x²) + 1e-6)` over the last axis, in at least float32.

    The epsilon is added to the sum of squares (not a floor under the norm, not a mean), so a zero
    vector stays zero and has a finite gradient.
    """
    x = x.astype(compute_dtype(x))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def kda_gate(
    f: Float[Array, "*B H K"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, " H*K"] | Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "*B H K"]:
    """The log-decay g ≤ 0 of every head and key channel.

    With a `lower_bound` (−5 in the released model) it is a scale on a sigmoid, not a clamp:
    `lower_bound * sigmoid(exp(A_log) * (f + dt_bias))`. With None it is the older, unbounded
    `-exp(A_log) * softplus(f + dt_bias)`.

    Args:
      f: the forget projection, one number per head and channel.
      A_log: log of each head's rate.
      dt_bias: one bias per head and channel, flat or `[H, K]`.
      lower_bound: a negative float, or None.

    Returns:
      g in at least float32. It is finite for every finite input, and so are its gradients: an
      overflow is held at the dtype's largest magnitude.

    Raises:
      ValueError: `lower_bound` is not negative, or the shapes do not fit.
    """
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound must be negative or None, got {lower_bound}")
    if f.ndim < 2 or A_log.shape != f.shape[-2:-1] or dt_bias.size != f.shape[-2] * f.shape[-1]:
        raise ValueError(
            "kda_gate expects f [..., H, K], A_log [H] and dt_bias [H*K] or [H, K]; "
            f"got f {f.shape}, A_log {A_log.shape}, dt_bias {dt_bias.shape}"
        )
    dtype = compute_dtype(f, A_log, dt_bias)
    log_rate = A_log.astype(dtype)[:, None]
    x = f.astype(dtype) + dt_bias.astype(dtype).reshape(f.shape[-2:])
    # Below this exp() is finite, with room for the factors that multiply it.
    log_max = math.log(jnp.finfo(dtype).max) - 4
    if lower_bound is not None:
        # An infinite rate would make x = 0 a NaN. The held rate saturates the sigmoid all the same.
        return lower_bound * jax.nn.sigmoid(jnp.exp(jnp.minimum(log_rate, log_max)) * x)
    # A sum of logarithms: as a product, a huge rate times an underflowing softplus is inf * 0.
    return -jnp.exp(jnp.minimum(log_rate + _log_softplus(x), log_max))


def _log_softplus(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    # softplus(x) = exp(x) to the last bit of float64 below −40, and log(exp(x)) = x is exact.
    return jnp.where(x < -40, x, jnp.log(jax.nn.softplus(jnp.maximum(x, -40))))


def prepare(
    q: Float[Array, "*B K"],
    k: Float[Array, "*B K"],
    *,
    scale: float | None,
    use_qk_l2norm: bool,
) -> tuple[Float[Array, "*B K"], Float[Array, "*B K"]]:
    """Queries and keys as the recurrence wants them: normalised first, then q scaled, once."""
    if use_qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    return q * (q.shape[-1] ** -0.5 if scale is None else scale), k


def segment_starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Where a token belongs to another document than the one before it; never at token 0."""
    return jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0


def without_padding(
    tokens: tuple[Float[Array, "B T ..."], ...],
    starts: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"] | None,
) -> tuple[tuple[Float[Array, "B T ..."], ...], Bool[Array, "B T"] | None]:
    """q, k, v, g and beta are zero past each row's length, and nothing starts there.

    Such a token leaves the state as it is, bit for bit, and its own output is zero.
    """
    if lengths is None:
        return tokens, starts
    is_real = jnp.arange(tokens[0].shape[1]) < lengths[:, None]
    zeroed = tuple(
        jnp.where(is_real.reshape(is_real.shape + (1,) * (x.ndim - 2)), x, 0) for x in tokens
    )
    return zeroed, None if starts is None else starts & is_real


def check_integers(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError unless `x` is an integer array of that shape."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"KDA expects integer {name}, got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"KDA expects {name} of shape {shape}, got {x.shape}")


def check_inputs(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None) -> None:
    """Raises TypeError for a dtype and ValueError for a shape that no implementation takes."""
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if state is not None:
        named["state"] = state
    for name, x in named.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"KDA expects floating-point inputs; {name} is {x.dtype}")
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"KDA expects q [B, T, H, K] and v [B, T, H, V]; got q {q.shape}, v {v.shape}"
        )
    B, T, H, K = q.shape
    V = v.shape[-1]
    expected = {
        "k": (B, T, H, K),
        "v": (B, T, H, V),
        "g": (B, T, H, K),
        "beta": (B, T, H),
        "state": (B, H, K, V),
    }
    wrong = [
        f"{name} should be {shape}, got {named[name].shape}"
        for name, shape in expected.items()
        if name in named and named[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"KDA shapes do not fit q {q.shape}: " + "; ".join(wrong))
