"""Which elements of which stored array go into which tensor of a safetensors directory.

A tensor's elements are runs of elements of arrays: an expert of a stack, a third of the fused
convolution, the rows of a fused projection. Everything comes from the spec table and the ledger; no
JAX here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .. import specs
from ..config import ModelConfig
from ..errors import CheckpointError
from ..skeleton import Skeleton, SkeletonLayer
from ..specs import Leaf, Naming, StoredSpec, TensorSpec
from . import codecs
from .dtypes import decoded_dtype, leaf_dtype
from .header import DTYPES
from .layouts import ACTIVATION_SCALES, released_prefix
from .ledger import PASSTHROUGH, LedgerHeader, LedgerLine, LedgerSource
from .match import ACTIVATION_REASON
from .writer import Declared

CODES = {dtype: code for code, (_, dtype) in DTYPES.items() if dtype is not None}


class Run(NamedTuple):
    """`length` elements of an array from `begin` on; they are a tensor's from `start` on."""

    begin: int
    length: int
    name: str
    start: int


@dataclass(frozen=True)
class Decoded:
    """A leaf whose arrays, by key, are decoded to `dtype` on the way."""

    leaf: Leaf
    lines: dict[str, LedgerLine]
    dtype: np.dtype


@dataclass
class ExportPlan:
    """`tensors` in the order of a checkpoint; `runs` by array, or by leaf if that is `decoded`.

    `left_out` names the tensors that lost their meaning, by reason.
    """

    tensors: dict[str, Declared] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    decoded: dict[str, Decoded] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, declared: Declared, runs: Mapping[str, list[Run]]) -> None:
        """A tensor and the runs, by array, that it is made of."""
        if name in self.tensors:
            raise CheckpointError(f"{name}: two arrays of the checkpoint would be this tensor")
        self.tensors[name] = declared
        for path, members in runs.items():
            self.runs.setdefault(path, []).extend(members)


def plan_export(
    config: ModelConfig,
    header: LedgerHeader,
    ledger: Mapping[str, LedgerLine],
    naming: Naming,
    dtype: str,
) -> ExportPlan:
    """Lay out every tensor that the stored arrays give, under the names of `naming`.

    Raises CheckpointError, naming the array, for one that has no place in the model, and for
    quantised experts under transformers' names, which fuse them.
    """
    return _Planner(config, header, ledger, naming, dtype).run()


class _Planner:
    def __init__(
        self,
        config: ModelConfig,
        header: LedgerHeader,
        ledger: Mapping[str, LedgerLine],
        naming: Naming,
        dtype: str,
    ):
        # What is stored decides whether there is an MTP layer; a config may be silent about it.
        self.config = replace(config, num_nextn_predict_layers=int(header.mtp))
        self.ledger = ledger
        self.naming = naming
        self.dtype = dtype
        self.plan = ExportPlan()
        skeleton = Skeleton.from_config(self.config)
        self.layers: dict[int | None, SkeletonLayer] = {x.index: x for x in skeleton.layers}
        if skeleton.mtp is not None:
            self.layers[skeleton.mtp.index] = skeleton.mtp
        self.leaves = specs.leaves(self.config)
        # In its own naming a source comes back as it was, tensor for tensor.
        sources = [source for line in ledger.values() for source in line.sources]
        self.own = naming == header.naming
        self.short = self.own and any(released_prefix(s.name) != s.name for s in sources)
        self.kept: dict[str, LedgerSource] = {}
        if self.own and header.dtype == dtype == "stored":
            self.kept = {released_prefix(source.name): source for source in sources}

    def run(self) -> ExportPlan:
        for spec in specs.stored_tensors(self.config, self.naming, vision=False):
            self._spec(spec)
        for path, line in self.ledger.items():
            if path.startswith(f"{PASSTHROUGH}/"):
                self._carried(line)
        self._check_complete()
        return self.plan

    def _name(self, name: str) -> str:
        return name.replace(specs.TEXT_PREFIX, "model.", 1) if self.short else name

    def _spec(self, spec: StoredSpec) -> None:
        """The tensor of one row of the table, or of the rows that one fuses."""
        layer = None if spec.layer is None else self.layers[spec.layer]
        paths = [specs.leaf_path(row, layer) for row in spec.specs]
        lines = [self._lines(path) for path in paths]
        if not all(lines):
            return  # of a layer that was not converted
        if "" not in lines[0] and self.dtype == "stored":
            self._quantized(spec, lines[0])
            return
        dtypes = [self._leaf_dtype(path, line) for path, line in zip(paths, lines, strict=True)]
        dtype = CODES[max(dtypes, key=lambda dtype: dtype.itemsize)]
        if (kept := self.kept.get(spec.name)) is not None:
            dtype = kept.dtype
        name = self._name(spec.name)
        runs: dict[str, list[Run]] = {}
        for row, path in zip(spec.specs, paths, strict=True):
            runs.setdefault(path, []).extend(_runs(spec, row, self.leaves[path], name))
        self.plan.add(name, Declared(dtype, spec.shape), runs)

    def _lines(self, path: str) -> dict[str, LedgerLine]:
        """The ledger lines of a leaf's arrays by key; a plain leaf is one array, of key ""."""
        if path in self.ledger:
            return {"": self.ledger[path]}
        named = ((key, f"{path}.{key}") for key in codecs.KEYS)
        return {key: self.ledger[array] for key, array in named if array in self.ledger}

    def _leaf_dtype(self, path: str, lines: dict[str, LedgerLine]) -> np.dtype:
        leaf = self.leaves[path]
        if "" in lines:
            return leaf_dtype(leaf, np.dtype(lines[""].dtype), self.dtype)
        dtype = decoded_dtype(leaf, self.dtype)
        assert dtype is not None
        self.plan.decoded[path] = Decoded(leaf, lines, dtype)
        return dtype

    def _quantized(self, spec: StoredSpec, lines: dict[str, LedgerLine]) -> None:
        """The codes and scales of a weight, each its own tensor."""
        row = spec.specs[0]
        if row.transform == "stack" and spec.expert is None:
            raise CheckpointError(
                f"{lines['codes'].path}: quantised experts have no form under transformers' names, "
                f"which fuse them; ask for released names, or for dtype bfloat16"
            )
        for line in lines.values():
            index = spec.expert or 0
            source = line.sources[index]
            word = source.name.rpartition(".")[2]
            name = self._name(spec.name.removesuffix("weight") + word)
            count = math.prod(source.shape)
            run = Run(index * count, count, name, 0)
            self.plan.add(name, Declared(source.dtype, source.shape), {line.path: [run]})

    def _carried(self, line: LedgerLine) -> None:
        """Tensors that are not bound, each as it was."""
        begin = 0
        for source in line.sources:
            count = math.prod(source.shape)
            run = Run(begin, count, source.name, 0)
            begin += count
            if self.dtype != "stored" and source.name.endswith(ACTIVATION_SCALES):
                self.plan.left_out.setdefault(ACTIVATION_REASON, []).append(source.name)
                continue
            declared = Declared(source.dtype, source.shape)
            self.plan.add(source.name, declared, {line.path: [run]})

    def _check_complete(self) -> None:
        """Every element of every stored array has one place."""
        left_out = {name for names in self.plan.left_out.values() for name in names}
        sizes = {
            path: math.prod(line.shape)
            for path, line in self.ledger.items()
            if not left_out.intersection(source.name for source in line.sources)
        }
        for path, decoded in self.plan.decoded.items():
            for line in decoded.lines.values():
                del sizes[line.path]
            sizes[path] = math.prod(decoded.leaf.shape)
        for path, size in sizes.items():
            placed = sum(run.length for run in self.plan.runs.get(path, ()))
            if placed != size:
                raise CheckpointError(
                    f"{path}: {placed} of its {size} elements have a place in this model; "
                    f"the checkpoint is not of its config.json"
                )


def _runs(spec: StoredSpec, row: TensorSpec, leaf: Leaf, name: str) -> Iterator[Run]:
    """The elements of a leaf that go into a tensor for one of the rows that it carries."""
    size = math.prod(leaf.shape)
    if row.transform == "concat":
        index, count = row.native_part
        part = size // count
        fused = len(spec.specs) > 1
        yield Run(index * part, part, name, index * part if fused else 0)
    elif row.transform == "stack":
        index, count = row.native_part
        part = size // leaf.shape[0]
        if spec.expert is not None:
            yield Run(spec.expert * part, part, name, 0)
            return
        for expert in range(leaf.shape[0]):
            yield Run(expert * part, part, name, (expert * count + index) * part)
    else:
        yield Run(0, size, name, 0)
