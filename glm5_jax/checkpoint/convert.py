"""A safetensors directory becomes an Orbax directory, a piece at a time.

An array is never held whole. It is read in pieces of at most 32 MB (one expert of a stack, some
rows of a matrix), each hashed, cast or decoded if asked, and written as one chunk of the array on
disk, while the next ones are being read: so a stacked leaf of 4.8 GB needs no more memory than a
small one, which is `conveyor.IN_FLIGHT` of pieces and what is being encoded of them. What is
complete survives a kill, see `staging`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import CheckpointError
from ..specs import LAYER_PREFIX
from .audit import AuditReport, audit_checkpoint
from .bind import BoundLeaf, bind, passthrough
from .company import ALONE, check_process, distributed_process
from .dtypes import dtype_word
from .groups import Progress, group_items, write_groups
from .items import Item, bound_items, carried_items
from .layouts import released_prefix
from .ledger import FORMAT, LedgerHeader, package_versions
from .match import MTP_REASON, Layers, resolve_layers
from .orbax import is_orbax, stored_leaves
from .reader import Checkpoint, companions, open_checkpoint
from .staging import CONFIG, Staging, is_placed

LAYERS_REASON = "not of the layers asked for"


@dataclass(frozen=True, repr=False)
class ConvertReport:
    """What a conversion wrote.

    `leaves` are those of the parameter tree, `passthrough` the tensors carried beside it, `bytes`
    both. `not_carried` names, by reason, the source tensors that are in neither. `cast` counts
    leaves whose dtype changed. `resumed` counts the groups of arrays that were there already when
    this process came, by an interrupted run or by another process, `elsewhere` those that another
    process wrote meanwhile; `written` are the bytes of the rest, and `seconds` is for this run.
    """

    destination: Path
    dtype: str
    leaves: int
    passthrough: int
    bytes: int
    cast: int
    resumed: int
    elsewhere: int
    written: int
    seconds: float
    audit: AuditReport
    not_carried: dict[str, list[str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The report for a terminal."""
        rate = self.written / max(self.seconds, 1e-9) / 1e6
        took = f"{self.written:,} bytes in {self.seconds:.1f} s ({rate:,.0f} MB/s)"
        total = "" if self.written == self.bytes else f"{self.bytes:,} bytes; here "
        lines = [
            f"{self.destination}: {self.leaves:,} leaves and {self.passthrough:,} tensors passed "
            f"through, {total}{took}",
            f"dtype {self.dtype} · {self.cast:,} leaves cast",
        ]
        if self.resumed:
            lines.append(f"continued: {self.resumed:,} groups were finished before")
        if self.elsewhere:
            lines.append(f"together: {self.elsewhere:,} groups were written by other processes")
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
    process: tuple[int, int] | None = None,
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

    process: (index, count) of this process among several that make `dst` together, all called with
    the same arguments, on machines that share its file system and its locks (see `company`). By
    default that of a `jax.distributed` run, and without one the only process. Which arrays a
    process writes is not fixed: each takes what is left, also what one that ended left unfinished.
    All return when `dst` is complete, and the last of them waits 30 s for one that never came.

    Raises CheckpointError before any work if the source is incomplete, if `dst` is in the way, or
    if other processes are at work on it otherwise than this one.
    """
    started = time.monotonic()
    dtype = dtype_word(dtype)
    this = distributed_process() or ALONE if process is None else check_process(*process)
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
    source = _source_identity(checkpoint, config_bytes)
    identity = _identity(header, groups) | source
    staging = Staging(dst, identity, header, config_bytes, this, restart=force)
    written: list[str] = []
    try:
        resumed = len(groups) if staging.placed else len(staging.finished())
        if not staging.placed:
            written = write_groups(staging, checkpoint, groups, progress)
        with staging.finishing():
            if not staging.placed:
                _check_unchanged(checkpoint, source, config_bytes)
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
        elsewhere=len(groups) - resumed - len(written),
        written=sum(item.nbytes for group in written for item in groups[group]),
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


def _check_merged(directory: Path, items: list[Item]) -> None:
    """What was merged is what was planned, by names, dtypes and shapes."""
    expected = {item.path: (item.shape, item.dtype) for item in items}
    found = {path: (leaf.shape, leaf.dtype) for path, leaf in stored_leaves(directory).items()}
    if wrong := [path for path in {**expected, **found} if expected.get(path) != found.get(path)]:
        raise CheckpointError(f"{directory}: {wrong[0]} was lost or changed while merging")


def _identity(header: LedgerHeader, groups: dict[str, list[Item]]) -> dict[str, Any]:
    """What must be the same for processes to convert together, or for a later one to continue."""
    plan = [[group, *(item.path for item in members)] for group, members in groups.items()]
    return {
        "format": header.format,
        "dtype": header.dtype,
        "layers": header.layers,
        "mtp": header.mtp,
        "leaves": header.leaves,
        "plan": hashlib.sha256(json.dumps(plan).encode()).hexdigest(),
    }


def _source_identity(checkpoint: Checkpoint, config: bytes) -> dict[str, Any]:
    """What tells that the source is still the same, and not the same as another."""
    identity: dict[str, Any] = {
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


def _check_unchanged(checkpoint: Checkpoint, begun: dict[str, Any], config: bytes) -> None:
    """The source files are those that they were when the conversion began."""
    for key, now in _source_identity(checkpoint, config).items():
        if begun[key] != now:
            raise CheckpointError(
                f"{checkpoint.directory}: {key.removeprefix('source ')} changed while it was "
                f"converted; force (--force) starts over"
            )
