"""Our cache as transformers' `DynamicCache`, so that the oracle goes on from where we stopped.

For decoding beside the oracle at a long context, without its prefill of that context.
"""

from typing import Any

import numpy as np

from glm5_jax.cache import Cache, KDAState
from glm5_jax.numerics.oracle import Oracle


def oracle_cache(oracle: Oracle, cache: Cache) -> Any:
    """A `DynamicCache` for `oracle` that holds what `cache` has seen.

    Raises ValueError for rows of unequal lengths, which it could hold only left-padded, and for a
    cache with a rewind, whose recurrent states lag behind.
    """
    import torch
    from transformers import DynamicCache

    lengths = np.asarray(cache.lengths)
    if (lengths != lengths[0]).any() or cache.depth:
        raise ValueError(
            f"expected a cache made with rewind=0 and rows of one length, got rewind={cache.depth} "
            f"and lengths {lengths.tolist()}"
        )

    def tensor(array: Any) -> Any:
        return torch.tensor(np.asarray(array))

    filled = DynamicCache(config=oracle.config.text_config)
    for i, state in enumerate(cache.layers):
        if isinstance(state, KDAState):
            # It keeps as many columns as the convolution has taps, and reads all but the oldest.
            conv = torch.nn.functional.pad(tensor(state.conv).flatten(2).transpose(1, 2), (1, 0))
            filled.update_conv_state(conv, i, conv_kernel_size=conv.shape[-1])
            filled.update_recurrent_state(tensor(state.recurrent), i)
            continue
        latent = tensor(state.latent[:, : lengths[0]])[:, None]
        filled.update(latent, latent[..., :0], i)
        if state.index_keys is not None and state.gates is not None:
            keys, gates = (tensor(x[:, : lengths[0]]) for x in (state.index_keys, state.gates))
            filled.update_indexer(torch.cat([keys, gates, torch.ones_like(keys[..., :1])], -1), i)
    return filled


def oracle_decode(oracle: Oracle, cache: Any, token: np.ndarray) -> np.ndarray:
    """Logits [B, vocab] of the oracle after one more token [B]; its `cache` grows in place."""
    import torch

    with torch.no_grad():
        logits = oracle(input_ids=torch.tensor(token).long()[:, None], cache=cache).logits
    return logits[:, -1].numpy()
