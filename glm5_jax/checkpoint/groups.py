"""Arrays that are written and finished together, by this process or by one that works beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .conveyor import Digest, Hashers, Job, Promise, convey
from .database import Database
from .items import Index, Item, Piece
from .ledger import LedgerLine, LedgerSource, tree_keys
from .reader import Checkpoint
from .staging import Staging

# Arrays of a layer that are finished together; what a kill costs is at most one such group.
GROUP_BYTES = 2**30

Progress = Callable[[int, int, str], None]


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


def write_groups(
    staging: Staging,
    checkpoint: Checkpoint,
    groups: dict[str, list[Item]],
    progress: Progress | None,
) -> list[str]:
    """Have all groups finished, and return those that this process wrote.

    It writes whatever no other process has claimed, then waits for the others, and takes over what
    one of them leaves unfinished.
    """
    total = sum(item.nbytes for members in groups.values() for item in members)
    left = dict(enumerate(groups))
    written: list[str] = []
    done = 0

    def advance(label: str, nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total, label)

    def jobs() -> Iterator[Job]:
        finished = staging.finished()
        for number, group in list(left.items()):
            members = groups[group]
            if number in finished:
                del left[number]
                advance(group, sum(item.nbytes for item in members))
            elif directory := staging.claim(number):
                del left[number]
                database = Database(directory)
                databases.append(database)
                writers = [
                    _Writer(staging, checkpoint, hashers, database, item) for item in members
                ]
                for writer in writers:
                    yield from writer.jobs(functools.partial(advance, group))
                yield Job(
                    nbytes=0,
                    read=lambda: None,
                    use=lambda _: (),
                    done=functools.partial(finish, number, group, writers),
                )

    def finish(number: int, group: str, writers: list[_Writer]) -> None:
        staging.finish(number, group, [writer.line() for writer in writers])
        written.append(group)

    hashers = Hashers()
    databases: list[Database] = []
    try:
        convey(jobs())
        while left:
            # Nothing is held here meanwhile that another process might wait for.
            number, group = next(iter(left.items()))
            advance(f"{group}, by another process", 0)
            staging.wait(number)
            convey(jobs())
    finally:
        hashers.close()
        for database in databases:
            database.settle()
    return written


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
