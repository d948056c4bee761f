"""What a call of the model needs on one device besides weights and state: an estimate.

A layer goes through stages, and the stage that holds most is what a call needs: what one stage
makes is gone before the next one begins. Of each stage the arrays are counted that grow with the
tokens of the call, or are as large as a weight; small ones are not. XLA holds some of them twice
and never makes others, so the sum is near what it allocates, and was above it wherever it was
compared: tests/sharding/test_device_budget.py says by how much.

Names of sizes are those of `ModelConfig.dims`; bytes of a number are `narrow` in activations and
`wide` in what is float32 (float64 in a float64 model).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pallas_kernels.sparse_mla.xla import GATHERED

from .checkpoint.orbax import StoredLeaf
from .config import ModelConfig
from .nn import dsa, indexer
from .nn.experts import block_plan
from .sharding import MeshShape, ShardingRules, array_pieces, part_of, parts_of
from .skeleton import Skeleton, SkeletonLayer
from .specs import Leaf

INDEX = 4  # bytes of a token's, a pool's or an expert's number

Terms = dict[str, int]


@dataclass(frozen=True)
class Call:
    """What a call brings, and what it finds.

    batch: rows, on all devices together. tokens: of each row. slots: that a row of its cache has.
    """

    batch: int
    tokens: int
    slots: int
    narrow: int

    @property
    def wide(self) -> int:
        """Bytes of what is float32 in every narrower model."""
        return max(self.narrow, 4)


@dataclass(frozen=True)
class Stages:
    """The stages of a layer in a call, on one of the devices that a mesh and rules make.

    model, arrays: the leaves and the arrays that they are, by path.
    """

    config: ModelConfig
    rules: ShardingRules
    mesh: MeshShape
    call: Call
    model: Mapping[str, Leaf]
    arrays: Mapping[str, Mapping[str, StoredLeaf]]

    @property
    def rows(self) -> int:
        """Rows of the batch that are on the device."""
        return self.rules.share(self.call.batch, "batch", self.mesh)

    @property
    def tokens(self) -> int:
        """Their tokens in the call."""
        return self.rows * self.call.tokens

    @property
    def projected_rows(self) -> int:
        """Rows of what comes of a product with a weight."""
        # Where weights are cut along what they are summed over, XLA adds up sums of all rows.
        return self.call.batch if self.rules.parts("embed", self.mesh) > 1 else self.rows

    @property
    def selected(self) -> int:
        """Tokens that a query attends to."""
        return self.config.index_topk + self.config.dims["P"] - 1

    def width(self, letters: str, logical: str) -> int:
        """A device's part of a product of sizes that is cut along a logical axis."""
        sizes = math.prod(self.config.dims[letter] for letter in letters.split("*"))
        return sizes // self.rules.parts(logical, self.mesh)

    def streams(self, copies: int) -> int:
        """Of the streams, which are there before a layer, between its sites, and behind it."""
        d = self.config.dims
        return copies * self.tokens * d["M"] * d["X"] * self.call.narrow

    def inputs(self) -> int:
        """A sublayer's input and output."""
        return 2 * self.tokens * self.config.dims["X"] * self.call.narrow

    def hyper_connection(self) -> Terms:
        """Streams times coefficients, before they are summed."""
        d = self.config.dims
        return {
            "streams": self.streams(3),
            "weighed streams": self.tokens * d["M"] * d["X"] * self.call.wide,
            "inputs": self.inputs(),
        }

    def kda(self) -> Terms:
        """q, k, v before and behind their convolution; g, outputs twice, their gate; the state."""
        narrow, wide = self.call.narrow, self.call.wide
        width = self.width("H*D", "kda_heads")
        numbers = self.projected_rows * self.call.tokens * width
        return {
            "streams": self.streams(2),
            "inputs": self.inputs(),
            "q, k, v": 6 * numbers * narrow,
            "g, outputs, gate": 4 * numbers * wide,
            "state": 2 * self.projected_rows * width * self.config.dims["D"] * wide,
        }

    def indexer(self) -> Terms:
        """Queries of all tokens; of a block of queries the scores of a tile and of a window."""
        d, narrow, wide = self.config.dims, self.call.narrow, self.call.wide
        queries = self.rows * min(self.call.tokens, indexer.QUERY_BLOCK)
        pools = self.call.slots // d["P"]
        window = min(indexer.POOL_WINDOW, pools) + min(self.config.index_topk // d["P"], pools)
        return {
            "streams": self.streams(2),
            "inputs": self.inputs(),
            "query latents": 2 * self.tokens * d["Rq"] * narrow,
            "index queries": 2 * self.tokens * d["HI"] * d["DI"] * narrow,
            "scores by head": 2 * queries * d["HI"] * min(indexer.POOL_TILE, pools) * wide,
            "scores of pools": 2 * queries * window * (wide + INDEX),
            "selection": 2 * self.tokens * self.selected * INDEX,
        }

    def dsa(self) -> Terms:
        """Outputs of all tokens; of a block of queries the latents, and part of the scores."""
        d, narrow, wide = self.config.dims, self.call.narrow, self.call.wide
        queries = self.rows * min(self.call.tokens, dsa.QUERY_BLOCK)
        heads = self.width("A", "heads")
        gathered = min(GATHERED, queries * self.selected * d["R"])
        return {
            "streams": self.streams(2),
            "inputs": self.inputs(),
            "query latents": 2 * self.tokens * d["Rq"] * narrow,
            "selection": 2 * self.tokens * self.selected * INDEX,
            "outputs": 2 * self.tokens * heads * d["V"] * narrow,
            "block of queries": queries * heads * (d["N"] + d["V"]) * narrow,
            "block of latents": 2 * queries * heads * d["R"] * (narrow + wide),
            "gathered latents": gathered * narrow,
            "scores": 2 * (gathered // d["R"]) * heads * wide,
        }

    def dense(self, letters: str) -> Terms:
        """A dense MLP, or the shared expert (`Is`)."""
        hidden = self.projected_rows * self.call.tokens * self.width(letters, "mlp")
        return {
            "streams": self.streams(3),
            "inputs": self.inputs(),
            "hidden": 3 * hidden * self.call.narrow,
        }

    def experts(self) -> Terms:
        """Tokens of all who share a device's experts, and sums of what comes of them."""
        X, narrow, wide = self.config.dims["X"], self.call.narrow, self.call.wide
        terms = {
            "streams": self.streams(3),
            "inputs": self.inputs(),
            "gathered tokens": self.shared_tokens * X * narrow,
            "sums": 2 * self.shared_tokens * X * wide,
            "one expert": 3 * self.width("I", "expert_mlp") * X * narrow,
        }
        if not self._cuts_of_experts:
            # Experts and the sum of what they say are calls of their own.
            pairs = self.shared_tokens * self.config.num_experts_per_tok
            terms["outputs"] = pairs * X * narrow
        return terms

    def in_advance(self, layer: SkeletonLayer) -> Terms:
        """What hangs on no token, and which XLA may make before all else, for every layer.

        The zeros that the loop over experts writes into and those that order its pairs of a token
        and an expert; and the parts of `kv_b`.
        """
        d, narrow = self.config.dims, self.call.narrow
        terms: Terms = {}
        if layer.mlp == "moe":
            pairs = self.shared_tokens * self.config.num_experts_per_tok
            blocks, block = block_plan(pairs, d["E"], self.width("E", "experts"))
            terms["expert blocks"] = blocks * block * d["X"] * narrow + 8 * pairs * INDEX
        if layer.mixer == "dsa":
            kv_b = self.width("A", "heads") * (d["N"] + d["V"]) * d["R"]
            terms["parts of kv_b"] = kv_b * narrow
        return terms

    @property
    def shared_tokens(self) -> int:
        """Tokens that pass through the experts of a device."""
        rows = self.projected_rows
        if rows < self.call.batch:
            cuts = self.rules.cuts("batch", self.mesh)
            rows *= parts_of(tuple(a for a in cuts if a in self._cuts_of_experts), self.mesh)
        return rows * self.call.tokens

    @property
    def _cuts_of_experts(self) -> tuple[str, ...]:
        experts, widths = (self.rules.cuts(axis, self.mesh) for axis in ("experts", "expert_mlp"))
        return experts + widths

    def logits(self) -> Terms:
        """The head's input, and the logits of one token a row."""
        rows, wide = self.projected_rows, self.call.wide
        return {
            "hidden": 2 * rows * self.config.dims["X"] * wide,
            "logits": 2 * rows * self.width("Vo", "vocab") * wide,
        }

    def reformed(self, below: str = "") -> Terms:
        """Weights below a path in another form than they lie in: decoded, or gathered.

        Not those of experts, which are decoded one by one, and whose sums are cut as they are. XLA
        may do so with all that hang on no token before all else.
        """
        narrow, terms = self.call.narrow, Counter[str]()
        for path, leaf in self.model.items():
            if not path.startswith(below) or leaf.role == "moe_expert" or path.startswith("mtp."):
                continue
            if path not in self.arrays[path]:
                pieces = array_pieces(self.rules, leaf, leaf.shape, self.mesh)
                part = part_of(leaf.shape, pieces, self.mesh)
                terms["decoded weights"] += math.prod(part) * narrow
            if "embed" in leaf.axes and self.rules.parts("embed", self.mesh) > 1:
                terms["gathered weights"] += math.prod(leaf.shape) * narrow
        return dict(terms)

    def of_layer(self, layer: SkeletonLayer) -> list[Terms]:
        """All stages of a layer."""
        mixer = [self.kda()] if layer.mixer == "kda" else [self.dsa()]
        if layer.indexer == "full":
            mixer.append(self.indexer())
        if layer.mlp == "dense":
            return [self.hyper_connection(), *mixer, self.dense("F")]
        return [self.hyper_connection(), *mixer, self.dense("Is"), self.experts()]


def call_terms(stages: Stages) -> Terms:
    """The fullest stage of any layer, where layers are calls of their own, as outside `jax.jit`."""
    every = []
    for layer in Skeleton.from_config(stages.config).layers:
        more = stages.in_advance(layer) | stages.reformed(f"layers.{layer.index}.")
        every += [stage | more for stage in stages.of_layer(layer)]
    return max(every, key=lambda stage: sum(stage.values()))


def step_terms(stages: Stages) -> Terms:
    """The fullest stage of a step that is one `jax.jit`, and what its layers have in advance."""
    layers = Skeleton.from_config(stages.config).layers
    every = [stages.logits(), *(stage for layer in layers for stage in stages.of_layer(layer))]
    fullest: Terms = max(every, key=lambda stage: sum(stage.values()))
    terms = Counter(fullest)
    for layer in layers:
        terms.update(stages.in_advance(layer))
    terms.update(stages.reformed())
    return dict(terms)
