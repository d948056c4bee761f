"""Calls of the operations whose kernels are compiled for a GPU that is not at hand, as data."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class KDAShape:
    """Sizes of a `chunk_kda` call in bfloat16 with float32 gates, as the model makes it."""

    B: int = 1
    T: int = 8192
    H: int = 64
    K: int = 128
    V: int = 128
    packed: bool = False

    def __str__(self) -> str:
        sizes = f"B{self.B} T{self.T} H{self.H} {self.K}x{self.V}"
        return f"kda {sizes} packed" if self.packed else f"kda {sizes}"

    def inputs(self) -> dict[str, Any]:
        """Shapes and dtypes of the arguments of `call`."""
        B, T, H, K, V = self.B, self.T, self.H, self.K, self.V
        struct = jax.ShapeDtypeStruct
        inputs = {
            "q": struct((B, T, H, K), jnp.bfloat16),
            "k": struct((B, T, H, K), jnp.bfloat16),
            "v": struct((B, T, H, V), jnp.bfloat16),
            "g": struct((B, T, H, K), jnp.float32),
            "beta": struct((B, T, H), jnp.float32),
            "initial_state": struct((B, H, K, V), jnp.float32),
        }
        return inputs | ({"segment_ids": struct((B, T), jnp.int32)} if self.packed else {})

    def call(self, **inputs: Any) -> Any:
        """The operation, by its kernels."""
        from pallas_kernels.kda import chunk_kda

        return chunk_kda(**inputs, output_final_state=True, implementation="mosaic_gpu")


@dataclass(frozen=True)
class SparseMLAShape:
    """Sizes of a `sparse_mla_decode` call in bfloat16, as the model makes it."""

    B: int = 128
    T: int = 1
    A: int = 64
    W: int = 2051
    R: int = 512
    S: int = 32768
    paged: bool = False

    def __str__(self) -> str:
        sizes = f"B{self.B} T{self.T} A{self.A} W{self.W} R{self.R}"
        return f"sparse-mla {sizes} paged" if self.paged else f"sparse-mla {sizes}"

    def inputs(self) -> dict[str, Any]:
        """Shapes and dtypes of the arguments of `call`."""
        struct = jax.ShapeDtypeStruct
        kv = (self.B * self.S, self.R) if self.paged else (self.B, self.S, self.R)
        return {
            "q": struct((self.B, self.T, self.A, self.R), jnp.bfloat16),
            "kv": struct(kv, jnp.bfloat16),
            "indices": struct((self.B, self.T, self.W), jnp.int32),
        }

    def call(self, **inputs: Any) -> Any:
        """The operation, by its kernel."""
        from pallas_kernels.sparse_mla import sparse_mla_decode

        # The scale of the model's heads, of 256 numbers before absorption.
        return sparse_mla_decode(
            **inputs, scale=1 / 16, return_lse=True, implementation="mosaic_gpu"
        )


Shape = KDAShape | SparseMLAShape
SHAPES: dict[str, type[Shape]] = {shape.__name__: shape for shape in (KDAShape, SparseMLAShape)}
