"""A directory gets its name when all of it is on the disk: a power cut leaves no half of it."""

import os
from pathlib import Path

from glm5_jax.checkpoint.convert import convert
from glm5_jax.checkpoint.export import export


def test_what_is_renamed_into_place_is_on_the_disk(tmp_path, tiny, monkeypatch):
    flushed, unflushed = set(), {}

    def watch(name):
        original = getattr(os, name)

        def rename(source, target):
            below = [Path(source), *Path(source).rglob("*")]
            unflushed[Path(target).name] = [
                path.name for path in below if path.stat().st_ino not in flushed
            ]
            original(source, target)

        monkeypatch.setattr(os, name, rename)

    def fsync(descriptor, original=os.fsync):
        original(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        watch(name)
    source = tiny()
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "back")
    assert unflushed["orbax"] == unflushed["back"] == []
    assert tmp_path.stat().st_ino in flushed
