"""Latent attention of a few query tokens over the rows of a cache that each of them selected."""

from pallas_kernels.sparse_mla.api import sparse_mla_decode

__all__ = ["sparse_mla_decode"]
