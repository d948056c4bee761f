"""A file appears whole, and no other kind of file is lost for it."""

import pytest

from glm5_jax.whole_file import check_place, write_whole


def test_file_is_written_and_another_of_its_kind_replaced(tmp_path):
    path = tmp_path / "a.html"
    write_whole(path, b"<html>one", b"<html>")
    write_whole(path, b"<html>two", b"<html>")
    assert path.read_bytes() == b"<html>two"
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_file_of_another_kind_is_kept(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    with pytest.raises(OSError, match="another kind") as caught:
        write_whole(path, b"<html>", b"<html>")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"weights"


def test_what_is_no_file_is_kept(tmp_path):
    for place in (tmp_path, "/dev/null"):
        with pytest.raises(OSError, match="no file"):
            check_place(place, lambda head: True)
    with pytest.raises(OSError, match="no directory"):
        check_place(tmp_path / "none" / "a.html", lambda head: True)
