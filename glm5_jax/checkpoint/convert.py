"""A safetensors directory becomes an Orbax directory, a piece at a time.

An array is never held whole. It is read in pieces of at most 32 MB (one expert of a stack, some
rows of a matrix), each hashed, cast or decoded if asked, and written as one chunk of the array on
disk, while the next ones are being read: so a stacked leaf of 4.8 GB needs no more memory than a
small one, which is `conveyor.IN_FLIGHT` of pieces and what is being encoded of them. What is
complete survives a kill, see `staging`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import CheckpointError
from ..specs import LAYER_PREFIX
from .audit import AuditReport, audit_checkpoint
from .bind import BoundLeaf, bind, passthrough
from .conveyor import Digest, Hashers, Job, Promise, convey
from .database import Database
from .dtypes import dtype_word
from .items import Index, Item, Piece, bound_items, carried_items
from .layouts import released_prefix
from .ledger import (
    FORMAT,
    LedgerHeader,
    LedgerLine,
    LedgerSource,
    package_versions,
    tree_keys,
)
from .match import MTP_REASON, Layers, resolve_layers
from .orbax import is_orbax, stored_leaves
from .reader import Checkpoint, companions, open_checkpoint
from .staging import CONFIG, Staging, is_placed

# Arrays of a layer that are finished together; what a kill costs is at most one such group.
GROUP_BYTES = 2**30

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


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: str = "stored",
    layers: Layers = None,
    mtp: bool = True,
    force: bool = False,
    allow_bf16: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a safetensors checkpoint into an Orbax directory that plain Orbax restores.

    dtype: ``stored`` keeps every leaf as it is; else see `dtypes.leaf_dtype` for what stays
    float32 whatever is asked. layers: convert those layers (an index, indices, or ``0-3,45``) and
    what lies outside the layers. mtp: also the MTP layer, if there is one. force: replace `dst` if
    it is an Orbax directory; the old one stays until the new one is complete. allow_bf16: accept
    rounded values where float32 is required. progress is called with (bytes, bytes in all, label).

    Tensors that are not bound (vision, copies, activation scales) are carried verbatim under
    ``passthrough/``; config.json, the ledger and what the source has of tokenizers and the like
    (`reader.COMPANIONS`) lie beside the arrays. An interrupted conversion leaves nothing at `dst`,
    and the same call continues it.

    Raises CheckpointError before any work if the source is incomplete or `dst` is in the way.
    """
    started = time.monotonic()
    dtype = dtype_word(dtype)
    src, dst = Path(src), Path(dst).resolve()
    _check_destination(src, dst, force)
    checkpoint = open_checkpoint(src)
    config = checkpoint.config
    layers = resolve_layers(layers, config)
    report = audit_checkpoint(checkpoint, config, layers, allow_bf16)
    bound = bind(checkpoint, config, mtp=mtp, layers=layers, allow_bf16=allow_bf16)
    items = [item for leaf in bound.values() for item in bound_items(leaf, dtype)]
    cast = sum(item.cast for item in items)
    carried = passthrough(checkpoint, config, mtp=mtp, layers=layers)
    items += carried_items(carried.values())
    groups = group_items(items)

    header = LedgerHeader(
        format=FORMAT,
        naming=report.naming,
        quantization=report.quantization,
        dtype=dtype,
        layers=None if layers is None else tuple(sorted(layers)),
        mtp=any(path.startswith("mtp.") for path in bound),
        leaves=len(items),
        versions=package_versions(),
    )
    config_bytes = (checkpoint.directory / CONFIG).read_bytes()
    identity = _identity(checkpoint, header, config_bytes)
    staging = Staging(dst, identity, header, config_bytes, restart=force)
    resumed = len(staging.finished)
    try:
        if not staging.placed:
            _write(staging, checkpoint, groups, progress)
            _check_unchanged(checkpoint, identity, header, config_bytes)
            stored = [item for item in items if item.pieces]
            beside = [checkpoint.directory / name for name in companions(checkpoint.directory)]
            _check_merged(staging.merge([item.path for item in stored], beside), stored)
            staging.place()
    finally:
        staging.close()
    return ConvertReport(
        destination=dst,
        dtype=dtype,
        leaves=len(bound),
        passthrough=len(carried),
        bytes=sum(item.nbytes for item in items),
        cast=cast,
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
    if not force and not is_placed(dst):
        raise CheckpointError(f"{dst}: exists already; force (--force) replaces it")


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


def group_items(items: list[Item]) -> dict[str, list[Item]]:
    """Arrays that are finished together: of one layer, in order, up to `GROUP_BYTES` of them."""
    groups: dict[str, list[Item]] = {}
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
    """What an array is finished with: its layer, the MTP block, what is carried, or the rest."""
    first, *rest = tree_keys(path)
    if first == "layers":
        return f"layer {rest[0]}"
    return first if rest else "outside the layers"


def _write(
    staging: Staging,
    checkpoint: Checkpoint,
    groups: dict[str, list[Item]],
    progress: Progress | None,
) -> None:
    """Write all groups that are not finished yet."""
    total = sum(item.nbytes for members in groups.values() for item in members)
    written = 0

    def advance(group: str, nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if progress is not None:
            progress(written, total, group)

    def jobs() -> Iterator[Job]:
        for number, (group, members) in enumerate(groups.items()):
            if group in staging.finished:
                advance(group, sum(item.nbytes for item in members))
                continue
            database = Database(staging.begin(number))
            databases.append(database)
            writers = [_Writer(staging, checkpoint, hashers, database, item) for item in members]
            for writer in writers:
                yield from writer.jobs(functools.partial(advance, group))
            yield Job(
                nbytes=0,
                read=lambda: None,
                use=lambda _: (),
                done=functools.partial(_finish, staging, number, group, writers),
            )

    hashers = Hashers()
    databases: list[Database] = []
    try:
        convey(jobs())
    finally:
        hashers.close()
        for database in databases:
            database.settle()


def _finish(staging: Staging, number: int, group: str, writers: list[_Writer]) -> None:
    staging.finish(number, group, [writer.line() for writer in writers])


class _Writer:
    """One array on its way to the disk, with the hashes of its ledger line."""

    def __init__(
        self,
        staging: Staging,
        checkpoint: Checkpoint,
        hashers: Hashers,
        database: Database,
        item: Item,
    ):
        self.staging = staging
        self.checkpoint = checkpoint
        self.database = database
        self.item = item
        self.sources = [Digest(hashers) for _ in item.origins]
        # An untransformed array hashes like its source.
        self.same = len(item.origins) == 1 and not item.cast
        self.stored = self.sources[0] if self.same else Digest(hashers)
        self.array: Any = None

    def jobs(self, advance: Callable[[int], None]) -> Iterator[Job]:
        """What is to be done for each piece; there is none of an array without elements."""
        item = self.item
        if not item.pieces:
            return  # Orbax refuses it; the ledger says all there is to say
        chunk = item.piece_shape
        self.array = self.database.create(item.path, item.shape, item.dtype, chunk)
        for index in item.pieces:
            nbytes = item.piece_bytes(index)
            yield Job(
                nbytes=item.held_bytes(index),
                read=functools.partial(item.read, self.checkpoint, index),
                use=functools.partial(self.use, index),
                done=functools.partial(advance, nbytes),
            )

    def use(self, index: Index, piece: Piece) -> list[Promise]:
        """Hash a piece and write it."""
        promises: list[Promise] = [
            self.sources[number].update(array) for number, array in piece.sources
        ]
        if not self.same:
            promises.append(self.stored.update(piece.array))
        try:
            written = self.array.result()[index].write(
                piece.array, can_reference_source_data_indefinitely=True
            )
        except (OSError, ValueError) as error:
            raise self.staging.stopped(self.item.path, error) from error
        return [*promises, _Written(self.staging, self.item.path, written)]

    def line(self) -> LedgerLine:
        """The ledger line, once all pieces are written."""
        item = self.item
        sources = tuple(
            LedgerSource(
                tensor.name, tensor.file, tensor.dtype, tensor.shape, digest.hexdigest(), rows
            )
            for (tensor, rows), digest in zip(item.origins, self.sources, strict=True)
        )
        stored = self.stored.hexdigest()
        return LedgerLine(item.path, item.dtype.name, item.shape, item.transform, stored, sources)


@dataclass(frozen=True)
class _Written:
    """A chunk that TensorStore writes; its error is ours."""

    staging: Staging
    path: str
    future: Any

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> None:
        try:
            self.future.result()
        except (OSError, ValueError) as error:
            raise self.staging.stopped(self.path, error) from error


def _check_merged(directory: Path, items: list[Item]) -> None:
    """What was merged is what was planned, by names, dtypes and shapes."""
    expected = {item.path: (item.shape, item.dtype) for item in items}
    found = {path: (leaf.shape, leaf.dtype) for path, leaf in stored_leaves(directory).items()}
    if wrong := [path for path in {**expected, **found} if expected.get(path) != found.get(path)]:
        raise CheckpointError(f"{directory}: {wrong[0]} was lost or changed while merging")


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
    for file in (*checkpoint.files, *companions(checkpoint.directory)):
        try:
            status = (checkpoint.directory / file).stat()
        except OSError as error:
            problem = error.strerror or error
            raise CheckpointError(
                f"{checkpoint.directory / file}: cannot be read: {problem}"
            ) from None
        identity[f"source {file}"] = [status.st_size, status.st_mtime_ns]
    return identity


def _check_unchanged(
    checkpoint: Checkpoint, identity: dict[str, Any], header: LedgerHeader, config: bytes
) -> None:
    """The source files are those that they were when the conversion began."""
    for key, now in _identity(checkpoint, header, config).items():
        if identity[key] != now:
            raise CheckpointError(
                f"{checkpoint.directory}: {key.removeprefix('source ')} changed while it was "
                f"converted; force (--force) starts over"
            )
