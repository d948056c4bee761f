"""The trace sites of a model: what each is called and which axes it has, as data.

`FORMAT.md` says the same in words. No JAX here.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from ..config import ModelConfig
from ..errors import TraceError
from ..skeleton import Skeleton

Keep = str | Sequence[str]


class Site(NamedTuple):
    """One kind of site: its axes in the letters of `site_dims`, and whether it holds choices.

    `scores` is the site that a choice was made by.
    """

    axes: str
    choice: bool = False
    scores: str | None = None


def _connection(at: str) -> dict[str, Site]:
    coefficients = {"pre": "B T M", "post": "B T M", "comb": "B T M M"}
    axes = coefficients | {"collapse": "B T X", "norm": "B T X"}
    return {f"{at}.{name}": Site(letters) for name, letters in axes.items()}


_KDA = {
    **{f"attn.{name}": Site("B T H D") for name in ("q", "k", "v", "g")},
    "attn.beta": Site("B T H"),
    "attn.state": Site("B H D D"),
    "attn.o": Site("B T H D"),
    "attn.kda": Site("B T X"),
}
_INDEXER = {
    "attn.index_keys": Site("B T DI"),
    "attn.pool_keys": Site("B NP DI"),
    "attn.index_scores": Site("B T NP"),
    "attn.pools": Site("B T C", choice=True, scores="attn.index_scores"),
}
_DSA = {
    "attn.selection": Site("B T W", choice=True),
    "attn.o": Site("B T A V"),
    "attn.dsa": Site("B T X"),
}
_MOE = {
    "ffn.router.logits": Site("B T E"),
    "ffn.router.scores": Site("B T E"),
    "ffn.router.experts": Site("B T k", choice=True, scores="ffn.router.scores"),
    "ffn.router.weights": Site("B T k"),
    "ffn.experts": Site("B T X"),
    "ffn.shared": Site("B T X"),
    "ffn.moe": Site("B T X"),
}

# Sites without a token axis, by their last name, which belongs to no other site.
OFF_TOKENS = {
    name.rpartition(".")[2]: site.axes
    for name, site in (_KDA | _INDEXER).items()
    if not site.axes.startswith("B T")
}


def sites_of(skeleton: Skeleton) -> dict[str, Site]:
    """Every site of a model, in the order in which they happen."""
    sites = {"embedding": Site("B T X")}
    for layer in skeleton.layers:
        inside = {"in": Site("B T M X"), **_connection("attn")}
        if layer.mixer == "kda":
            inside |= _KDA
        else:
            inside |= {"attn.latent": Site("B T R")}
            inside |= (_INDEXER if layer.indexer == "full" else {}) | _DSA
        inside |= {"attn.expand": Site("B T M X"), **_connection("ffn")}
        inside |= _MOE if layer.mlp == "moe" else {"ffn.dense": Site("B T X")}
        inside |= {"ffn.expand": Site("B T M X")}
        at = f"layers.{layer.index}"
        for name, site in inside.items():
            scores = None if site.scores is None else f"{at}.{site.scores}"
            sites[f"{at}.{name}"] = site._replace(scores=scores)
    final = {"mean": "B T X", "norm": "B T X", "head": "B T Vo"}
    return sites | {f"final.{name}": Site(axes) for name, axes in final.items()}


def site_dims(config: ModelConfig, batch: int, tokens: int) -> dict[str, int]:
    """The sizes behind the letters of `Site.axes`; pools are those of a row without padding."""
    pools, chosen = tokens // config.index_kpool, config.index_topk // config.index_kpool
    tail = config.index_kpool - 1 if config.index_kpool_always_select_tail else 0
    return {
        **config.dims,
        "B": batch,
        "T": tokens,
        "NP": pools,
        "C": min(chosen, pools),
        "W": config.index_topk + tail,
        "k": config.num_experts_per_tok,
    }


def real_positions(axes: str, mask: Any, pool: int) -> Any | None:
    """Which part of a site is real, as [B, T] or [B, NP]; None if all of it is.

    A pool is real where its row fills it. `mask` [B, T] may be an array of NumPy or JAX.
    """
    if axes.startswith("B T"):
        return mask
    if axes.startswith("B NP"):
        end = pool * (np.arange(mask.shape[1] // pool) + 1)
        return end <= mask.sum(1)[:, None]
    return None


def chosen_sites(skeleton: Skeleton, keep: Keep) -> frozenset[str]:
    """The names that match the pattern, or one of them (`layers.3.*`, `*.router.*`).

    Raises TraceError where a pattern matches no site of the model.
    """
    every, chosen = list(sites_of(skeleton)), set[str]()
    for pattern in (keep,) if isinstance(keep, str) else keep:
        matches = [name for name in every if fnmatchcase(name, pattern)]
        if not matches:
            raise TraceError(f"keep: no site of this model matches {pattern!r}; see FORMAT.md")
        chosen.update(matches)
    return frozenset(chosen)
