"""Data as other people's programs write it: .rec files, lists, shards, databases and pairs."""

import io
import struct

import numpy as np

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
