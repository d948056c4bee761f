"""Every stored tensor against the spec table: the one place where names meet rows.

`audit` reports a `Match`; `bind` makes leaves of it. No JAX here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .. import specs
from ..config import ModelConfig
from ..errors import CheckpointError
from ..skeleton import Skeleton, SkeletonLayer
from ..specs import Naming, StoredSpec, TensorSpec
from .header import StoredTensor
from .layouts import (
    ACTIVATION_SCALES,
    PLAIN,
    WEIGHT_SCALES,
    Scheme,
    WrongTensor,
    detect_naming,
    read_quantized,
    released_prefix,
)
from .reader import Checkpoint

VISION_REASON = "vision tower: carried, not bound"
MTP_REASON = "MTP layer: declined"
COPY_REASON = "copy of the embedding or head in the MTP layer: the main one is used"
ACTIVATION_REASON = "activation scale: never touches a weight"
SHARED_REASON = "indexer of a layer that shares another layer's choice: unused"


class Entry(NamedTuple):
    """An expected tensor that is there: its row, its data, and its scales if quantised."""

    spec: StoredSpec
    tensor: StoredTensor
    scheme: Scheme | None = None
    scales: tuple[StoredTensor, ...] = ()


@dataclass
class Match:
    """Outcome for a whole checkpoint; names are those on disk, missing ones as they would be."""

    naming: Naming
    mtp: SkeletonLayer | None
    layers: dict[int, SkeletonLayer]
    entries: list[Entry] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[WrongTensor] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    widened: list[str] = field(default_factory=list)
    accepted_bf16: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Nothing missing, unexpected, wrong or contradictory."""
        return not (self.missing or self.unexpected or self.wrong or self.contradictions)

    def problems(self) -> list[str]:
        """Every fault as one line, contradictions first."""
        return problem_lines(self.contradictions, self.wrong, self.missing, self.unexpected)


def problem_lines(
    contradictions: Iterable[str],
    wrong: Iterable[WrongTensor],
    missing: Iterable[str],
    unexpected: Iterable[str],
) -> list[str]:
    """Faults as lines that each name their tensor."""
    return [
        *contradictions,
        *map(str, wrong),
        *(f"{name}: missing" for name in missing),
        *(f"{name}: unexpected, no such tensor in this model" for name in unexpected),
    ]


def parse_layers(text: str) -> frozenset[int]:
    """Layer indices from `0-3,45`; CheckpointError if it isn't such a list."""
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (not dash or last.isdecimal())):
            raise CheckpointError(f"layers: expected a list like 0-3,45, got {text!r}")
        low, high = int(first), int(last or first)
        if high < low or high > 100_000:
            raise CheckpointError(f"layers: {part.strip()!r} is not a range of layers")
        chosen.update(range(low, high + 1))
    return frozenset(chosen)


Layers = str | int | Collection[int] | None


def resolve_layers(layers: Layers, config: ModelConfig) -> frozenset[int] | None:
    """The layers asked for as a set within the config's; None stands for all of them.

    One index, some, or text like `0-3,45`.
    """
    if layers is None:
        return None
    if isinstance(layers, str):
        chosen = parse_layers(layers)
    else:
        chosen = frozenset([layers] if isinstance(layers, int) else layers)
    last = config.num_hidden_layers
    if outside := sorted(index for index in chosen if not 0 <= index <= last):
        raise CheckpointError(
            f"layers: {outside[0]} is not a layer; text layers are 0-{last - 1}, MTP is {last}"
        )
    return chosen


def match(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    layers: Layers = None,
    mtp: bool = True,
    allow_bf16: bool = False,
) -> Match:
    """Put every stored tensor against the table.

    layers: only these must be there (the tensors outside the layers always must). mtp: False
    counts the MTP layer as ignored. allow_bf16: take BF16 where F32 is required, and say so.
    """
    return _Matcher(checkpoint, config, resolve_layers(layers, config), mtp, allow_bf16).run()


class _Matcher:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        layers: frozenset[int] | None,
        mtp: bool,
        allow_bf16: bool,
    ) -> None:
        self.config = config
        self.wanted = layers
        self.bind_mtp = mtp
        self.allow_bf16 = allow_bf16
        quantization = config.quantization
        self.block = None if quantization is None else quantization.weight_block_size
        self.left: dict[str, StoredTensor] = {}
        self.short_prefix = False
        skeleton = Skeleton.from_config(config)
        self.result = Match("released", None, {layer.index: layer for layer in skeleton.layers})
        self.result.notices += checkpoint.notices
        for name, tensor in checkpoint.tensors.items():
            full = released_prefix(name)
            self.short_prefix |= full != name
            other = self.left.setdefault(full, tensor)
            if other is not tensor:
                self.result.contradictions.append(
                    f"{other.name} and {name} are one tensor under two prefixes; keep one"
                )

    def run(self) -> Match:
        result, config = self.result, self.config
        text = list(result.layers.values())
        result.mtp = self._find_mtp()
        result.naming = self._naming_of(text)
        self._check_kinds(text)

        self._take(specs.outside_tensors(config), required=True)
        for layer in text:
            stored = specs.tensors_of_layer(layer, config, result.naming)
            self._take(stored, required=self._wants(layer.index))
            if layer.indexer == "shared":
                leftover = specs.stored_rows(specs.INDEXER, config, layer)
                self._take(leftover, required=False, reason=SHARED_REASON)
        self._take_mtp()
        self._take_vision()
        self._sort_leftovers()
        return result

    def _wants(self, index: int) -> bool:
        return self.wanted is None or index in self.wanted

    def _as_stored(self, name: str) -> str:
        """How a missing tensor would be called here: in the prefix that the others have."""
        return name.replace(specs.TEXT_PREFIX, "model.", 1) if self.short_prefix else name

    def _naming_of(self, layers: Iterable[SkeletonLayer]) -> Naming:
        def stored(naming: Naming) -> Iterator[StoredSpec]:
            for layer in layers:
                yield from specs.tensors_of_layer(layer, self.config, naming)

        return detect_naming(self.left, stored("released"), stored("native"))

    # Which layers there are.

    def _present(self, rows: Iterable[TensorSpec], index: int) -> list[str]:
        """Rows that are there in either naming and either weight suffix, by their last words."""
        found = []
        for row in rows:
            for template in {row.name, row.native or row.name}:
                name = template.replace("{layer}", str(index)).replace("{expert}", "0")
                if name in self.left or name.removesuffix("weight") + "weight_packed" in self.left:
                    found.append(name.partition(f"layers.{index}.")[2])
        return found

    def _find_mtp(self) -> SkeletonLayer | None:
        """The MTP layer, found by its names: the config may promise it or be silent about it."""
        index = self.config.num_hidden_layers
        own = self._present(specs.MTP, index)
        foreign = self._present(specs.HYPER_CONNECTION + specs.KDA[:-1], index)
        body = self._present(specs.LAYER_NORMS + specs.DSA + specs.MOE, index)
        if not own and (foreign or not body):
            if foreign:
                self.result.contradictions.append(
                    f"layer {index} holds {foreign[0]}, but config.json says "
                    f"num_hidden_layers={index} and the MTP layer has no such tensor"
                )
            if self.config.num_nextn_predict_layers and self.wanted is None:
                self.result.notices.append(
                    f"MTP layer {index} is not in the checkpoint, though config.json has "
                    f"num_nextn_predict_layers={self.config.num_nextn_predict_layers}"
                )
            if self.wanted is None or index not in self.wanted:
                return None
        elif not self.config.num_nextn_predict_layers:
            self.result.notices.append(
                f"MTP layer {index} is in the checkpoint, though config.json has "
                f"num_nextn_predict_layers=0"
            )
        return SkeletonLayer(index, "dsa", "moe", False, True, "full")

    def _check_kinds(self, layers: Iterable[SkeletonLayer]) -> None:
        """Refuse a layer whose tensors are of another kind than the config says."""
        kda = [row for row in specs.KDA if not row.name.endswith("o_proj.weight")]
        dsa = [row for row in specs.DSA if not row.name.endswith("o_proj.weight")]
        pairs: dict[str, dict[str, Sequence[TensorSpec]]] = {
            "layer_types": {"kda": kda, "dsa": dsa},
            "mlp_layer_types": {"dense": specs.DENSE, "moe": specs.MOE},
        }
        for layer in layers:
            for key, kinds in pairs.items():
                said = layer.mixer if key == "layer_types" else layer.mlp
                found = {kind: self._present(rows, layer.index) for kind, rows in kinds.items()}
                seen = max(found, key=lambda kind: len(found[kind]))
                if len(found[seen]) > len(found[said]):
                    self.result.contradictions.append(
                        f"layer {layer.index}: config.json ({key}) says {said}, its tensors are "
                        f"those of {seen} ({found[seen][0]}); the config is not this checkpoint's"
                    )
            if own := self._present(specs.MTP, layer.index):
                self.result.contradictions.append(
                    f"layer {layer.index} holds the MTP tensor {own[0]}, but config.json says "
                    f"num_hidden_layers={self.config.num_hidden_layers}"
                )

    # Tensors against rows.

    def _take(
        self, stored: Iterable[StoredSpec], *, required: bool, reason: str | None = None
    ) -> None:
        """Claim the tensors of these rows; `reason` counts them as ignored too."""
        left, entries = self.left, self.result.entries
        absent = []
        ignored = self.result.ignored.setdefault(reason, []) if reason else []
        for spec in stored:
            tensor = left.get(spec.name)
            if tensor is not None and tensor.dtype == spec.dtype and tensor.shape == spec.shape:
                del left[spec.name]
                entry = Entry(spec, tensor)
            else:
                taken = self._take_otherwise(spec)
                if taken is None:
                    absent.append(self._missing_name(spec))
                    continue
                entry = taken
            if reason is not None:
                ignored += [entry.tensor.name, *(scale.name for scale in entry.scales)]
            if reason != SHARED_REASON:
                entries.append(entry)
        if reason and not ignored:
            del self.result.ignored[reason]
        if required:
            self.result.missing += absent

    def _missing_name(self, spec: StoredSpec) -> str:
        """Compressed-tensors' own scale left alone tells that the packed form is the lost one."""
        stem = spec.name.removesuffix("weight")
        packed = spec.quantizable and stem + "weight_global_scale" in self.left
        return self._as_stored(stem + "weight_packed" if packed else spec.name)

    def _take_otherwise(self, spec: StoredSpec) -> Entry | None:
        """Claim a tensor that is quantised, widened, or wrong."""
        if spec.quantizable and (found := read_quantized(spec, self.left, self.block)):
            for tensor in (found.codes, *found.scales):
                del self.left[released_prefix(tensor.name)]
            self.result.missing += [self._as_stored(name) for name in found.missing]
            self.result.wrong += found.wrong
            return Entry(spec, found.codes, found.scheme, found.scales)
        if spec.name not in self.left:
            return None
        tensor = self.left.pop(spec.name)
        came = f"{tensor.dtype} {list(tensor.shape)}"
        if tensor.shape != spec.shape or tensor.dtype not in PLAIN:
            dtypes = "BF16 or F32" if spec.dtype == "BF16" else "F32"
            expected = f"{dtypes} {list(spec.shape)}"
            self.result.wrong.append(WrongTensor(tensor.name, expected, came, tensor.file))
        elif spec.dtype == "BF16":
            self.result.widened.append(tensor.name)
        elif self.allow_bf16:
            self.result.accepted_bf16.append(tensor.name)
        else:
            expected = (
                f"F32 {list(spec.shape)}, or allow_bf16 (--allow-bf16) to take rounded values"
            )
            self.result.wrong.append(WrongTensor(tensor.name, expected, came, tensor.file))
        return Entry(spec, tensor)

    def _take_mtp(self) -> None:
        layer = self.result.mtp
        if layer is None:
            return
        naming = self._naming_of([layer])
        stored = specs.tensors_of_layer(layer, self.config, naming)
        reason = None if self.bind_mtp else MTP_REASON
        self._take(stored, required=self._wants(layer.index), reason=reason)
        copies = specs.stored_rows(specs.MTP_COPIES, self.config, layer)
        self._take(copies, required=False, reason=COPY_REASON)

    def _take_vision(self) -> None:
        names = [name for name in self.left if name.startswith(specs.VISION_PREFIX)]
        if not names:
            if self.config.vision is not None:
                self.result.notices.append("the vision tower is not in the checkpoint")
            return
        if self.config.vision is not None:
            stored = specs.vision_tensors(self.config)
            self._take(stored, required=self.wanted is None, reason=VISION_REASON)
            return
        self.result.notices.append("vision tensors are unchecked: config.json has no vision_config")
        rows = specs.VISION[:1]
        for name in names:
            tensor = self.left.pop(name)
            spec = StoredSpec(name, tensor.shape, tensor.dtype, "vision", None, None, rows)
            self.result.entries.append(Entry(spec, tensor))
            self.result.ignored.setdefault(VISION_REASON, []).append(tensor.name)

    def _sort_leftovers(self) -> None:
        """What no row claimed: activation scales are ignored, anything else is unexpected."""
        if not self.left:
            return
        stems = {entry.spec.name.removesuffix("weight"): entry for entry in self.result.entries}
        modules = {stem.rsplit(".", depth)[0] for stem in stems for depth in (1, 2)}
        for name, tensor in self.left.items():
            module, _, kind = name.rpartition(".")
            if kind in ACTIVATION_SCALES and module in modules:
                self.result.ignored.setdefault(ACTIVATION_REASON, []).append(tensor.name)
                continue
            self.result.unexpected.append(tensor.name)
            plain = stems.get(f"{module}.")
            if kind in WEIGHT_SCALES and plain is not None and plain.scheme is None:
                weight = plain.tensor
                expected = f"quantised codes beside {kind}, or no scale"
                came = f"{weight.dtype} {list(weight.shape)}"
                self.result.wrong.append(WrongTensor(weight.name, expected, came, weight.file))
