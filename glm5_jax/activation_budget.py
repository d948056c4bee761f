"""What a call of the model needs on one device besides weights and state: an estimate.

A layer goes through stages, and the stage that holds most is what a call needs: what one stage
makes is gone before the next one begins. Of each stage the arrays are counted that grow with the
tokens of the call, or are as large as a weight; small ones are not. XLA holds some of them twice
and never makes others, so the sum is near what it allocates for CPU devices, and was above it
wherever it was compared: tests/sharding/test_device_budget.py says by how much. What it allocates
for GPUs was not compared.

Names of sizes are those of `ModelConfig.dims`; bytes of a number are `narrow` in activations and
`wide` in what is float32 (float64 in a float64 model).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pallas_kernels.sparse_mla.xla import GATHERED

from .checkpoint.orbax import StoredLeaf
from .config import ModelConfig
from .nn import dsa, indexer
from .nn.experts import block_plan
from .sharding import MeshShape, ShardingRules, array_pieces, part_of, parts_of
from .skeleton import Skeleton, SkeletonLayer
from .specs import Leaf

INDEX = 4  # bytes of a token's, a pool's or an expert's number

# Roles of weights that are used as float32 whatever they are stored as.
_WIDE = ("hyper_connection", "moe_router", "kda_conv")

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

    model, arrays: the leaves and the arrays that they are, by path. gathers: what XLA does with a
    weight that is cut along what it is summed over: gathers it, or adds up sums of all rows. A
    `sequence` that is cut is counted whole.
    """

    config: ModelConfig
    rules: ShardingRules
    mesh: MeshShape
    call: Call
    model: Mapping[str, Leaf]
    arrays: Mapping[str, Mapping[str, StoredLeaf]]
    gathers: bool = False

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
        return self.call.batch if self.embed_is_cut and not self.gathers else self.rows

    @property
    def embed_is_cut(self) -> bool:
        """Whether a device has a part of each sum alone (FSDP)."""
        return self.rules.parts("embed", self.mesh) > 1

    @property
    def in_blocks(self) -> int:
        """How often there is what DSA works through in blocks of queries: also block by block."""
        return 2 if self.call.tokens > dsa.QUERY_BLOCK else 1

    @property
    def selected(self) -> int:
        """Tokens that a query attends to."""
        return self.config.index_topk + self.config.dims["P"] - 1

    def width(self, letters: str, logical: str) -> int:
        """A device's part of a product of sizes that is cut along a logical axis."""
        sizes = math.prod(self.config.dims[letter] for letter in letters.split("*"))
        return sizes // self.rules.parts(logical, self.mesh)

    def site(self) -> Terms:
        """The streams before a layer, between its sites and behind it; a sublayer's in and out."""
        d, narrow = self.config.dims, self.call.narrow
        return {
            "streams": 3 * self.tokens * d["M"] * d["X"] * narrow,
            "inputs": 2 * self.tokens * d["X"] * narrow,
        }

    def hyper_connection(self) -> Terms:
        """Streams times coefficients, before they are summed, and sums before they are rounded."""
        d, wide = self.config.dims, self.call.wide
        of_streams = self.tokens * d["M"] * d["X"] * wide
        return {
            **self.site(),
            "weighed streams": of_streams,
            "unrounded streams": of_streams if wide > self.call.narrow else 0,
        }

    def kda(self) -> Terms:
        """q, k, v before and behind their convolution; g, outputs twice, their gate; the state."""
        narrow, wide = self.call.narrow, self.call.wide
        width = self.width("H*D", "kda_heads")
        numbers = self.projected_rows * self.call.tokens * width
        return {
            **self.site(),
            "q, k, v": 6 * numbers * narrow,
            "g, outputs, gate": 4 * numbers * wide,
            "state": 2 * self.projected_rows * width * self.config.dims["D"] * wide,
        }

    def indexer(self) -> Terms:
        """Queries of all tokens; scores of a block of queries and a tile, or a window, of pools."""
        d, narrow, wide = self.config.dims, self.call.narrow, self.call.wide
        queries = self.rows * min(self.call.tokens, indexer.QUERY_BLOCK)
        pools = self.call.slots // d["P"]
        tile, window = min(indexer.POOL_TILE, pools), min(indexer.POOL_WINDOW, pools)
        sliced_window, sliced_tile = window * (window < pools), tile * (tile < window)
        ranked = window + min(self.config.index_topk // d["P"], pools)
        return {
            **self.site(),
            "query latents": self.in_blocks * self.tokens * d["Rq"] * narrow,
            "index queries": self.in_blocks * self.tokens * d["HI"] * d["DI"] * narrow,
            "pool keys": self.rows * d["DI"] * (sliced_window * narrow + sliced_tile * wide),
            "scores by head": 2 * queries * d["HI"] * tile * wide,
            "scores of pools": 2 * queries * ranked * (wide + INDEX),
            "selection": 2 * self.tokens * self.selected * INDEX,
        }

    def dsa(self) -> Terms:
        """Outputs of all tokens; of a block of queries the latents, and part of the scores."""
        d, narrow, wide = self.config.dims, self.call.narrow, self.call.wide
        queries = self.rows * min(self.call.tokens, dsa.QUERY_BLOCK)
        heads = self.width("A", "heads")
        gathered = min(GATHERED, queries * self.selected * d["R"])
        return {
            **self.site(),
            "query latents": self.in_blocks * self.tokens * d["Rq"] * narrow,
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
            **self.site(),
            "hidden": 3 * hidden * self.call.narrow,
        }

    def experts(self) -> Terms:
        """Tokens of all who share a device's experts, and what each of their experts says."""
        X, narrow = self.config.dims["X"], self.call.narrow
        tokens = self.shared_tokens
        return {
            **self.site(),
            "gathered tokens": tokens * X * narrow if tokens > self.tokens else 0,
            "one expert": 3 * self.width("I", "expert_mlp") * X * narrow,
            "outputs": tokens * self.config.num_experts_per_tok * X * narrow,
        }

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
            experts = (self.rules.cuts(axis, self.mesh) for axis in ("experts", "expert_mlp"))
            cuts = sum(experts, ())
            batch = self.rules.cut(self.call.batch, "batch", self.mesh)
            shared = tuple(axis for axis in batch if axis in cuts)
            rows *= parts_of(shared, self.mesh)
        return rows * self.call.tokens

    def logits(self) -> Terms:
        """The head's input, and the logits of one token a row."""
        rows, wide = self.projected_rows, self.call.wide
        return {
            "hidden": 2 * rows * self.config.dims["X"] * wide,
            "logits": 2 * rows * self.width("Vo", "vocab") * wide,
        }

    def reformed(self, below: str = "") -> Terms:
        """Weights below a path in another form than they lie in: decoded, widened, or gathered.

        Not those of experts, which are decoded one by one, and whose sums are cut as they are. XLA
        may make all of them before all else, as they hang on no token.
        """
        narrow, wide, terms = self.call.narrow, self.call.wide, Counter[str]()
        largest = 0
        for path, leaf in self.model.items():
            if not path.startswith(below) or leaf.role == "moe_expert" or path.startswith("mtp."):
                continue
            pieces = array_pieces(self.rules, leaf, leaf.shape, self.mesh)
            size = math.prod(part_of(leaf.shape, pieces, self.mesh))
            if path not in self.arrays[path]:
                terms["decoded weights"] += size * narrow
            elif leaf.role in _WIDE and self.arrays[path][path].dtype.itemsize < wide:
                terms["widened weights"] += size * wide
            if self.gathers and "embed" in leaf.axes:
                whole = math.prod(leaf.shape) * narrow
                terms["gathered weights"] += whole
                largest = max(largest, whole)
        # As it comes, and in the order in which it is used.
        terms["gathered weights"] += largest
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
    for way in _ways(stages):
        for layer in Skeleton.from_config(way.config).layers:
            more = way.in_advance(layer) | way.reformed(f"layers.{layer.index}.")
            every += [stage | more for stage in way.of_layer(layer)]
    return _fullest(every)


def step_terms(stages: Stages) -> Terms:
    """The fullest stage of a step that is one `jax.jit`, and what its layers have in advance."""
    every = []
    for way in _ways(stages):
        layers = Skeleton.from_config(way.config).layers
        of_layers = [stage for layer in layers for stage in way.of_layer(layer)]
        terms = Counter(_fullest([way.logits(), *of_layers]))
        for more in (*map(way.in_advance, layers), way.reformed()):
            terms.update(more)
        every.append(dict(terms))
    return _fullest(every)


def _ways(stages: Stages) -> list[Stages]:
    """All that XLA may do; it gathers some weights and not others, so the most is near."""
    return [replace(stages, gathers=gathers) for gathers in {False, stages.embed_is_cut}]


def _fullest(stages: Iterable[Terms]) -> Terms:
    most = max(stages, key=lambda terms: sum(terms.values()))
    return {name: size for name, size in most.items() if size}
