"""A safetensors directory becomes an Orbax directory, a few leaves at a time.

Each leaf is read, hashed, cast if asked, and written; no more than the largest one is held at
once, nor more than `GROUP_BYTES` of small ones. What is complete survives a kill, see `staging`.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..errors import CheckpointError
from ..specs import LAYER_PREFIX
from .audit import AuditReport, audit_checkpoint
from .bind import BoundArray, BoundLeaf, bind, passthrough, read_array, read_leaf
from .dtypes import check_dtype, decoded_dtype, leaf_dtype
from .header import DTYPES, StoredTensor
from .layouts import released_prefix
from .ledger import (
    FORMAT,
    PASSTHROUGH,
    LedgerHeader,
    LedgerLine,
    LedgerSource,
    package_versions,
    sha256,
    tree_keys,
)
from .match import MTP_REASON, resolve_layers
from .orbax import is_orbax, stored_leaves
from .reader import Checkpoint, open_checkpoint
from .staging import CONFIG, Staging

# Leaves below this size are written together: a save has a fixed cost, and a merge one per leaf.
GROUP_BYTES = 128 * 2**20

HASHERS = 2  # a stacked leaf is hashed as a whole and source by source
LAYERS_REASON = "not of the layers asked for"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, repr=False)
class ConvertReport:
    """What a conversion wrote.

    `leaves` are those of the parameter tree, `passthrough` the tensors carried beside it, `bytes`
    both. `not_carried` names, by reason, the source tensors that are in neither. `cast` counts
    leaves whose dtype changed, `resumed` the groups that an earlier, interrupted run had finished.
    `seconds` is for this run.
    """

    destination: Path
    dtype: str
    leaves: int
    passthrough: int
    bytes: int
    cast: int
    resumed: int
    seconds: float
    audit: AuditReport
    not_carried: dict[str, list[str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The report for a terminal."""
        rate = self.bytes / max(self.seconds, 1e-9) / 1e6
        lines = [
            f"{self.destination}: {self.leaves:,} leaves and {self.passthrough:,} tensors passed "
            f"through, {self.bytes:,} bytes in {self.seconds:.1f} s ({rate:,.0f} MB/s)",
            f"dtype {self.dtype} · {self.cast:,} leaves cast",
        ]
        if self.resumed:
            lines.append(f"continued: {self.resumed:,} groups were finished by an earlier run")
        lines += [f"not carried {len(names):,}: {why}" for why, names in self.not_carried.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Item:
    """One array to store: of a leaf, a leaf to decode, or a tensor that is carried as it is."""

    path: str
    source: BoundArray | BoundLeaf | StoredTensor
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def cast(self) -> bool:
        """Whether the dtype is another than that of the source."""
        return isinstance(self.source, BoundLeaf) or (
            isinstance(self.source, BoundArray) and self.source.dtype != self.dtype
        )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: str = "stored",
    layers: str | Collection[int] | None = None,
    mtp: bool = True,
    force: bool = False,
    allow_bf16: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a safetensors checkpoint into an Orbax directory that plain Orbax restores.

    dtype: ``stored`` keeps every leaf as it is; else see `dtypes.leaf_dtype` for what stays
    float32 whatever is asked. layers: convert those layers (indices, or text like ``0-3,45``) and
    what lies outside the layers. mtp: also the MTP layer, if there is one. force: replace `dst` if
    it is an Orbax directory; the old one stays until the new one is complete. allow_bf16: accept
    rounded values where float32 is required. progress is called with (bytes, bytes in all, label).

    Tensors that are not bound (vision, copies, activation scales) are carried verbatim under
    ``passthrough/``; config.json and the ledger are written beside the arrays. An interrupted
    conversion leaves nothing at `dst`, and the same call continues it.

    Raises CheckpointError before any work if the source is incomplete or `dst` is in the way.
    """
    started = time.monotonic()
    check_dtype(dtype)
    src, dst = Path(src), Path(dst).resolve()
    _check_destination(src, dst, force)
    checkpoint = open_checkpoint(src)
    config = checkpoint.config
    layers = resolve_layers(layers, config)
    report = audit_checkpoint(checkpoint, config, layers, allow_bf16)
    bound = bind(checkpoint, config, mtp=mtp, layers=layers, allow_bf16=allow_bf16)
    items = [item for leaf in bound.values() for item in _bound_items(leaf, dtype)]
    carried = passthrough(checkpoint, config, mtp=mtp, layers=layers)
    items += [_carried_item(tensor) for tensor in carried.values()]
    groups = _group(items)

    has_mtp = any(path.startswith("mtp.") for path in bound)
    header = LedgerHeader(
        format=FORMAT,
        naming=report.naming,
        quantization=report.quantization,
        dtype=dtype,
        layers=None if layers is None else tuple(sorted(layers)),
        mtp=has_mtp,
        leaves=len(items),
        versions=package_versions(),
    )
    config_bytes = (checkpoint.directory / CONFIG).read_bytes()
    identity = _identity(checkpoint, header, config_bytes)
    staging = Staging(dst, identity, header, config_bytes, restart=force)
    resumed = len(staging.finished & groups.keys())
    total, done = sum(item.nbytes for item in items), 0
    try:
        for group, members in groups.items():
            if group not in staging.finished:
                _save(staging, checkpoint, group, members)
            done += sum(item.nbytes for item in members)
            if progress is not None:
                progress(done, total, group)
        _check_merged(staging.merge(), items)
        staging.place()
    finally:
        staging.close()
    return ConvertReport(
        destination=dst,
        dtype=dtype,
        leaves=len(bound),
        passthrough=len(carried),
        bytes=total,
        cast=sum(item.cast for item in items),
        resumed=resumed,
        seconds=time.monotonic() - started,
        audit=report,
        not_carried=_left_behind(checkpoint, config, bound, carried, mtp),
    )


def _check_destination(src: Path, dst: Path, force: bool) -> None:
    source = src.resolve()
    source = source.parent if source.is_file() else source
    if dst == source or source.is_relative_to(dst):
        raise CheckpointError(f"{dst}: is or holds the source {src}; choose another destination")
    if dst.is_relative_to(source):
        raise CheckpointError(f"{dst}: lies inside the source {src}; choose another destination")
    if not os.path.lexists(dst):
        return
    if not is_orbax(dst):
        raise CheckpointError(
            f"{dst}: exists and is not an Orbax directory; choose another destination"
        )
    if not force:
        raise CheckpointError(f"{dst}: exists already; force (--force) replaces it")


def _bound_items(bound: BoundLeaf, dtype: str) -> Iterator[_Item]:
    """A plain leaf, a quantised one decoded, or the arrays of one that stays as it is stored."""
    leaf = bound.leaf
    if bound.quantized and (decoded := decoded_dtype(leaf, dtype)) is not None:
        yield _Item(leaf.path, bound, decoded, leaf.shape)
        return
    for array in bound.arrays:
        kept = array.dtype if bound.quantized else leaf_dtype(leaf, array.dtype, dtype)
        yield _Item(array.path, array, kept, array.shape)


def _carried_item(tensor: StoredTensor) -> _Item:
    stored = DTYPES[tensor.dtype][1]
    if stored is None:
        raise CheckpointError(f"{tensor.file}: {tensor.name}: Orbax has no {tensor.dtype} arrays")
    return _Item(f"{PASSTHROUGH}/{tensor.name}", tensor, stored, tensor.shape)


def _left_behind(
    checkpoint: Checkpoint,
    config: ModelConfig,
    bound: dict[str, BoundLeaf],
    carried: Collection[str],
    mtp: bool,
) -> dict[str, list[str]]:
    """Names of the source tensors that the destination does not hold, by reason."""
    used = {
        tensor.name
        for leaf in bound.values()
        for source in leaf.sources
        for tensor in (source.tensor, *source.scales)
    }
    declined = LAYER_PREFIX.format(layer=config.num_hidden_layers)
    left: dict[str, list[str]] = {}
    for name in checkpoint.tensors.keys() - used - set(carried):
        of_mtp = not mtp and released_prefix(name).startswith(declined)
        left.setdefault(MTP_REASON if of_mtp else LAYERS_REASON, []).append(name)
    return {reason: sorted(names) for reason, names in left.items()}


def _group(items: list[_Item]) -> dict[str, list[_Item]]:
    """Leaves that are saved together: of one layer, in order, up to `GROUP_BYTES` of them."""
    groups: dict[str, list[_Item]] = {}
    unit, size, part = "", 0, 0
    for item in items:
        own = _unit(item.path)
        if own != unit:
            unit, size, part = own, 0, 0
        elif size + item.nbytes > GROUP_BYTES:
            size, part = 0, part + 1
        size += item.nbytes
        groups.setdefault(unit if not part else f"{unit} ({part + 1})", []).append(item)
    return groups


def _unit(path: str) -> str:
    """What a leaf is saved with: its layer, the MTP block, what is carried, or the rest."""
    first, *rest = tree_keys(path)
    if first == "layers":
        return f"layer {rest[0]}"
    return first if rest else "outside the layers"


def _save(staging: Staging, checkpoint: Checkpoint, group: str, members: list[_Item]) -> None:
    tree: dict[str, Any] = {}
    lines: list[Callable[[], LedgerLine]] = []
    with ThreadPoolExecutor(max_workers=HASHERS) as pool:
        for item in members:
            array, line = _read(checkpoint, item, pool)
            lines.append(line)
            if array.size == 0:
                continue  # Orbax refuses it; the ledger says all there is to say
            node = tree
            *parents, last = tree_keys(item.path)
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = array
            del array
        staging.save(group, tree, lambda: [line() for line in lines])


def _check_merged(directory: Path, items: list[_Item]) -> None:
    """What Orbax merged is what was planned, by names, dtypes and shapes."""
    expected = {item.path: (item.shape, item.dtype) for item in items if 0 not in item.shape}
    found = {path: (leaf.shape, leaf.dtype) for path, leaf in stored_leaves(directory).items()}
    if wrong := [path for path in {**expected, **found} if expected.get(path) != found.get(path)]:
        raise CheckpointError(f"{directory}: Orbax lost or changed {wrong[0]} while merging")


def _read(
    checkpoint: Checkpoint, item: _Item, pool: Executor
) -> tuple[np.ndarray, Callable[[], LedgerLine]]:
    """The array to store, and its ledger line once it is asked for: hashing goes on meanwhile."""
    if isinstance(item.source, BoundLeaf):
        return _decode(checkpoint, item.source, item, pool)
    if isinstance(item.source, BoundArray):
        array = read_array(checkpoint, item.source)
        transform: str = item.source.transform
        pieces = list(_pieces(item.source, array))
    else:
        array = np.empty(item.shape, item.dtype)
        checkpoint.read_into(item.source, array)
        transform = "passthrough"
        pieces = [(item.source, None, array)]
    origins = [(tensor, rows) for tensor, rows, _ in pieces]
    hashes = [pool.submit(sha256, piece) for _, _, piece in pieces]
    del pieces
    if array.dtype != item.dtype:
        wait(hashes)  # lest the cast array and two of the uncast one are held
        array = array.astype(item.dtype)
        stored = pool.submit(sha256, array)
    else:
        # An untransformed leaf hashes like its source.
        stored = hashes[0] if len(hashes) == 1 else pool.submit(sha256, array)

    def line() -> LedgerLine:
        sources = tuple(
            LedgerSource(
                tensor.name, tensor.file, tensor.dtype, tensor.shape, digest.result(), rows
            )
            for (tensor, rows), digest in zip(origins, hashes, strict=True)
        )
        dtype = item.dtype.name
        return LedgerLine(item.path, dtype, item.shape, transform, stored.result(), sources)

    return array, line


def _decode(
    checkpoint: Checkpoint, bound: BoundLeaf, item: _Item, pool: Executor
) -> tuple[np.ndarray, Callable[[], LedgerLine]]:
    """A quantised leaf decoded, and its ledger line, which names the codes and all their scales."""
    sources: list[LedgerSource] = []

    def seen(tensor: StoredTensor, array: np.ndarray) -> None:
        digest = sha256(array)
        sources.append(LedgerSource(tensor.name, tensor.file, tensor.dtype, tensor.shape, digest))

    array = read_leaf(checkpoint, bound, item.dtype, seen=seen)
    stored = pool.submit(sha256, array)
    transform = "decode" if bound.transform == "copy" else f"decode {bound.transform}"

    def line() -> LedgerLine:
        dtype = item.dtype.name
        return LedgerLine(item.path, dtype, item.shape, transform, stored.result(), tuple(sources))

    return array, line


def _pieces(
    bound: BoundArray, array: np.ndarray
) -> Iterator[tuple[StoredTensor, tuple[int, int] | None, np.ndarray]]:
    """Each source and its elements in the leaf, in its own dtype: one run after the other."""
    flat = array.reshape(-1)
    start = 0
    for tensor, rows, *_ in bound.sources:
        shape = list(tensor.shape)
        if rows is not None:
            shape[-2] = rows.stop - rows.start
        piece = flat[start : start + math.prod(shape)]
        start += piece.size
        own = DTYPES[tensor.dtype][1]
        part = None if rows is None else (rows.start, rows.stop)
        yield tensor, part, piece.astype(own, copy=False)


def _identity(checkpoint: Checkpoint, header: LedgerHeader, config: bytes) -> dict[str, Any]:
    """What must be the same for an interrupted conversion to be continued."""
    identity: dict[str, Any] = {
        "format": header.format,
        "dtype": header.dtype,
        "layers": header.layers,
        "mtp": header.mtp,
        "leaves": header.leaves,
        "source directory": str(checkpoint.directory.resolve()),
        "source config.json": hashlib.sha256(config).hexdigest(),
    }
    for file in checkpoint.files:
        status = (checkpoint.directory / file).stat()
        identity[f"source {file}"] = [status.st_size, status.st_mtime_ns]
    return identity
