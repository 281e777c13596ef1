"""A file takes the place of an older one at once, or not at all."""

import errno
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

from partial_fc.files import in_cache, replacing


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


@pytest.fixture
def unknown_user(monkeypatch):
    """This process has the rights of a user without an entry in passwd and without variables, as in a container. Yields
    their temporary folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = tempfile.mkdtemp()
    os.chown(folder, 54321, 54321)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    os.setresuid(54321, 54321, 0)
    yield Path(folder)
    os.setresuid(0, 0, 0)
    shutil.rmtree(folder)


@pytest.mark.parametrize("home", [None, "/", "/proc/1", "/etc/passwd"])
def test_the_cache_of_a_user_without_a_usable_home_is_temporary_and_private(unknown_user, monkeypatch, home):
    if home:
        monkeypatch.setenv("HOME", home)
    with pytest.warns(RuntimeWarning, match="XDG_CACHE_HOME names another folder"):
        path = in_cache("kernels", "x.so")
    assert path == unknown_user / "partial-fc-54321" / "kernels" / "x.so"
    path.touch()
    assert path.parents[1].stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(unknown_user / "named"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_cache("kernels", "x.so") == unknown_user / "named" / "partial-fc" / "kernels" / "x.so"


def test_a_temporary_cache_that_others_can_write_is_refused(unknown_user):
    (unknown_user / "partial-fc-54321").mkdir()
    (unknown_user / "partial-fc-54321").chmod(0o777)
    with pytest.raises(PermissionError, match="others can write here: set XDG_CACHE_HOME"):
        in_cache("kernels", "x.so")
