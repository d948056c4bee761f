"""The Orbax directory while it is being written: nothing that restores until all of it is there.

Beside the destination lies ``DEST.converting``. Each group of leaves is saved by Orbax's partial
save, as a *pending* directory that restores under no name; a journal says which groups are
complete, so that a rerun keeps them and drops whatever a killed run left half-written. To finish,
the groups are cloned (by hard links), merged by Orbax, and the result is renamed into place: at
every moment there is either all of the old destination, or all of the new one.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any

from ..errors import CheckpointError
from .ledger import LEDGER, LedgerHeader, LedgerLine
from .manifest import write_manifest

CONFIG = "config.json"
JOURNAL = "journal.jsonl"
_PARTIAL_SAVE = ".partial_save"  # how Orbax names the unfinished form of a directory
_GROUP = "group"
_FINISHING = "finishing"
TREE = "state/_METADATA"


def unfinished_directory(dst: Path) -> Path:
    """Where the unfinished conversion of a destination lies."""
    return dst.with_name(f"{dst.name}.converting")


class Staging:
    """An unfinished conversion that this process holds; `finished` are the groups it has already.

    `identity` says what is converted and how. An unfinished conversion of another identity is
    refused, or dropped with `restart`. Raises CheckpointError then, and when another process is
    at work on the same destination.
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
        self._journal = self._hold()
        identity = json.loads(json.dumps(identity))
        try:
            if not self._resume(identity, restart):
                self._begin(identity, header, config)
        except BaseException:
            self._journal.close()
            raise

    def _hold(self) -> IO[bytes]:
        """Open the journal and lock it: the lock goes with the process, however that ends."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            journal = open(self.root / JOURNAL, "a+b")  # noqa: SIM115 - open while it is locked
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
        self._journal.seek(0)
        records = []
        end = 0
        for raw in self._journal:
            try:
                records.append(json.loads(raw))
            except ValueError:
                break
            end += len(raw)
        if not records:
            return False
        if records[0] != identity:
            if restart:
                return False
            raise CheckpointError(
                f"{self.root}: an unfinished conversion that differs in "
                f"{_difference(records[0], identity)}; force (--force) drops it and starts over"
            )
        self._journal.truncate(end)
        complete = {record["pending"] for record in records[1:]} - {None}
        if not complete or not complete <= {entry.name for entry in _pending(self.root)}:
            return False
        self._drop_all_but({JOURNAL, LEDGER, CONFIG, *complete})
        os.truncate(self.root / LEDGER, records[-1]["ledger_bytes"])
        self.finished = {record["group"] for record in records[1:]}
        return True

    def save(
        self, group: str, tree: Mapping[str, Any], lines: Callable[[], list[LedgerLine]]
    ) -> None:
        """Write one group of leaves, then their ledger lines, then that the group is complete.

        `lines` is called while Orbax writes.
        """
        from orbax.checkpoint import v1 as ocp

        # Orbax compares a group with all those before it, which takes minutes for many layers:
        # so each is a session of its own, and its pending directory moves to the others.
        session = self.root / _GROUP
        new = None
        try:
            if tree:
                with _orbax_context():
                    written = ocp.partial.save_async(session, dict(tree))
                    entries = lines()
                    written.result()
                (pending,) = _pending(self.root / (_GROUP + _PARTIAL_SAVE))
                new = pending.name
                os.rename(pending, self.root / new)
            else:
                entries = lines()
            with open(self.root / LEDGER, "ab") as ledger:
                ledger.writelines(line.encode().encode() for line in entries)
                ledger.flush()
                os.fsync(ledger.fileno())
                size = ledger.tell()
            self._write_journal({"group": group, "pending": new, "ledger_bytes": size})
        except (OSError, ValueError) as error:
            raise self._stopped(group, error) from error
        self.finished.add(group)

    def merge(self) -> Path:
        """Let Orbax merge a clone of the groups; returns the directory, complete but not placed."""
        from orbax.checkpoint import v1 as ocp

        merged = self.root / _FINISHING
        clone = self.root / (_FINISHING + _PARTIAL_SAVE)
        _remove(merged)
        _remove(clone)
        try:
            clone.mkdir()
            for entry in _pending(self.root):
                shutil.copytree(entry, clone / entry.name, copy_function=_link_data)
            _gather_trees(_pending(clone))
            for name in (CONFIG, LEDGER):
                shutil.copyfile(self.root / name, clone / name)
            with _orbax_context():
                ocp.partial.finalize(merged)
            write_manifest(merged)
        except (OSError, ValueError) as error:
            raise self._stopped("the whole", error) from error
        return merged

    def place(self) -> None:
        """Put what `merge` made at the destination, in one step, and drop the rest."""
        _place(self.root / _FINISHING, self.dst)
        self._journal.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def close(self) -> None:
        """Let go of an unfinished conversion, which stays."""
        self._journal.close()

    def _stopped(self, what: str, error: Exception) -> CheckpointError:
        reason = " ".join(str(error).split())[:300]
        return CheckpointError(
            f"{self.root}: {what} cannot be written: {reason}; what is finished is kept, "
            f"run the same conversion again to continue"
        )

    def _drop_all_but(self, kept: Collection[str]) -> None:
        for entry in list(self.root.iterdir()):
            if entry.name not in kept:
                _remove(entry)

    def _write_journal(self, record: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(record).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())


def _orbax_context() -> Any:
    """Options under which saving holds a leaf once: no deep copy of it, no compressed copy."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_compression = False
    return context


def _pending(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.pending_*"))


def _gather_trees(pending: list[Path]) -> None:
    """Put the tree metadata of all groups into the last one, and none into the others.

    Orbax merges them one by one, and after each compares every leaf with every other.
    """
    everything: dict[str, Any] = {}
    for entry in pending:
        document = json.loads((entry / TREE).read_bytes())
        everything |= document["tree_metadata"]
        document["tree_metadata"] = everything if entry == pending[-1] else {}
        (entry / TREE).write_text(json.dumps(document), encoding="utf-8")


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
    # Orbax never writes again into a data file, but it does into the small ones beside them.
    if os.path.basename(os.path.dirname(source)) == "d":
        try:
            os.link(source, target)
            return target
        except OSError:
            pass  # a file system without hard links
    return shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
    descriptor = os.open(dst.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
