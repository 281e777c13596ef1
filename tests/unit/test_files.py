"""A file takes the place of an older one at once, or not at all."""

import errno

import pytest

from partial_fc.files import replacing


@pytest.mark.parametrize("durable", [False, True])
def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path, durable):
    path = tmp_path / "x.json"
    path.write_text("old")
    with replacing(path, durable) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_errors_of_the_disk_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as error, replacing(tmp_path / "no/x") as partial:
        partial.write_text("")
    assert error.value.filename == str(tmp_path / "no/x")
    with pytest.raises(OSError, match="No space") as error, replacing(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space")
    assert error.value.filename == str(tmp_path / "x")
    with pytest.raises(OSError, match="elsewhere") as error, replacing(tmp_path / "x"):
        raise OSError(errno.EIO, "broken", "elsewhere")
    assert error.value.filename == "elsewhere"
