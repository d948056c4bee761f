"""The largest of each row, found on the device that has the row."""

import functools

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int


def largest(x: Float[Array, "*b N"], k: int) -> tuple[Float[Array, "*b k"], Int[Array, "*b k"]]:
    """`jax.lax.top_k`, without a gradient; over several devices `x` stays cut as it is.

    XLA would gather all rows on every device. Only where the last axis is cut are rows gathered.
    """
    return _largest(jax.lax.stop_gradient(x), k)


@functools.partial(custom_partitioning, static_argnums=(1,))
def _largest(x: Array, k: int) -> tuple[Array, Array]:
    values, at = jax.lax.top_k(x, k)
    return values, at


def _partition(k: int, mesh: Mesh, args: tuple, results: tuple) -> tuple:
    (x,) = args
    spec = (*x.sharding.spec, *[None] * len(x.shape))[: len(x.shape) - 1]
    rows = NamedSharding(mesh, PartitionSpec(*spec, None))
    return mesh, lambda x: tuple(jax.lax.top_k(x, k)), (rows, rows), (rows,)


_largest.def_partition(
    partition=_partition,
    sharding_rule="... n -> ... k, ... k",
    need_replication_factors=("n", "k"),
)
