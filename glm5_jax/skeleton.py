"""ModelConfig → Skeleton: the topology of the model as data.

The modules are chosen by this data and the order of the model's trace sites equals the residual
plan, so that what runs can be read here without running it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import ModelConfig
from .config_layers import Indexer, Mixer, Mlp
from .errors import ConfigError


@dataclass(frozen=True)
class SkeletonLayer:
    """One decoder layer: which mixer, which feed-forward, which residual.

    `indexer` is what a DSA layer does for its choice of tokens: run its own indexer (`full`) or
    reuse the choice of the last full DSA layer before it (`shared`); None for KDA.
    """

    index: int
    mixer: Mixer
    mlp: Mlp
    hyper_connection: bool
    is_mtp: bool
    indexer: Indexer | None

    def __post_init__(self) -> None:
        """Refuse a combination that no layer of the family has."""
        if self.mixer not in ("kda", "dsa") or self.mlp not in ("dense", "moe"):
            raise ConfigError(f"layer {self.index}: no {self.mixer!r} mixer with {self.mlp!r} FFN")
        if self.indexer not in ((None,) if self.mixer == "kda" else ("full", "shared")):
            raise ConfigError(f"layer {self.index}: {self.mixer} with indexer {self.indexer!r}")
        if self.hyper_connection == self.is_mtp:
            raise ConfigError(
                f"layer {self.index}: text layers have hyper-connections, the MTP layer has none"
            )
        if self.is_mtp and (self.mixer, self.mlp, self.indexer) != ("dsa", "moe", "full"):
            raise ConfigError(f"layer {self.index}: the MTP layer is DSA with its own indexer, MoE")


@dataclass(frozen=True)
class StateEntry:
    """What one layer remembers of a sequence: a recurrent state, or keys that grow with it."""

    layer: int
    kind: Literal["recurrent", "sparse_kv"]
    is_mtp: bool


@dataclass(frozen=True)
class Skeleton:
    """The text stack, and the MTP layer held apart from it."""

    layers: tuple[SkeletonLayer, ...]
    mtp: SkeletonLayer | None

    @classmethod
    def from_config(cls, config: ModelConfig) -> Skeleton:
        """Lay out every layer from the config's per-layer lists alone."""
        layers = tuple(
            SkeletonLayer(
                index=i,
                mixer=mixer,
                mlp=mlp,
                hyper_connection=True,
                is_mtp=False,
                indexer=indexer if mixer == "dsa" else None,
            )
            for i, (mixer, mlp, indexer) in enumerate(
                zip(config.layer_types, config.mlp_layer_types, config.indexer_types, strict=True)
            )
        )
        mtp = None
        if config.num_nextn_predict_layers:
            mtp = SkeletonLayer(
                index=config.num_hidden_layers,
                mixer="dsa",
                mlp="moe",
                hyper_connection=False,
                is_mtp=True,
                indexer="full",
            )
        return cls(layers, mtp)

    def residual_plan(self, layer: SkeletonLayer) -> tuple[str, ...]:
        """Trace sites of one layer, in the order they happen: attention site, then FFN site."""
        mixer, ffn = f"attn.{layer.mixer}", f"ffn.{layer.mlp}"
        if layer.hyper_connection:
            return (
                *("attn.collapse", "attn.norm", mixer, "attn.expand"),
                *("ffn.collapse", "ffn.norm", ffn, "ffn.expand"),
            )
        return ("attn.norm", mixer, "attn.add", "ffn.norm", ffn, "ffn.add")

    def final_plan(self) -> tuple[str, ...]:
        """Trace sites after the last text layer: plain mean of the streams, norm, head."""
        return ("final.mean", "final.norm", "final.head")

    def state_plan(self) -> tuple[StateEntry, ...]:
        """One entry for every layer, the MTP layer's last."""
        every = self.layers if self.mtp is None else (*self.layers, self.mtp)
        return tuple(
            StateEntry(
                layer=layer.index,
                kind="recurrent" if layer.mixer == "kda" else "sparse_kv",
                is_mtp=layer.is_mtp,
            )
            for layer in every
        )

    @property
    def kda_state_layers(self) -> tuple[int, ...]:
        """Indices of the layers that carry a recurrent state."""
        return tuple(entry.layer for entry in self.state_plan() if entry.kind == "recurrent")

    @property
    def kv_cache_layers(self) -> tuple[int, ...]:
        """Indices of the layers that cache keys per token, the MTP layer's included."""
        return tuple(entry.layer for entry in self.state_plan() if entry.kind == "sparse_kv")
