"""The whole model on a small machine: a layer is read, run and dropped while the next is read.

Routed experts are read once the batch has chosen them, those alone, a group at a time. In memory
at once are the other weights of two layers, two groups of experts, and the activations. The
logits are those of the loaded model, bit for bit: both run in the compiled pieces of `layer`.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from glm5_jax.checkpoint.restore import LeafReader, open_leaves
from glm5_jax.inputs import checked_inputs
from glm5_jax.layer import DecoderLayer, expert_outputs, weigh_outputs
from glm5_jax.model import embed_streams, read_out, run_layers
from glm5_jax.nn.ffn import Experts, Routing
from glm5_jax.nn.params import Params, fill
from glm5_jax.nn.record import Record
from glm5_jax.nn.types import (
    Activations,
    GivenMask,
    Implementation,
    Logits,
    Mask,
    Selection,
    Streams,
    Tokens,
)
from glm5_jax.skeleton import Skeleton, SkeletonLayer
from glm5_jax.specs import Leaf

Progress = Callable[[int, int, str], None]
Arrays = Mapping[str, np.ndarray]
EXPERT_GROUP = 32


def stream_layers(
    path: str | os.PathLike[str],
    dtype: str = "stored",
    expert_group: int = EXPERT_GROUP,
    progress: Progress | None = None,
) -> LayerStream:
    """The text model of a checkpoint, to be run from its directory in little memory.

    path, dtype: as `load` takes them. expert_group: how many routed experts are read and run at
    once. progress is called with (layers done, layers in all, label).

    Everything that headers can tell is checked here, as `load` does; no weight is read yet.

    Raises:
        CheckpointError: as `load` does; later, for what cannot be read when its turn comes.
        ConfigError: its config.json describes no model of this family.
        ValueError: `expert_group` is not positive.
    """
    if expert_group < 1:
        raise ValueError(f"expert_group: expected a positive number of experts, got {expert_group}")
    return LayerStream(open_leaves(path, dtype), expert_group, progress)


class LayerStream:
    """A text model that is read while it runs, anew at every call: see `stream_layers`.

        stream = glm.stream_layers("ckpt/")
        logits = stream(tokens)  # what glm.load("ckpt/")(tokens) is

        streams = stream.embed(tokens)
        for plan, layer in stream.layers():
            streams, selection = layer(streams, mask)  # layer.module holds its weights
        logits = stream.read_out(streams)

    (Where `plan.indexer` is "shared", `layer` also wants the last selection that was not None.)
    There is no MTP head in it.
    """

    def __init__(self, leaves: LeafReader, expert_group: int, progress: Progress | None):
        self.config = leaves.config
        self.skeleton = Skeleton.from_config(self.config)
        self._leaves = leaves
        self._expert_group = expert_group
        self._progress = progress

    @property
    def dtype(self) -> np.dtype:
        """That of the activations, which is the embedding's."""
        return self._leaves.dtype_of("embed_tokens")

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that were read so far."""
        return self._leaves.bytes_read

    def __call__(
        self,
        tokens: Tokens,
        mask: GivenMask | None = None,
        *,
        record: Record | None = None,
        implementation: Implementation = None,
    ) -> Logits:
        """Logits of every position, with the arguments of `TextModel`: see there.

        Raises CheckpointError for weights that cannot be read, ValueError for other inputs than
        `TextModel` takes.
        """
        tokens, mask = checked_inputs(tokens, mask, self.config.vocab_size)
        streams = self.embed(tokens, record)
        with closing(self.layers()) as layers:
            streams = run_layers(layers, streams, mask, record, implementation)
        return self.read_out(streams, record)

    def embed(self, tokens: Tokens, record: Record | None = None) -> Streams:
        """The streams before the first layer; only the rows of these tokens are read."""
        ids, places = np.unique(np.asarray(tokens), return_inverse=True)
        # As many rows as there are tokens, whichever occur twice: one compilation.
        table = self._leaves.read("embed_tokens", ids.tolist(), room=places.size)
        places = places.reshape(np.shape(tokens)).astype(np.int32)
        rows = jax.device_put(table["embed_tokens"])
        return embed_streams(rows, places, streams=self.config.hc_mult, record=record)

    def layers(self) -> Generator[tuple[SkeletonLayer, StreamedLayer]]:
        """Every layer with its place in the skeleton, in order, the next one read meanwhile.

        A layer can be used until the next one is asked for. Ending the iteration ends the reading.
        """
        plans = self.skeleton.layers
        with _reading_thread() as thread:
            coming = self._begin(thread, plans[0])
            for plan, following in itertools.zip_longest(plans, plans[1:]):
                layer = StreamedLayer(plan, self._leaves, coming, self._expert_group, thread)
                coming = [] if following is None else self._begin(thread, following)
                try:
                    yield plan, layer
                finally:
                    layer.drop()
                if self._progress is not None:
                    self._progress(plan.index + 1, len(plans), f"layer {plan.index}")

    def read_out(self, streams: Streams, record: Record | None = None) -> Logits:
        """The logits after the last layer."""
        norm, head = self.leaf("norm"), self.leaf("lm_head")
        return read_out(streams, norm, head, eps=self.config.rms_norm_eps, record=record)

    def layer(self, index: int) -> DecoderLayer:
        """One layer with all of its weights, routed experts included, read whole."""
        plan = self.skeleton.layers[index]
        at = _layer_path(plan)
        arrays: dict[str, np.ndarray] = {}
        for path in self._leaves.leaves:
            if path.startswith(at):
                arrays |= self._leaves.read(path)
        params = _params(self._leaves, self._leaves.leaves, arrays).at(at[:-1])
        module = DecoderLayer(plan, self.config, params)
        fill(module, arrays, at)
        return module

    def leaf(self, path: str) -> jax.Array:
        """One array from outside of the layers: `embed_tokens`, `norm` or `lm_head`."""
        return jax.device_put(self._leaves.read(path)[path])

    def _begin(self, thread: Executor, plan: SkeletonLayer) -> list[Future[Arrays]]:
        at, experts = _layer_path(plan), _experts_path(plan)
        paths = [p for p in self._leaves.leaves if p.startswith(at) and not p.startswith(experts)]
        return [thread.submit(self._leaves.read, path) for path in paths]


class StreamedLayer:
    """A layer while it is in memory. `module` is filled but for its routed experts."""

    def __init__(
        self,
        plan: SkeletonLayer,
        leaves: LeafReader,
        coming: Iterable[Future[Arrays]],
        expert_group: int,
        thread: Executor,
    ):
        arrays = _arrived(coming)
        self.plan = plan
        self._leaves = leaves
        self._expert_group = expert_group
        self._thread = thread
        params = _params(leaves, leaves.leaves, arrays).at(_layer_path(plan)[:-1])
        self.module: DecoderLayer | None = DecoderLayer(plan, leaves.config, params)
        fill(self.module, arrays, _layer_path(plan))

    def __call__(
        self,
        streams: Streams,
        mask: Mask,
        selection: Selection | None = None,
        record: Record | None = None,
        implementation: Implementation = None,
    ) -> tuple[Streams, Selection | None]:
        """What `DecoderLayer` returns; the routed experts are read on the way, and dropped."""
        if self.module is None:
            raise ValueError(
                f"layer {self.plan.index} is not in memory any more; use it before the next is "
                f"asked for, or the iteration ends"
            )
        run_experts = self._run_experts if self.plan.mlp == "moe" else None
        streams, chosen = self.module(
            *(streams, mask, selection, record, run_experts), implementation
        )
        return jax.block_until_ready(streams), chosen

    def drop(self) -> None:
        """Let go of the weights."""
        self.module = None

    def _run_experts(self, x: Activations, routing: Routing) -> Activations:
        """The sum of the chosen experts, run group after group, the next one read meanwhile."""
        chosen = routing.experts
        total = self._leaves.config.n_routed_experts
        # The same for any batch of this shape: one compilation.
        size = min(self._expert_group, total, chosen.size)
        used = np.unique(np.asarray(chosen))
        groups = [used[start : start + size] for start in range(0, len(used), size)]
        outputs = jnp.zeros((*chosen.shape, x.shape[-1]), x.dtype)
        coming = self._begin(groups[0], size)
        for group, following in itertools.zip_longest(groups, groups[1:]):
            experts = self._experts(_arrived(coming), size)
            coming = [] if following is None else self._begin(following, size)
            place = np.full(total, size, np.int32)
            place[group] = np.arange(len(group))
            here = jnp.asarray(place)[chosen]
            outputs = _merge(outputs, expert_outputs(experts, x, here), here < size)
            # Done with the group before the next but one is begun.
            outputs.block_until_ready()
            del experts
        return weigh_outputs(outputs, routing.weights)

    def _begin(self, group: np.ndarray, size: int) -> list[Future[Arrays]]:
        paths = [path for path in self._leaves.leaves if path.startswith(_experts_path(self.plan))]
        return [
            self._thread.submit(self._leaves.read, path, group.tolist(), size) for path in paths
        ]

    def _experts(self, arrays: Arrays, size: int) -> Experts:
        at = _experts_path(self.plan)
        table = {
            path: leaf._replace(shape=(size, *leaf.shape[1:]))
            for path, leaf in self._leaves.leaves.items()
            if path.startswith(at)
        }
        experts = Experts(self._leaves.config, _params(self._leaves, table, arrays).at(at[:-1]))
        fill(experts, arrays, at)
        return experts


@functools.partial(jax.jit, donate_argnums=0)
def _merge(
    outputs: Float[Array, "B T k X"],
    of_group: Float[Array, "B T k X"],
    here: Bool[Array, "B T k"],
) -> Float[Array, "B T k X"]:
    return jnp.where(here[..., None], of_group, outputs)


@contextmanager
def _reading_thread() -> Iterator[Executor]:
    """One thread that reads; when the context ends, it ends with the leaf that it is at."""
    thread = ThreadPoolExecutor(1, "glm5-jax-reader")
    try:
        yield thread
    finally:
        thread.shutdown(wait=True, cancel_futures=True)


def _arrived(coming: Iterable[Future[Arrays]]) -> dict[str, np.ndarray]:
    return {path: array for future in coming for path, array in future.result().items()}


def _params(leaves: LeafReader, table: Mapping[str, Leaf], arrays: Arrays) -> Params:
    quantization = leaves.config.quantization
    block = None if quantization is None else quantization.weight_block_size
    return Params(table, arrays, block, leaves.dtype_of("embed_tokens"))


def _layer_path(plan: SkeletonLayer) -> str:
    return f"layers.{plan.index}."


def _experts_path(plan: SkeletonLayer) -> str:
    return f"layers.{plan.index}.ffn.experts."
