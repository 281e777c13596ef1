"""What files and names of strangers cannot do: fill the memory, keep a reader waiting, move the cursor; and who may
read what a run writes."""

import logging
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from partial_fc import printable
from partial_fc.cli import main
from partial_fc.data import ImageFolder
from partial_fc.data.decode import cv2, decode
from partial_fc.data.npy import map_npz, read_npy
from partial_fc.data.sample import BadRecord
from partial_fc.files import make_private
from partial_fc.verbs.checkpoint.remap_classes import Plan, _map

EVIL = "mallory\x1b[2J\tx\u202e\udcff"
SHOWN = r"mallory\x1b[2J\tx\u202e\udcff"


# ---- images


@pytest.mark.parametrize("ending", [".jpg", ".png", ".bmp", ".gif"])
def test_an_image_of_too_many_pixels_is_refused(ending):
    image = np.zeros((2000, 2000, 3), np.uint8)
    content = cv2.imencode(ending, image)[1].tobytes()
    assert decode(content).shape == image.shape
    whole = cv2.imencode(ending, np.zeros((6, 6, 3), np.uint8))[1].tobytes()
    width, height = (65500, 65500) if ending == ".jpg" else (40000, 40000)
    with pytest.raises(BadRecord, match=r"pixels|no image"):
        decode(_with_size(whole, ending, width, height))


def test_a_photo_of_too_many_pixels_is_decoded_smaller(monkeypatch):
    image = np.zeros((1200, 2001, 3), np.uint8)
    image[:, 1000:] = (200, 100, 50)
    content = cv2.imencode(".jpg", image)[1].tobytes()
    for allowed, part in ((1200 * 2001, 1), (1200 * 2001 - 1, 2), (1200 * 2001 // 60, 8)):
        monkeypatch.setattr("partial_fc.data.decode.MAX_JPEG", allowed)
        found = decode(content, np.empty((1200, 2001, 3), np.uint8))
        assert found.shape == (-(-1200 // part), -(-2001 // part), 3)
        assert abs(found[-1, -1].astype(int) - (50, 100, 200)).max() < 4
    monkeypatch.setattr("partial_fc.data.decode.MAX_JPEG", 1200 * 2001 // 65)
    with pytest.raises(BadRecord, match="of 2001 x 1200 pixels"):
        decode(content)


def _with_size(content: bytes, ending: str, width: int, height: int) -> bytes:
    if ending == ".jpg":
        at = content.index(b"\xff\xc0") + 5
        return content[:at] + struct.pack(">HH", height, width) + content[at + 4 :]
    at, form = {".png": (16, ">II"), ".bmp": (18, "<ii"), ".gif": (6, "<HH")}[ending]
    content = content[:at] + struct.pack(form, width, height) + content[at + struct.calcsize(form) :]
    return content[:29] + struct.pack(">I", zlib.crc32(content[12:29])) + content[33:] if ending == ".png" else content


def test_texts_of_a_png_are_not_read():
    """A thousand of them can be megabytes each."""
    content = cv2.imencode(".png", np.full((4, 4, 3), 9, np.uint8))[1].tobytes()
    text = b"zTXt" + b"a\0\0" + zlib.compress(bytes(1 << 20))
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    assert decode(content[:33] + 50 * chunk + content[33:]).tolist() == decode(content).tolist()


# ---- what is no file, or a far larger one


def test_files_that_are_none(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.jpg").symlink_to("/dev/zero")
    with open(tmp_path / "a/2.jpg", "wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "a/3.jpg").symlink_to(__file__)
    (tmp_path / "a/up").symlink_to(tmp_path)  # a loop of folders: they are not walked through
    images = ImageFolder(tmp_path)
    for index, words in enumerate(("no regular file", "at most 536,870,912 are read")):
        with pytest.raises(BadRecord, match=rf"{index + 1}\.jpg: .*{words}"):
            images.read(index)
    assert len(images.read(2).image) > 1000


def test_arrays_say_what_they_hold(tmp_path):
    path = tmp_path / "x.npy"
    for array in (
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((3, 4), "<f2")),
        np.array(["é", "bc"]),
        np.zeros(()),
    ):
        np.save(path, array)
        found = read_npy(path)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    for header in ("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 32), }", "(" * 5000, "{}"):
        path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode() + bytes(64))
        with pytest.raises(ValueError, match=r"x\.npy"):
            read_npy(path)
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(1 << 20))
    with pytest.raises(ValueError, match=r"x\.npz .*compressed"):
        map_npz(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", a=np.arange(3), b=np.array(["x"]))
    assert {name: array.tolist() for name, array in map_npz(tmp_path / "y.npz").items()} == {"a": [0, 1, 2], "b": ["x"]}


# ---- names


def test_names_are_shown_escaped(capsys):
    assert printable.name(EVIL) == SHOWN
    assert printable.lines("a\tb\nc\x9b\r") == "a\tb\nc\\x9b\\r"
    record = logging.LogRecord("partial_fc", logging.INFO, "", 0, "class %s", (EVIL,), None)
    assert printable.Formatter("%(message)s").format(record) == r"class mallory\x1b[2J" + "\t" + r"x\u202e\udcff"
    assert _map(Plan([EVIL], [0]), [EVIL])[1] == f"0\t0\t{SHOWN}"


def test_a_command_shows_no_controls(monkeypatch, capsys, tmp_path):
    """On stdout and in its last words."""
    folder = tmp_path / "a\x1b[31m"
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["partial-fc", "checkpoint", "verify", str(folder)])
    with pytest.raises(SystemExit):
        main()
    said = "".join(capsys.readouterr())
    assert r"a\x1b[31m" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("how", ["warnings.warn(evil)", "logging.getLogger('x').warning(evil)", "raise OSError(evil)"])
def test_what_python_itself_prints_shows_no_controls(how):
    code = "import logging, warnings; from partial_fc.printable import clean_stderr; clean_stderr(); "
    code += f"evil = 'red\\x1b[31m'; {how}"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert r"red\x1b[31m" in said
    assert "\x1b" not in said


# ---- modes


@pytest.mark.parametrize(
    ("variable", "mode"), [(None, 0o600), ("027", 0o640), ("022", 0o644), ("7777", None), ("x", None)]
)
def test_who_may_read_what_is_written(monkeypatch, tmp_path, variable, mode):
    code = "import os; from partial_fc.files import make_private; os.umask(0o022); make_private(); "
    code += f"open({str(tmp_path / 'f')!r}, 'w')"
    environment = {**os.environ, "PARTIAL_FC_UMASK": variable or ""}
    if variable is None:
        del environment["PARTIAL_FC_UMASK"]
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if mode is None:
        assert "expected a umask such as 077, 027 or 022" in done.stderr
    else:
        assert not done.stderr
        assert (tmp_path / "f").stat().st_mode & 0o777 == mode


def test_a_stricter_umask_stays():
    before = os.umask(0o177)
    try:
        make_private()
        assert os.umask(0) == 0o177
    finally:
        os.umask(before)
