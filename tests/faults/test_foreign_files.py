"""Bytes of any kind give a value, or a ValueError or OSError that names the file: nothing else, no code that
runs, no hang.

INPUTS in the environment: changed files of each reader (`make torture`: many, and others in each run)."""

import contextlib
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.foreign_files import READERS, Change, Files, Reader
from tests.waiting import at_most

SECONDS = 20  # of a file below a megabyte, on a busy machine
_INPUTS = os.environ.get("INPUTS")
_LIMITS = [0, 1, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
_TEXTS = (b"nan", b"inf", b"-1", b"1e999", b"9" * 5000, b"\x00", b"\xff\xfe", b"\n", b"\r", b" ", b",", b"../../x")
_RUNS_CODE = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pty.spawn"}
_RUNS_CODE |= {"socket.connect", "socket.bind", "pickle.find_class", "os.mkdir", "os.remove", "os.rename", "os.chmod"}
_watching, _ran = [False], list[str]()


def _audit(event: str, arguments: Any) -> None:
    if _watching[0] and event in _RUNS_CODE:
        _ran.append(f"{event} {arguments}")


sys.addaudithook(_audit)


class Slow(BaseException):
    """A file took more than SECONDS; no reader takes it for damage."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Fails where code runs, or it takes too long."""
    _watching[0] = True
    try:
        with at_most(SECONDS, Slow), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _watching[0] = False
        ran, _ran[:] = [*_ran], []
    assert not ran


def check(reader: Reader, folder: Path, files: Files) -> bool:
    """Whether the files give a value. Fails for anything but an error that names one of them."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        with watched():
            reader.read(folder)
    except OSError:
        return False
    except ValueError as error:
        said = str(error)
    else:
        return True
    assert str(folder) in said
    return False


def changes(words: Sequence[bytes]) -> st.SearchStrategy[Change]:
    """One to four parts that are replaced, put in, left out, or cut off with all that follows."""
    number = st.builds(
        lambda order, kind, value: struct.pack(order + kind, value % 256 ** struct.calcsize(kind)),
        st.sampled_from("<>"), st.sampled_from("BHIQ"), st.sampled_from(_LIMITS),
    )  # fmt: skip
    piece = st.one_of(number, st.binary(max_size=8), st.sampled_from((*_TEXTS, *words)))
    part = st.tuples(st.floats(0, 1), st.sampled_from((0, 1, 4, 8, -1, -1, 1 << 30)), piece)

    def change(parts: list[tuple[float, int, bytes]], data: bytes) -> bytes:
        for place, removed, piece in parts:
            at = int(place * len(data))
            data = data[:at] + piece + data[at + (len(piece) if removed < 0 else removed) :]
        return data

    return st.lists(part, min_size=1, max_size=4).map(lambda parts: lambda data: change(parts, data))


@pytest.mark.parametrize("name", READERS)
def test_changed_files(tmp_path, name):
    reader = READERS[name]
    seeds = reader.seeds()
    for file, content in seeds[0].items():
        (tmp_path / file).write_bytes(content)
    with watched():
        reader.read(tmp_path)  # an unchanged file

    @settings(
        max_examples=int(_INPUTS or 40), derandomize=not _INPUTS, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.data())
    def any_change(data: st.DataObject) -> None:
        files = dict(data.draw(st.sampled_from(seeds)))
        changed = reader.changed or data.draw(st.sampled_from(sorted(files)))
        change = data.draw(changes(reader.words))
        inside = data.draw(st.booleans())
        files[changed] = reader.inside(files[changed], change) if inside else change(files[changed])
        check(reader, tmp_path, files)

    any_change()


@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file(tmp_path, name, kind):
    """A FIFO never begins, a link to a device never ends, or leads to itself."""
    reader = READERS[name]
    files = dict(reader.seeds()[0])
    changed = reader.changed or max(files, key=lambda file: len(files[file]))
    del files[changed]
    path = tmp_path / changed
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    assert not check(reader, tmp_path, files) or kind == "loop"  # as a file that is not there


@pytest.mark.parametrize("code", ["os.system('true')", "os.mkdir('/proc/none')", r"pickle.loads(b'cbuiltins\nlen\n.')"])
def test_the_watch_sees_code_that_runs(code):
    with pytest.raises(AssertionError), watched(), contextlib.suppress(OSError):
        eval(code, {"os": os, "pickle": pickle})
