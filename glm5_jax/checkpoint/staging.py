"""The Orbax directory while it is being written: nothing that restores until all of it is there.

Beside the destination lies ``DEST.converting``. Each group of arrays is a database of its own in
it, which restores under no name; a journal says which groups are complete, so that a rerun keeps
them and drops whatever a killed run left half-written. To finish, Orbax writes the tree, the groups
(as hard links) are merged below it, and the result is renamed into place: at every moment there is
either all of the old destination, or all of the new one.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import CheckpointError
from .database import STATE, merge_databases, one_line, remove, write_tree
from .durable import flush, flush_entry
from .ledger import LEDGER, LedgerHeader, LedgerLine
from .manifest import write_manifest

CONFIG = "config.json"
JOURNAL = "journal.jsonl"
_FINISHING = "finishing"


def unfinished_directory(dst: Path) -> Path:
    """Where the unfinished conversion of a destination lies."""
    return dst.with_name(f"{dst.name}.converting")


def is_placed(dst: Path) -> bool:
    """Whether `dst` is what a conversion put there that was killed before it had cleaned up."""
    try:
        with open(unfinished_directory(dst) / JOURNAL, "rb") as journal:
            records = _read_journal(journal)
        return bool(records) and records[-1].content.get("placed") == dst.stat().st_ino
    except OSError:
        return False


class Staging:
    """An unfinished conversion that this process holds; `finished` are the groups it has already.

    `identity` says what is converted and how. An unfinished conversion of another identity is
    refused, or dropped with `restart`. `placed` tells that nothing is left to do but to clean up.
    Raises CheckpointError for the former, and when another process is at work on the same
    destination.
    """

    def __init__(
        self,
        dst: Path,
        identity: Mapping[str, Any],
        header: LedgerHeader,
        config: bytes,
        restart: bool = False,
    ):
        self.dst = dst
        self.root = unfinished_directory(dst)
        self.finished: set[str] = set()
        self.placed = False
        self._journal = self._hold()
        identity = json.loads(json.dumps(identity))
        try:
            if not self._resume(identity, restart):
                self._begin(identity, header, config)
        except OSError as error:
            self._journal.close()
            raise self.stopped("the beginning", error) from error
        except BaseException:
            self._journal.close()
            raise

    def _hold(self) -> IO[bytes]:
        """Open the journal and lock it: the lock goes with the process, however that ends."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that nothing is left over to be written when a write has failed.
            journal = open(self.root / JOURNAL, "a+b", buffering=0)  # noqa: SIM115 - locked, open
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{self.root}: cannot be written: {reason}") from None
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            journal.close()
            raise CheckpointError(f"{self.dst}: another convert is writing it") from None
        except OSError:
            pass  # a file system without locks
        return journal

    def _begin(self, identity: Mapping[str, Any], header: LedgerHeader, config: bytes) -> None:
        self._drop_all_but({JOURNAL})
        (self.root / CONFIG).write_bytes(config)
        (self.root / LEDGER).write_text(header.encode(), encoding="utf-8")
        self._journal.truncate(0)
        self._write_journal(identity)

    def _resume(self, identity: Mapping[str, Any], restart: bool) -> bool:
        """Take up what an earlier run completed; False if there is nothing to take up."""
        records = _read_journal(self._journal)
        if not records:
            return False
        begun = records[0].content
        if begun != identity:
            if restart:
                return False
            if is_placed(self.dst):
                raise CheckpointError(f"{self.dst}: exists already; force (--force) replaces it")
            raise CheckpointError(
                f"{self.root}: an unfinished conversion that differs in "
                f"{_difference(begun, identity)}; force (--force) drops it and starts over"
            )
        groups = [record for record in records if "group" in record.content]
        complete = {record.content["directory"] for record in groups}
        self.placed = is_placed(self.dst)
        if not self.placed:
            if not complete or not complete <= {entry.name for entry in self.root.iterdir()}:
                return False
            self._journal.truncate(groups[-1].end)
            self._drop_all_but({JOURNAL, LEDGER, CONFIG, *complete})
            os.truncate(self.root / LEDGER, groups[-1].content["ledger_bytes"])
        self.finished = {record.content["group"] for record in groups}
        return True

    def begin(self, number: int) -> Path:
        """The empty directory of a group's database."""
        directory = self.root / _group_name(number)
        try:
            directory.mkdir()
        except OSError as error:
            raise self.stopped(directory.name, error) from error
        return directory

    def finish(self, number: int, group: str, lines: Iterable[LedgerLine]) -> None:
        """Write the ledger lines of a group whose arrays are written; it is complete then."""
        try:
            with open(self.root / LEDGER, "ab") as ledger:
                ledger.writelines(line.encode().encode() for line in lines)
                ledger.flush()
                os.fsync(ledger.fileno())
                size = ledger.tell()
            directory = _group_name(number)
            self._write_journal({"group": group, "directory": directory, "ledger_bytes": size})
        except OSError as error:
            raise self.stopped(group, error) from error
        self.finished.add(group)

    def merge(self, paths: Iterable[str], beside: Iterable[Path] = ()) -> Path:
        """Make an Orbax directory of the groups, which hold the arrays of these paths.

        `beside` are files that are copied into it. It is complete when it is returned, but not
        placed.
        """
        merged = self.root / _FINISHING
        try:
            remove(merged)
            write_tree(merged, paths)
            databases = []
            for number, group in enumerate(sorted(self.root.glob("group-*"))):
                databases.append(merged / STATE / f"ocdbt.process_{number}")
                shutil.copytree(group, databases[-1], copy_function=_link_data)
            merge_databases(databases, merged / STATE)
            for file in (self.root / CONFIG, self.root / LEDGER, *beside):
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
            self._write_journal({"placed": merged.stat().st_ino})
            _place(merged, self.dst)
        except OSError as error:
            raise self.stopped("the whole", error) from error
        self.placed = True

    def close(self) -> None:
        """Let go of the conversion; an unfinished one stays, of a placed one nothing does."""
        if self.placed:
            self._drop_all_but({JOURNAL})  # which tells, until all else is gone, what all else is
            shutil.rmtree(self.root, ignore_errors=True)
        self._journal.close()

    def stopped(self, what: str, error: Exception) -> CheckpointError:
        """What to raise when something can't be written."""
        return CheckpointError(
            f"{self.root}: {what} cannot be written: {one_line(error)}; what is finished is kept, "
            f"run the same conversion again to continue"
        )

    def _drop_all_but(self, kept: Collection[str]) -> None:
        for entry in list(self.root.iterdir()):
            if entry.name not in kept:
                remove(entry)

    def _write_journal(self, record: Mapping[str, Any]) -> None:
        data = json.dumps(record).encode() + b"\n"
        while data:
            data = data[self._journal.write(data) :]
        os.fsync(self._journal.fileno())


class _Record(NamedTuple):
    content: dict[str, Any]
    end: int


def _read_journal(journal: IO[bytes]) -> list[_Record]:
    """The records and where each ends in the file, up to one that is cut off or damaged."""
    journal.seek(0)
    records: list[_Record] = []
    end = 0
    for line in journal.read().splitlines(keepends=True):
        end += len(line)
        try:
            content = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(content, dict):
            break
        records.append(_Record(content, end))
    return records


def _group_name(number: int | str) -> str:
    return f"group-{number:0>5}"


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


def _place(directory: Path, dst: Path) -> None:
    """Rename a directory to its destination, taking the place of what is there."""
    if dst.exists():
        _exchange(directory, dst)
    else:
        os.rename(directory, dst)
    flush_entry(dst.parent)
