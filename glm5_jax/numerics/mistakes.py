"""The catalogue of planted mistakes: what goes wrong in ports of this model, one step each.

A comparison is worth what it can catch. Each mistake replaces one step function of `nn` or
`pallas_kernels` by a version that is wrong in one way, has every shape right, and runs:

    with planted("comb_not_transposed"):
        logits = model(tokens)

Nothing in `nn` knows of them. The docstring of a replacement says what it does wrong. `explain`
looks for the one that another engine makes.
"""

from glm5_jax.numerics import mistakes_ffn, mistakes_mixers, mistakes_streams  # noqa: F401
from glm5_jax.numerics.mistakes_planting import MISTAKES, Mistake, planted, replaced

__all__ = ["MISTAKES", "Mistake", "planted", "replaced"]
