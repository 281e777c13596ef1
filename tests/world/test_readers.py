"""Data as other people's programs write it: .rec files, lists, shards, databases and pairs."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest

from partial_fc.data import open_source
from partial_fc.data.check.identities import check_identities
from partial_fc.data.check.recordio import Records
from tests.world.made import image, write_rec
from tests.world.rows import Row, table

IMAGES = [(key + 1, float(key % 12), image(key % 12, key)) for key in range(48)]
TWO_NUMBERS = [(key, [label, 1.0], content) for key, label, content in IMAGES]
SEVERAL_LABELS = [(key, [float(key % 5), float(key % 3)], image(key % 5, key)) for key in range(48)]
PLAIN = [(key - 1, label, content) for key, label, content in IMAGES]


# ---- record 0


@table(
    [
        Row("counts, nothing behind", "FedFR's split_FL.py", [*IMAGES, (0, [49, 12], b"")], (48, 12, 1)),
        Row("counts, three numbers", "FedFR, with a start", [*IMAGES, (0, [49, 12, 0], b"")], (48, 12, 1)),
        Row("counts, a picture behind", "a CIFAR-to-rec script", [*IMAGES, (0, [49, 12], image(3, 3))], (48, 12, 1)),
        Row("counts first, a black PNG behind", "an ImageFolder script",
            [(0, [49, 12], image(0, 0, ending=".png")), *IMAGES], (48, 12, 1)),
        Row("counts, images of two numbers", "IRHeader(2, [label, 1])", [*TWO_NUMBERS, (0, [49, 12], image(3, 3))],
            (48, 12, 1)),
        Row("counts without the 1 added", "arcface_torch reads range(1, 48), too", [*IMAGES, (0, [48, 12], b"")],
            (47, 12, 1)),
        Row("an image with two labels", "multi-label sets", SEVERAL_LABELS, (48, 5, 0)),
        Row("its first of two labels is the number of images", "multi-label sets, 49 classes",
            [(0, [48.0, 3.0], image(1, 1)), *SEVERAL_LABELS[1:]], (48, 49, 0)),
        Row("an image with one label", "im2rec", PLAIN, (48, 12, 0)),
    ]
)  # fmt: skip
def test_record_0(row: Row, tmp_path):
    source = open_source(write_rec(tmp_path, row.given))
    first = source.read(0)
    assert (len(source), source.num_classes, first.key) == row.right
    records = Records(tmp_path / "train.rec")  # what `doctor data` sees
    assert (len(records), int(records.key_N[0])) == (row.right[0], row.right[2])
    assert [finding.key for finding in check_identities(records)[0] if finding.severity == "error"] == []


# ---- lists of images


def opened(folder: Path, name: str, content: str | bytes):
    """Opens a list, whose pictures exist, or not, in the folder."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return open_source(folder / name)


@table(
    [
        Row("aligned, path, label as .lst", "insightface's face2rec2, issues 345, 127, 80", ("l.lst", "1\ta b/1.jpg\t3\n"),
            ("a b/1.jpg", 3)),
        Row("aligned, path, label as .txt", "insightface", ("l.txt", "1\ta/1.jpg\t3\n"), ("a/1.jpg", 3)),
        Row("with a box", "insightface 791", ("l.lst", "1\ta/1.jpg\t3\t1\t2\t40\t44\n"), ("a/1.jpg", 3)),
        Row("with box and points", "insightface", ("l.lst", "1\ta/1.jpg\t3\t1\t2\t40\t44" + "\t5.5" * 10 + "\n"), ("a/1.jpg", 3)),
        Row("index, label, path", "im2rec", ("l.lst", "0\t3.000000\ta/1.jpg\n"), ("a/1.jpg", 3)),
        Row("index 1, label 0, path", "im2rec", ("l.lst", "1\t0\ta/1.jpg\n"), ("a/1.jpg", 0)),
        Row("lines end as Windows writes them", "Notepad", ("l.lst", "1\ta/1.jpg\t3\r\n"), ("a/1.jpg", 3)),
        Row("im2rec with Windows' line ends", "Notepad", ("l.lst", "7\t3\ta/1.jpg\r\n"), ("a/1.jpg", 3)),
        Row("a byte-order mark", "Excel, PowerShell", ("l.txt", b"\xef\xbb\xbfa/1.jpg 3\r\n"), ("a/1.jpg", 3)),
        Row("a byte-order mark in a .lst", "Excel", ("l.lst", b"\xef\xbb\xbf1\ta/1.jpg\t3\r\n"), ("a/1.jpg", 3)),
        Row("identity file", "CelebA's identity_CelebA.txt", ("l.txt", "000001.jpg 2880\n"), ("000001.jpg", 2880)),
        Row("commas", "CSV of CelebA", ("l.csv", "000001.jpg,2880\n"), ("000001.jpg", 2880)),
        Row("commas, with a header", "pandas", ("l.csv", "image_id,identity\n000001.jpg,2880\n"), ("000001.jpg", 2880)),
        Row("a path with blanks and a comma", "photos", ("l.csv", "my photo 1, new.jpg,5\n"), ("my photo 1, new.jpg", 5)),
        Row("a path that ends in a number", "photos", ("l.txt", "img 5 7\n"), ("img 5", 7)),
        Row("a label with a point", "pandas with gaps", ("l.txt", "a.jpg 3.0\n"), ("a.jpg", 3)),
    ]
)  # fmt: skip
def test_lists(row: Row, tmp_path):
    source = opened(tmp_path, *row.given)
    assert (source.key(0), int(source.labels()[0])) == row.right


@table(
    [
        Row("a photo", "user study", ("kim.png", image(0, 0, ending=".png")), "a PNG picture"),
        Row("an archive", "user study", ("photos.zip", b"PK\x03\x04" + bytes(60)), "a zip archive"),
        Row("a login page", "captive portals", ("list.txt", b"\n<!DOCTYPE html><html>"), "an HTML page"),
        Row("a pointer", "git clone without LFS", ("l.lst", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
            "git lfs pull"),
        Row("a text of PowerShell", "Out-File", ("l.txt", "a.jpg 3\r\n".encode("utf-16")), "UTF-16"),
        Row("nothing", "a full disk", ("l.txt", b""), "empty"),
        Row("zeros", "a power cut", ("l.txt", bytes(4096)), "zeros"),
    ]
)  # fmt: skip
def test_what_is_no_list_is_named(row: Row, tmp_path):
    with pytest.raises(ValueError, match=row.right):
        opened(tmp_path, *row.given)


def test_not_aligned_is_told(tmp_path, caplog):
    opened(tmp_path, "l.lst", "0\ta/1.jpg\t3\t1\t2\t40\t44\n1\ta/2.jpg\t3\n")
    assert "1 of 2" in caplog.text
    assert "not aligned" in caplog.text
