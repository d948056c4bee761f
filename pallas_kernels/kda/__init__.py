"""Kimi Delta Attention: the gated delta rule with one decay per head and key channel."""

from pallas_kernels.kda.api import chunk_kda, recurrent_kda
from pallas_kernels.kda.base import kda_gate, l2_normalize

__all__ = ["chunk_kda", "kda_gate", "l2_normalize", "recurrent_kda"]
