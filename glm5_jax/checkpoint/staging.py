"""The Orbax directory while it is being written: nothing that restores until all of it is there.

Beside the destination lies ``DEST.converting``. Each group of arrays is a database of its own in
it, which restores under no name; beside it lies what the group adds to the ledger, the end of which
says that the group is complete, so that a rerun keeps it and drops whatever a killed run left
half-written. To finish, Orbax writes the tree, the groups (as hard links) are merged below it, and
the result is renamed into place: at every moment there is either all of the old destination, or all
of the new one.

Several processes may share the work: each claims groups by holding their ledger lines, which are
free again when it ends, and whoever is first when all are complete merges and places them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import CheckpointError
from .company import COMPANY, Company, Process
from .database import STATE, merge_databases, one_line, remove, write_tree
from .durable import flush, flush_entry
from .ledger import LEDGER, LedgerHeader, LedgerLine
from .manifest import write_manifest

CONFIG = "config.json"
JOURNAL = "journal.jsonl"
LATE_SECONDS = 30.0  # that the last process stays for one which has not come yet
_FINISHING = "finishing"
_COMPLETE = b'{"complete":true}\n'


def unfinished_directory(dst: Path) -> Path:
    """Where the unfinished conversion of a destination lies."""
    return dst.with_name(f"{dst.name}.converting")


def is_placed(dst: Path) -> bool:
    """Whether `dst` is what a conversion put there that has not cleaned up, and may be dead."""
    try:
        records = _read_journal(unfinished_directory(dst))
        return bool(records) and records[-1].content.get("placed") == dst.stat().st_ino
    except OSError:
        return False


class Staging:
    """An unfinished conversion that this process works on, alone or as one of several.

    `identity` says what is converted and how. An unfinished conversion of another identity is
    refused, or dropped with `restart`. Raises CheckpointError for the former, for a destination
    that was made meanwhile, and for processes at work on it that do not convert the same, are not
    as many as this one was told, or are this one already.
    """

    def __init__(
        self,
        dst: Path,
        identity: Mapping[str, Any],
        header: LedgerHeader,
        config: bytes,
        process: Process,
        restart: bool = False,
    ):
        self.dst = dst
        self.root = unfinished_directory(dst)
        self._company = Company(self.root, process)
        self._claims: dict[int, IO[bytes]] = {}
        identity = json.loads(json.dumps(identity))
        try:
            with self._company.meeting():
                if other := self._company.enter():
                    raise CheckpointError(self._in_the_way(other))
                begun = _read_journal(self.root)
                if self._company.others():
                    self._check_same(begun, identity)
                elif not self._resume(begun, identity, restart):
                    self._begin(identity, header, config, restart)
        except OSError as error:
            self._company.leave()
            raise self.stopped("the beginning", error) from error
        except BaseException:
            self._company.leave()
            raise

    @property
    def placed(self) -> bool:
        """Whether all of it is at the destination: nothing is left to do but to clean up."""
        return is_placed(self.dst)

    def _in_the_way(self, other: Process) -> str:
        process = self._company.process
        if other == process and process.count > 1:
            return f"{self.dst}: process {process} is at work on it already"
        which = "" if other == process else f", as process {other}; this one is {process}"
        return f"{self.dst}: another convert is writing it{which}"

    def _begin(
        self, identity: Mapping[str, Any], header: LedgerHeader, config: bytes, restart: bool
    ) -> None:
        if os.path.lexists(self.dst) and not restart:
            self._drop()
            raise CheckpointError(f"{self.dst}: another convert has just made it")
        (self.root / JOURNAL).write_bytes(b"")  # an unfinished conversion, and of nothing else
        self._drop_all_but({COMPANY, self._company.presence, JOURNAL})
        (self.root / CONFIG).write_bytes(config)
        (self.root / LEDGER).write_bytes(header.encode().encode())
        flush(self.root)
        self._write_journal(identity)

    def _resume(self, records: list[_Record], identity: Mapping[str, Any], restart: bool) -> bool:
        """Take up what an earlier run completed; False if there is nothing to take up."""
        if not records:
            return False
        begun = records[0].content
        if begun != identity:
            if restart:
                return False
            if self.placed:
                raise CheckpointError(f"{self.dst}: exists already; force (--force) replaces it")
            raise CheckpointError(
                f"{self.root}: an unfinished conversion that differs in "
                f"{_difference(begun, identity)}; force (--force) drops it and starts over"
            )
        if self.placed:
            return True
        complete = {_group_name(number) for number in self.finished()}
        if not complete or not complete <= {entry.name for entry in self.root.iterdir()}:
            return False
        lines = {_lines_name(group) for group in complete}
        own = {COMPANY, self._company.presence, JOURNAL, LEDGER, CONFIG}
        self._drop_all_but({*own, *complete, *lines})
        return True

    def _check_same(self, records: list[_Record], identity: Mapping[str, Any]) -> None:
        """This process does what those do that are there already."""
        begun = records[0].content if records else {}
        if begun != identity:
            raise CheckpointError(
                f"{self.dst}: process {self._company.process} differs from those at work on it in "
                f"{_difference(begun, identity)}; start all of them alike"
            )

    def finished(self) -> set[int]:
        """Numbers of the groups that are complete, whoever wrote them."""
        files = self.root.glob(_lines_name("group-*"))
        return {int(file.stem.split("-")[1]) for file in files if _read_lines(file) is not None}

    def claim(self, number: int) -> Path | None:
        """The empty directory of a group's database, which is this process's to write.

        None if another process is writing it or has written it.
        """
        directory = self.root / _group_name(number)
        lines = self.root / _lines_name(directory.name)
        try:
            claim = self._company.hold(lines.name)
            if claim is None:
                return None
            if _read_lines(lines) is not None:
                claim.close()
                return None
            self._claims[number] = claim
            # A process that was killed may have left something.
            claim.truncate(0)
            remove(directory)
            directory.mkdir()
        except OSError as error:
            raise self.stopped(directory.name, error) from error
        return directory

    def finish(self, number: int, group: str, lines: Iterable[LedgerLine]) -> None:
        """Write the ledger lines of a claimed group whose arrays are written; it is complete."""
        try:
            with self._claims.pop(number) as claim:
                _append(claim, b"".join(line.encode().encode() for line in lines))
                _append(claim, _COMPLETE)
        except OSError as error:
            raise self.stopped(group, error) from error

    def wait(self, number: int) -> None:
        """Wait until no other process is writing a group, complete or not."""
        self._company.wait_for(_lines_name(_group_name(number))).close()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """While no other process merges or places; `placed` tells whether one has."""
        with self._company.wait_for("placing"):
            yield

    def merge(self, paths: Iterable[str], beside: Iterable[Path] = ()) -> Path:
        """Make an Orbax directory of the groups, which hold the arrays of these paths.

        `beside` are files that are copied into it. It is complete when it is returned, but not
        placed.
        """
        merged = self.root / _FINISHING
        try:
            for left in self.root.glob(f"{_FINISHING}*"):  # by a process that was killed here
                remove(left)
            write_tree(merged, paths)
            databases = []
            groups = [_group_name(number) for number in sorted(self.finished())]
            for number, group in enumerate(groups):
                databases.append(merged / STATE / f"ocdbt.process_{number}")
                shutil.copytree(self.root / group, databases[-1], copy_function=_link_data)
            merge_databases(databases, merged / STATE)
            with open(merged / LEDGER, "wb") as ledger:
                ledger.write((self.root / LEDGER).read_bytes())
                for group in groups:
                    ledger.write(_read_lines(self.root / _lines_name(group)) or b"")
            for file in (self.root / CONFIG, *beside):
                shutil.copyfile(file, merged / file.name)
            write_manifest(merged)
            flush(merged)
        except (OSError, ValueError) as error:
            raise self.stopped("the whole", error) from error
        return merged

    def place(self) -> None:
        """Put what `merge` made at the destination, in one step."""
        merged = self.root / _FINISHING
        try:
            self._write_journal({"placed": merged.stat().st_ino}, after=1)
            place_directory(merged, self.dst)
        except OSError as error:
            raise self.stopped("the whole", error) from error

    def close(self) -> None:
        """Let go of the conversion; an unfinished one stays.

        Of a placed one nothing does, when the last process has left, which waits a little for one
        that has not come yet: it is to find that all is done, and not to start over.
        """
        latest = time.monotonic() + LATE_SECONDS
        try:
            for claim in self._claims.values():
                claim.close()
            while self.placed:
                with self._company.meeting():
                    if self._company.others():
                        self._company.leave()  # still at the meeting: one of them is the last then
                        break
                    if self._company.complete or time.monotonic() > latest:
                        self._drop()
                        break
                time.sleep(0.1)
        finally:
            self._company.leave()

    def stopped(self, what: str, error: Exception) -> CheckpointError:
        """What to raise when something can't be written."""
        return CheckpointError(
            f"{self.root}: {what} cannot be written: {one_line(error)}; what is finished is kept, "
            f"run the same conversion again to continue"
        )

    def _write_journal(self, record: Mapping[str, Any], after: int = 0) -> None:
        """Write a record after so many that are there, in the place of what came behind them."""
        with open(self.root / JOURNAL, "ab", buffering=0) as journal:
            journal.truncate(sum(record.size for record in _read_journal(self.root)[:after]))
            _append(journal, json.dumps(record).encode() + b"\n")

    def _drop(self) -> None:
        self._drop_all_but({JOURNAL, COMPANY})  # until all else is gone, it tells what that is
        self._drop_all_but({COMPANY})  # whoever comes waits for it
        shutil.rmtree(self.root, ignore_errors=True)

    def _drop_all_but(self, kept: Collection[str]) -> None:
        for entry in list(self.root.iterdir()):
            if entry.name not in kept:
                remove(entry)


class _Record(NamedTuple):
    content: dict[str, Any]
    size: int


def _read_journal(root: Path) -> list[_Record]:
    """The records of the journal, if there is one, up to one that is cut off or damaged."""
    records: list[_Record] = []
    try:
        data = (root / JOURNAL).read_bytes()
    except FileNotFoundError:
        return records
    for line in data.splitlines(keepends=True):
        try:
            content = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(content, dict):
            break
        records.append(_Record(content, len(line)))
    return records


def _append(file: IO[bytes], data: bytes) -> None:
    """Write to the end of an unbuffered file, and have it on the disk."""
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def _read_lines(file: Path) -> bytes | None:
    """The ledger lines of a complete group; None while it is not complete."""
    data = file.read_bytes()
    return data.removesuffix(_COMPLETE) if data.endswith(_COMPLETE) else None


def _group_name(number: int) -> str:
    return f"group-{number:05}"


def _lines_name(group: str) -> str:
    return f"{group}.jsonl"


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say what differs, in words: options with both values, files by name."""
    told = []
    for key in sorted({*old, *new}):
        was, now = old.get(key), new.get(key)
        if was == now:
            continue
        changed = isinstance(was, list | str) and key.startswith("source ")
        told.append(f"{key} (changed since)" if changed else f"{key} ({was!r}, now {now!r})")
    return ", ".join(told)


def _link_data(source: str, target: str) -> str:
    # TensorStore never writes again into a data file, but it does into what lies beside them.
    if os.path.basename(os.path.dirname(source)) == "d":
        try:
            os.link(source, target)
            return target
        except OSError:
            pass  # a file system without hard links
    return shutil.copyfile(source, target)


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories: in one step where the system can, else in three renames."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, swap = -100, 2
    if rename is not None and rename(at_cwd, bytes(one), at_cwd, bytes(other), swap) == 0:
        return
    aside = one.with_name(f"{one.name}.replaced")
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)


def place_directory(directory: Path, dst: Path) -> None:
    """Rename a directory to its destination; what is there comes to lie in its old place."""
    if dst.exists():
        _exchange(directory, dst)
    else:
        os.rename(directory, dst)
    flush_entry(dst.parent)
