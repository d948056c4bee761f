"""What the Mosaic GPU kernels share: layouts, shared memory, products in registers.

JAX runs such kernels on a CPU too (`interpret`), but for four things, and only these are written
twice: a matrix product with its left side or its accumulator in registers (`accumulate`), one
vector per warp and a reference read in another shape (kda/mosaic_prep.py), and copies of 16 bytes
by each thread (sparse_mla/mosaic_gather.py).
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Untyped: they change from one JAX release to the next, and types are checked against the oldest.
plgpu: Any = import_module("jax.experimental.pallas.mosaic_gpu")
mgpu: Any = import_module("jax.experimental.mosaic.gpu")

WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)  # one number per row of a matrix in that layout
COLUMNS = WGMMA.reduce(0)

bf16, f32 = jnp.bfloat16, jnp.float32


def tiled(shape: tuple[int, ...], swizzle: int = 128) -> Any:
    """bfloat16 shared memory as the tensor cores and the copy engine want it."""
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, bf16, transforms=transforms)


def zeros(*shape: int) -> Float[Array, "..."]:
    """An empty accumulator."""
    return plgpu.layout_cast(jnp.zeros(shape, f32), WGMMA)


def by_row(
    x: Float[Array, " R"], shape: tuple[int, int], layout: Any = WGMMA
) -> Float[Array, "R C"]:
    """One number per row, along the columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (0,)), layout)


def by_column(x: Float[Array, " C"], shape: tuple[int, int]) -> Float[Array, "R C"]:
    """One number per column, along the rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (1,)), WGMMA)


class _Accumulator:
    """A sum of matrix products in registers; the products run while the program goes on."""

    def __init__(self, ref: Any):
        self.ref = ref

    def add(self, a: Any, b: Any) -> None:
        plgpu.wgmma(self.ref, a, b)

    def load(self, wait_n: int) -> Array:
        # The barrier ties the registers to the wait: without it their readers may move above it.
        return lax.optimization_barrier(plgpu.wgmma_accumulator_load(self.ref, wait_n=wait_n))


class _InterpretedAccumulator:
    """The same in interpret mode: a float32 sum of products of bfloat16."""

    def __init__(self, value: Array):
        self.value = value

    def add(self, a: Any, b: Any) -> None:
        self.value = self.value + jnp.dot(a[...], b[...], preferred_element_type=f32)

    def load(self, wait_n: int) -> Array:
        del wait_n
        return self.value


def accumulate(f: Callable[..., None], *initial: Array, interpret: bool) -> tuple[Array, ...]:
    """Runs `f` on one accumulator for each initial value [64, N], and returns the sums.

    An accumulator has two methods: `add(a, b)` adds a @ b, bfloat16 `a` [64, M] from registers or
    shared memory and `b` [M, N] from shared memory; `load(n)` is its value once all but the last n
    products are done.
    """
    if interpret:
        interpreted = [_InterpretedAccumulator(x) for x in initial]
        f(*interpreted)
        return tuple(x.value for x in interpreted)

    def body(refs: Any) -> None:
        f(*(_Accumulator(ref) for ref in refs))

    sums = pl.run_state(body)(tuple(plgpu.ACC.init(x) for x in initial))
    return lax.optimization_barrier(tuple(sums))


def kernel(body: Callable[..., None], name: str, *, interpret: bool, **options: Any) -> Any:
    """`plgpu.kernel` with what all kernels choose alike.

    Barriers are placed by hand: at `commit_smem` and nowhere else. In interpret mode the race
    detector is on and unwritten memory is NaN.
    """
    return plgpu.kernel(
        body,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,
            unsafe_no_auto_barriers=True,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        **options,
    )


def struct(*shape: int, dtype: Any = bf16) -> jax.ShapeDtypeStruct:
    """An output."""
    return jax.ShapeDtypeStruct(shape, dtype)
