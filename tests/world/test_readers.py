"""Data as other people's programs write it: .rec files, lists, shards, databases and pairs."""

import gzip
import pickle
import re
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from partial_fc.data import Loader, open_source
from partial_fc.data.check.images import check_images, scan_images
from partial_fc.data.check.labels import check_labels
from partial_fc.data.decode import decode
from partial_fc.data.idx import read_idx, read_set
from partial_fc.data.npy import read_npy
from partial_fc.data.pairs import read_pairs
from partial_fc.data.recordio import write_index
from partial_fc.data.sample import BadRecord, SourceGone
from partial_fc.data.sets import ranges
from partial_fc.data.sets.parquet import open_parquet
from partial_fc.data.sets.tar_shards import write_tar_index
from partial_fc.data.transform import SquareImage
from partial_fc.evaluate.verification import check_pairs
from partial_fc.verbs.data.draw_pairs import draw_pairs
from partial_fc.verbs.data.pack import PackOptions, pack_images
from partial_fc.verbs.data.pair_list import read_pair_list
from recipes.imagenet.databases import open_database
from recipes.imagenet.databases.records import Datum
from tests.recipes.imagenet.databases import write_lmdb
from tests.unit.data.shards import RangeServer, serving, write_members, write_parquet
from tests.world.made import image, picture, write_rec
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


# ---- lists of images


def opened(folder: Path, name: str, content: str | bytes):
    """Opens a list, whose pictures exist, or not, in the folder."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return open_source(folder / name)


@table(
    [
        Row("aligned, path, label as .lst", "insightface's face2rec2, issues 345, 127, 80",
            ("l.lst", "1\ta b/1.jpg\t3\n"), ("a b/1.jpg", 3)),
        Row("aligned, path, label as .txt", "insightface", ("l.txt", "1\ta/1.jpg\t3\n"), ("a/1.jpg", 3)),
        Row("with a box", "insightface 791", ("l.lst", "1\ta/1.jpg\t3\t1\t2\t40\t44\n"), ("a/1.jpg", 3)),
        Row("with box and points", "insightface",
            ("l.lst", "1\ta/1.jpg\t3\t1\t2\t40\t44" + "\t5.5" * 10 + "\n"), ("a/1.jpg", 3)),
        Row("index, label, path", "im2rec", ("l.lst", "0\t3.000000\ta/1.jpg\n"), ("a/1.jpg", 3)),
        Row("index 1, label 0, path", "im2rec", ("l.lst", "1\t0\ta/1.jpg\n"), ("a/1.jpg", 0)),
        Row("lines end as Windows writes them", "Notepad", ("l.lst", "1\ta/1.jpg\t3\r\n"), ("a/1.jpg", 3)),
        Row("im2rec with Windows' line ends", "Notepad", ("l.lst", "7\t3\ta/1.jpg\r\n"), ("a/1.jpg", 3)),
        Row("a byte-order mark", "Excel, PowerShell", ("l.txt", b"\xef\xbb\xbfa/1.jpg 3\r\n"), ("a/1.jpg", 3)),
        Row("a byte-order mark in a .lst", "Excel", ("l.lst", b"\xef\xbb\xbf1\ta/1.jpg\t3\r\n"), ("a/1.jpg", 3)),
        Row("identity file", "CelebA's identity_CelebA.txt", ("l.txt", "000001.jpg 2880\n"), ("000001.jpg", 2880)),
        Row("commas", "CSV of CelebA", ("l.csv", "000001.jpg,2880\n"), ("000001.jpg", 2880)),
        Row("commas, with a header", "pandas", ("l.csv", "image_id,identity\n000001.jpg,2880\n"), ("000001.jpg", 2880)),
        Row("a path with blanks and a comma", "photos",
            ("l.csv", "my photo 1, new.jpg,5\n"), ("my photo 1, new.jpg", 5)),
        Row("a path that ends in a number", "photos", ("l.txt", "img 5 7\n"), ("img 5", 7)),
        Row("a label with a point", "pandas with gaps", ("l.txt", "a.jpg 3.0\n"), ("a.jpg", 3)),
    ]
)  # fmt: skip
def test_lists(row: Row, tmp_path):
    source = opened(tmp_path, *row.given)
    assert (source.key(0), int(source.labels()[0])) == row.right


def test_not_aligned_is_told(tmp_path, caplog):
    opened(tmp_path, "l.lst", "0\ta/1.jpg\t3\t1\t2\t40\t44\n1\ta/2.jpg\t3\n")
    assert "1 of 2" in caplog.text
    assert "not aligned" in caplog.text


# ---- pairs

PEOPLE = ("Aaron_Peirsol", "Bo_Pelini", "Cate_Blanchett", "Dan_Rather")
A, B, C, D = PEOPLE
VIEW_2 = f"""{A}\t1\t2
{B}\t1\t3
{A}\t1\t{B}\t3
{A}\t2\t{C}\t3
{C}\t1\t2
{D}\t1\t3
{C}\t2\t{D}\t1
{B}\t2\t{D}\t3
"""


def lfw(folder: Path, ending: str = ".jpg") -> None:
    for at, name in enumerate(PEOPLE):
        (folder / name).mkdir()
        for number in (1, 2, 3):
            (folder / name / f"{name}_{number:04d}{ending}").write_bytes(image(at, number))


@table(
    [
        Row("pairs.txt, tabs", "LFW; insightface 337, 1669, 2497", "2\t2\n" + VIEW_2, 2),
        Row("pairs.txt, blanks", "LFW, copied from a page", "2 2\n" + VIEW_2.replace("\t", " "), 2),
        Row("Windows' line ends and a mark", "Notepad", "\ufeff2\t2\r\n" + VIEW_2.replace("\n", "\r\n"), 2),
    ]
)  # fmt: skip
def test_lfws_pairs(row: Row, tmp_path):
    lfw(tmp_path)
    (tmp_path / "pairs.txt").write_text(row.given)
    pairs = read_pair_list(tmp_path / "pairs.txt")
    assert pairs.folds == row.right
    names = [(pairs.images.names[a], pairs.images.names[b]) for a, b in zip(pairs.first_N, pairs.second_N, strict=True)]
    found = dict(zip(names, pairs.same_N.tolist(), strict=True))
    assert len(found) == 8
    assert found[f"{A}/{A}_0001.jpg", f"{A}/{A}_0002.jpg"] is True
    assert found[f"{C}/{C}_0002.jpg", f"{D}/{D}_0001.jpg"] is False
    # The folds' pairs stay together, and both kinds are mixed.
    assert {first[0] for first, _ in names[:4]} == {"A", "B"}
    assert pairs.same_N.tolist() == [True, False] * 4


@table(
    [
        Row("no first line, other endings", "InsightFace-v2 1", ("", ".png"), "Bo_Pelini/Bo_Pelini_0001.png"),
        Row("view 1", "LFW's pairsDevTest.txt", ("1\n", ".jpg"), "Bo_Pelini/Bo_Pelini_0001.jpg"),
    ]
)
def test_lfws_other_lists(row: Row, tmp_path):
    lfw(tmp_path, row.given[1])
    (tmp_path / "pairs.txt").write_text(row.given[0] + "Bo_Pelini 1 2\nBo_Pelini 1 Dan_Rather 3\n")
    pairs = read_pair_list(tmp_path / "pairs.txt")
    assert (pairs.images.names[0], pairs.same_N.tolist(), pairs.folds) == (row.right, [True, False], 10)


def test_calfws_pairs(tmp_path):
    for number in range(1, 5):
        (tmp_path / f"A_B_{number:04d}.jpg").write_bytes(image(0, number))
    lines = ["A_B_0001.jpg 1", "A_B_0002.jpg 1", "A_B_0003.jpg 0", "A_B_0004.jpg 0"]
    (tmp_path / "pairs_CALFW.txt").write_text("\n".join(lines))
    pairs = read_pair_list(tmp_path / "pairs_CALFW.txt")
    assert (pairs.same_N.tolist(), pairs.second_N.tolist()) == ([True, False], [1, 3])
    (tmp_path / "pairs_CALFW.txt").write_text("\n".join(lines[:3]))
    with pytest.raises(ValueError, match="two lines"):
        read_pair_list(tmp_path / "pairs_CALFW.txt")


def test_a_header_that_counts_other_pairs(tmp_path):
    (tmp_path / "pairs.txt").write_text("10\t300\n" + VIEW_2)
    with pytest.raises(ValueError, match=r"8 pairs.*10 folds of 2 x 300"):
        read_pair_list(tmp_path / "pairs.txt", tmp_path)


@table(
    [
        Row(f"drawn in {drawn}, scored in {scored}", "user study: 29.00 % for what is 53.50 %", (drawn, scored), None)
        for drawn, scored in ((5, 10), (1, 10), (10, 5), (10, 10), (4, 7))
    ]
)
def test_drawn_pairs_have_both_kinds_in_any_number_of_folds(row: Row, caplog):
    _, same_N = draw_pairs(np.repeat(np.arange(40), 6), 200, row.given[0], seed=0)
    check_pairs(Path("mine.bin"), same_N, row.given[1])
    assert caplog.text == ""
    share = [of_fold.mean() for of_fold in np.array_split(same_N, row.given[1])]
    assert max(abs(each - 0.5) for each in share) < 0.05


def test_folds_of_one_kind_are_told(caplog):
    check_pairs(Path("mine.bin"), np.tile(np.repeat([True, False], 20), 5))
    assert "mine.bin: 10 of its 10 folds" in caplog.text


def test_few_classes_need_other_folds():
    with pytest.raises(ValueError, match=r"12 classes in 10 folds: .* --folds 6 --num-pairs 360\b"):
        draw_pairs(np.repeat(np.arange(12), 6), 6000, 10, seed=0)


# ---- webdataset's shards


def shard(path: Path, **contents) -> Path:
    """Writes KEY.ENDING of three samples; contents: ENDING (__ for a point) -> of a number."""
    each = [(number, ending.replace("__", "."), of) for number in range(3) for ending, of in contents.items()]
    return write_members(path, ((f"a/{number:06d}.{ending}", of(number)) for number, ending, of in each))


def cls(number: int) -> bytes:
    return b"%d" % (number + 4)


def face(number: int) -> bytes:
    return image(number, 0)


def other(number: int) -> bytes:
    return image(9, number, ending=".png")


@table(
    [
        Row("a picture and a .cls", "webdataset", {"cls": cls, "jpg": face}, None),
        Row("a .json of metadata beside it", "img2dataset, timm",
            {"cls": cls, "jpg": face, "json": lambda n: b'{"width": 40, "sha256": "0"}'}, None),
        Row("another label in the .json", "img2dataset",
            {"json": lambda n: b'{"label": 1}', "cls": cls, "jpg": face}, None),
        Row("identity in a .json", "face sets", {"jpg": face, "json": lambda n: b'{"identity": %d}' % (n + 4)}, None),
        Row("capitals", "cameras", {"CLS": cls, "JPG": face}, None),
        Row("a mask, the picture chosen", "segmentation sets", {"cls": cls, "jpg": face, "mask__png": other}, "jpg"),
        Row("left and right, by name", "webdataset 20", {"cls": cls, "left__jpg": face, "right__png": other}, "left"),
        Row("by name and ending", "webdataset 20", {"right__png": other, "left__jpg": face, "cls": cls}, "left.jpg"),
    ]
)  # fmt: skip
def test_shards(row: Row, tmp_path):
    path = shard(tmp_path / "a.tar", **row.given)
    assert write_tar_index(path, row.right)[1] == 3
    source = open_source(path)
    assert [source.read(n).image for n in range(3)] == [face(n) for n in range(3)]
    assert source.labels().tolist() == [4, 5, 6]


@table(
    [
        Row("two pictures", "webdataset 20", ({"cls": cls, "left__png": other, "right__png": other}, None),
            r"a/000000 has several pictures, \.left\.png and \.right\.png; .*--picture left\.png"),
        Row("a thumbnail", "img2dataset",
            ({"cls": cls, "jpg": face, "thumb__jpg": face}, None), r"\.jpg and \.thumb\.jpg"),
        Row("none of that name", "a typing error", ({"cls": cls, "left__png": other}, "middle"), r"no key\.middle"),
    ]
)  # fmt: skip
def test_shards_that_need_a_choice(row: Row, tmp_path):
    with pytest.raises(ValueError, match=row.right):
        write_tar_index(shard(tmp_path / "a.tar", **row.given[0]), row.given[1])


# ---- servers


class Faulty(RangeServer):
    """A server of ranges that behaves as `mode` says, once its list is not empty; each entry for one request."""

    mode: ClassVar[list[str]]

    def do_GET(self) -> None:
        if not self.mode:
            super().do_GET()
            return
        self.seen.append((self.requestline, dict(self.headers)))
        mode = self.mode[0] if self.mode[0].endswith("for ever") else self.mode.pop(0)
        what = mode.partition(" ")[0]
        content = (self.folder / "a.tar").read_bytes()
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        size = len(content) + (what == "replaced")
        if what == "shifted":
            first, last = first - 512, last - 512
        if what in ("replaced", "shifted", "overwritten"):
            part = content[first : last + 1] if what != "overwritten" else bytes(last + 1 - first)
            self._answer(206, part, {"Content-Range": f"bytes {first}-{last}/{size}"})
        elif what == "login":
            self._answer(200, b"<!DOCTYPE html><html>please log in</html>")
        elif what == "elsewhere":
            self._answer(302, b"", {"Location": "file:///etc/passwd"})
        else:
            self._answer(int(what))


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Yields (URL of a shard with an index, its server's modes, what it has seen)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ranges, "WAITS_S", (0.0, 0.0))
    write_tar_index(shard(tmp_path / "a.tar", cls=cls, jpg=face))
    mode: list[str] = []
    seen: list[tuple[str, dict[str, str]]] = []
    with serving(tmp_path, kind=Faulty, mode=mode, seen=seen) as url:
        yield f"{url}/a.tar", mode, seen


@table(
    [
        Row("an expired signature", "S3, GCS", "403", r"answers 403"),
        Row("a token that has expired", "the Hugging Face hub", "401", r"answers 401.*no password was sent.*HF_TOKEN"),
        Row("moved away", "a cleaned bucket", "404", r"answers 404"),
        Row("a login page", "captive portals", "login", r"answers 200 OK.* an HTML page"),
        Row("another file", "a new upload", "replaced", r"had \d+ bytes and has \d+ now"),
        Row("another file of equal size", "a new upload", "overwritten", r"shard has changed"),
        Row("another range", "a broken cache", "shifted", r"sends bytes from \d+, not \d+"),
        Row("a redirect that is not followed", "a broken proxy", "elsewhere", r"redirected from http to file"),
    ]
)
def test_a_server_that_refuses(row: Row, faulty, monkeypatch):
    url, mode, seen = faulty
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def loader():
        return Loader(open_source(url), SquareImage(40), batch_size=1, num_workers=0)

    with loader() as refused:
        mode[:] = [f"{row.given} for ever"]
        before = len(seen)
        with pytest.raises(ValueError, match=row.right):  # before the first step: at once
            refused.next_update(1)
        assert len(seen) == before + 1
    mode.clear()
    with loader() as whole, loader() as again, loader() as gone:
        first, second = whole.next_update(1), whole.next_update(1)
        gone.next_update(1)
        again.next_update(1)
        mode[:] = [row.given] * 2
        assert torch.equal(again.next_update(1)[0].input_B, second[0].input_B)  # it was asked for before
        assert again.gone is None
        assert mode == []
        mode[:] = [f"{row.given} for ever"]
        gone.next_update(1)
        assert isinstance(gone.gone, SourceGone)  # the loop then saves a checkpoint and ends with status 75
        assert re.search(row.right, str(gone.gone))
        assert not torch.equal(first[0].input_B, second[0].input_B)


HUB = "https://huggingface.co/datasets/a/b/resolve/main/0.tar"


@table(
    [
        Row("the hub", "webdataset 443", (HUB, {"HF_TOKEN": "hf_x"}), "hf_x"),
        Row("the older variable", "huggingface_hub", (HUB, {"HUGGING_FACE_HUB_TOKEN": " hf_x\n"}), "hf_x"),
        Row("a mirror", "HF_ENDPOINT",
            ("http://hub.lan:81/0.tar", {"HF_TOKEN": "hf_x", "HF_ENDPOINT": "http://hub.lan:81/"}), "hf_x"),
        Row("the mirror's other port", "HF_ENDPOINT",
            ("http://hub.lan/0.tar", {"HF_TOKEN": "hf_x", "HF_ENDPOINT": "http://hub.lan:81"}), ""),
        Row("not encrypted", "http://", (HUB.replace("https", "http"), {"HF_TOKEN": "hf_x"}), ""),
        Row("a host of that name's beginning", "an attack",
            ("https://huggingface.co.evil.net/0.tar", {"HF_TOKEN": "hf_x"}), ""),
        Row("another host", "an own server", ("https://data.lan/0.tar", {"HF_TOKEN": "hf_x"}), ""),
        Row("where the hub redirects to", "its CDN", ("https://cdn-lfs.hf.co/a?sign=1", {"HF_TOKEN": "hf_x"}), ""),
        Row("an empty token", "CI without secrets", (HUB, {"HF_TOKEN": ""}), ""),
    ]
)  # fmt: skip
def test_who_gets_the_token(row: Row, monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in row.given[1].items():
        monkeypatch.setenv(name, value)
    assert ranges.hub_token(row.given[0]) == row.right


def test_a_token_and_a_redirect(faulty, monkeypatch):
    """The server that HF_ENDPOINT names is asked with the token; where it redirects to, without."""
    url, _, seen = faulty
    first: list = []
    with serving(Path("/"), moved=url.replace("127.0.0.1", "localhost").removesuffix("/a.tar"), seen=first) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        monkeypatch.setenv("HF_ENDPOINT", hub)
        ranges.RemoteFile(f"{hub}/a.tar")
    assert [headers["Authorization"] for _, headers in first] == ["Bearer hf_x"]
    assert [headers.get("Authorization") for _, headers in seen] == [None]


# ---- databases


def datum(number: int, raw: bool = False) -> bytes:
    if not raw:
        return Datum(data=face(number), label=number + 4, encoded=True).SerializeToString()
    pixels = picture(number, 0)[..., ::-1].transpose(2, 0, 1)
    return Datum(channels=3, height=40, width=40, data=pixels.tobytes(), label=number + 4).SerializeToString()


@table(
    [
        Row("Datum of files", "Caffe's convert_imageset -encoded", (False, {}), None),
        Row("Datum of pixels", "Caffe's convert_imageset", (True, {}), None),
        Row("one file", "lmdb.open(subdir=False)", (False, {"subdir": False}), None),
    ]
)
def test_databases_of_faces(row: Row, tmp_path):
    raw, more = row.given
    records = {b"%08d" % number: datum(number, raw) for number in range(3)}
    source = open_source(write_lmdb(tmp_path / "faces", records, **more))
    assert (len(source), source.num_classes) == (3, 7)
    assert source.labels().tolist() == [4, 5, 6]
    assert SquareImage(40)(source.read(1), np.random.default_rng(0)).shape == (40, 40, 3)
    pack_images(PackOptions(tmp_path / "faces", tmp_path / "packed", image_size=40, num_workers=1))
    packed = open_source(tmp_path / "packed")
    assert packed.labels().tolist() == [4, 5, 6]
    if raw:
        assert np.abs(decode(packed.read(1).image).astype(int) - picture(1, 0)).mean() < 20
    else:
        assert packed.read(1).image == face(1)


@table(
    [
        Row("pictures by key", "haibo-qiu/FROM 6, labels in casia_kv.txt",
            {b"casia_%d" % n: face(n) for n in range(3)}, r"casia_0' is a JPEG picture.*Labels .* another file"),
        Row("pickles", "HaiyuWu/SOTA-Face-Recognition",
            {b"0": pickle.dumps((face(0), 0)), b"__len__": pickle.dumps(1), b"__keys__": pickle.dumps([b"0"])},
            r"'0' is a pickle.*pickles are not read"),
    ]
)  # fmt: skip
def test_databases_of_others_are_named(row: Row, tmp_path):
    with pytest.raises(ValueError, match=row.right):
        open_source(write_lmdb(tmp_path / "faces", row.given))


# ---- pictures that are not square


@table(
    [
        Row("crops of 112 x 96", "SphereFace, CosFace; FROM 6, CosFace 10", (112, 96), "16 of 112 rows"),
        Row("crops of 108 x 120", "wide crops", (108, 120), "12 of 120 columns"),
        Row("squares", "InsightFace", (112, 112), None),
    ]
)
def test_what_is_cut_off_is_told(row: Row):
    pictures = [image(number % 3, number, row.given) for number in range(6)]
    scan = scan_images(pictures.__getitem__, 6, 1)
    found = check_images(scan, np.zeros(6, np.int64), lambda i: {}, "faces", embedding=True)
    texts = [finding.what for finding in found if finding.key == "image-not-square"]
    assert [row.right in text and "--pad" in text for text in texts] == ([True] if row.right else [])


def test_packing_with_bars_keeps_all_rows(tmp_path):
    (tmp_path / "a/x").mkdir(parents=True)
    (tmp_path / "a/x/1.png").write_bytes(image(0, 0, (112, 96), ".png"))
    pack_images(PackOptions(tmp_path / "a", tmp_path / "packed", pad=True, num_workers=1))
    pixels = decode(open_source(tmp_path / "packed").read(0).image).astype(int)
    assert pixels.shape == (112, 112, 3)
    assert np.abs(pixels[:, 8:104] - decode(image(0, 0, (112, 96), ".png"))).mean() < 16
    assert max(pixels[:, :6].mean(), pixels[:, 106:].mean()) < 6


# ---- videos


def clips(folder: Path, data_dir: Path, videos: bool = True):
    pytest.importorskip("av")
    from recipes.kinetics.video import ClipList

    return ClipList(folder / "train.txt", data_dir, 2, videos=videos)


def test_a_list_of_videos_with_a_byte_order_mark(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfa.mp4 30 1\r\n")
    assert clips(tmp_path, tmp_path).names == ["a.mp4"]


@table(
    [
        Row("no such folder", "another host", ("v/a", "none", True), "no folder of this host"),
        Row("frames", "mmaction2's rawframes", ("frames/a", "v", True), "leave out --video-loader"),
        Row("videos", "GluonCV", ("clips/a.mp4", "v", False), "give --video-loader"),
        Row("videos without an ending", "GluonCV", ("clips/a", "v", False), "give --video-loader"),
        Row("the folder twice", "lists made elsewhere", ("v/clips/a", "v", True), r"begin with v.* --data-dir \S+"),
        Row("another ending", "yt-dlp", ("other/b", "v", True), r"b\.webm is there"),
        Row("nothing of that name", "a half copy", ("c", "v", True), "below --data-dir"),
    ]
)
def test_why_videos_are_missing(row: Row, tmp_path):
    for name in ("v/frames/a/img_00001.jpg", "v/clips/a.mp4", "v/other/b.webm"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    name, data_dir, videos = row.given
    (tmp_path / "train.txt").write_text(f"{name} 30 1\n")
    with pytest.raises(ValueError, match=row.right):
        clips(tmp_path, tmp_path / data_dir, videos).check_present(3)


def frames_of(path: Path) -> list:
    pytest.importorskip("av")
    from recipes.kinetics.video.frames import VideoFile

    return list(VideoFile(path).read(lambda n: [0]))


def box(kind: bytes, content: bytes) -> bytes:
    return (8 + len(content)).to_bytes(4, "big") + kind + content


FTYP = box(b"ftyp", b"isom\0\0\2\0isom")


@table(
    [
        Row("an HTML page as train.rec", "captive portals",
            ("train.rec", b"<!DOCTYPE html>" + b" " * 400), "an HTML page"),
        Row("a zip as .npz-like table", "wrong names", ("a.npy", b"PK\x03\x04" + bytes(99)), "a zip archive"),
        Row("a pointer as .parquet", "git clone",
            ("a.parquet", b"version https://git-lfs.github.com/spec/v1"),
            "git lfs pull"),
        Row("a .tgz called .tar", "mv a.tgz a.tar", ("a.tar", gzip.compress(bytes(2000))), "a gzip file"),
        Row("a picture as .bin", "wrong names", ("lfw.bin", image(0, 0)), "a JPEG picture"),
        Row("a torch file as .bin", "wrong names",
            ("lfw.bin", b"PK\x03\x04" + bytes(26) + b"archive/data.pkl"), "torch.save"),
        Row("a PDF called .jpg", "renamed files", ("1.jpg", b"%PDF-1.5\n"), "a PDF"),
        Row("a HEIC called .jpg", "iPhones", ("1.jpg", b"\0\0\0\x18ftypheic\0\0\0\0"), "a HEIC or AVIF picture"),
        Row("an SQLite file as minidb", "wrong names",
            ("a.mdl", b"SQLite format 3\0" + bytes(99)), "an SQLite database"),
        Row("an HTML page as idx", "captive portals", ("t-ubyte", b"<html>login</html>"), "an HTML page"),
        Row("a cut .rec", "full disks", ("cut.rec", "cut"), "after 47 records: offset .* is cut short"),
        # lists of images
        Row("a photo", "user study", ("kim.png", image(0, 0, ending=".png")), "a PNG picture"),
        Row("an archive as a list", "user study", ("photos.zip", b"PK\x03\x04" + bytes(60)), "a zip archive"),
        Row("a login page", "captive portals", ("list.txt", b"\n<!DOCTYPE html><html>"), "an HTML page"),
        Row("a pointer", "git clone without LFS",
            ("l.lst", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), "git lfs pull"),
        Row("a text of PowerShell", "Out-File", ("l.txt", "a.jpg 3\r\n".encode("utf-16")), "UTF-16"),
        Row("nothing", "a full disk", ("l.txt", b""), "empty"),
        Row("zeros", "a power cut", ("l.txt", bytes(4096)), "zeros"),
        # lists of videos, and videos
        Row("a picture as clips", "wrong order", ("train.txt", image(0, 0)), "JPEG picture; expected a list of videos"),
        Row("UTF-16", "PowerShell", ("train.txt", "a.mp4 30 1\n".encode("utf-16")), "UTF-16"),
        Row("commas", "Kinetics' annotations, PySlowFast", ("train.txt", b"a.mp4,30,1\n"), "Commas"),
        Row("two columns", "mmaction2", ("train.txt", b"a.mp4 1\n"), "data kinetics"),
        Row("a blank in the path", "phones", ("train.txt", b"my clip.mp4 30 1\n"), "has a blank"),
        Row("a label below 0", "sets without labels", ("train.txt", b"a.mp4 30 -1\n"), "whole numbers"),
        Row("a page of a server", "videos that are gone", ("a.mp4", b"<!DOCTYPE html>" + b" " * 600), "an HTML page"),
        Row("an error in words", "yt-dlp", ("a.mp4", b"ERROR: Video unavailable\n"), "it is text"),
        Row("an empty video", "a full disk", ("a.mp4", b""), "it is empty"),
        Row("a recording that was not ended", "ffmpeg", ("a.mp4", FTYP + box(b"mdat", bytes(900))), "moov"),
        Row("a photo of a phone", "renamed files",
            ("a.mp4", box(b"ftyp", b"heic\0\0\0\0mif1") + box(b"meta", bytes(40)) + box(b"mdat", bytes(900))),
            "a HEIC or AVIF"),
        Row("a damaged box", "bad disks", ("a.mp4", FTYP + b"\0\0\0\3moov" + bytes(600)), "damaged: box moov"),
        Row("the start of a .webm", "curl", ("a.mp4", b"\x1a\x45\xdf\xa3" + bytes(40)), "damaged or cut short"),
    ]
)  # fmt: skip
def test_what_a_file_is_instead(row: Row, tmp_path):
    name, content = row.given
    path = tmp_path / name
    if content == "cut":
        content = (write_rec(tmp_path / "whole", IMAGES) / "train.rec").read_bytes()[:-9]
    path.write_bytes(content)
    readers = {
               **dict.fromkeys((".png", ".zip", ".txt", ".lst"), open_source), ".mp4": frames_of,
               ".rec": write_index, ".npy": read_npy, ".tar": write_tar_index, ".bin": read_pairs,
               ".parquet": open_parquet, ".jpg": lambda path: decode(path.read_bytes()),
               ".mdl": lambda path: open_database(path, None, 3),
               "": lambda path: read_idx(path, "images")}  # fmt: skip
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=row.right):
        clips(tmp_path, tmp_path) if name == "train.txt" else readers[path.suffix](path)


@table(
    [
        Row("other names", "denseflow, ffmpeg %06d", ["image_00001.jpg"], r"named as 'image_00001\.jpg'"),
        Row("other endings", "ffmpeg", ["img_00001.png"], r"named as 'img_00001\.png'"),
        Row("too few", "a list of other frames", ["img_00001.jpg"], r"says 2 frames, the folder has 1"),
        Row("an empty folder", "a full disk", [], "is empty"),
        Row("no folder", "a half copy", None, "not there"),
    ]
)
def test_why_frames_are_missing(row: Row, tmp_path):
    pytest.importorskip("av")
    from recipes.kinetics.video.frames import FrameFolder

    if row.given is not None:
        (tmp_path / "a").mkdir()
    for name in row.given or ():
        (tmp_path / "a" / name).write_bytes(image(0, 0))
    with pytest.raises(BadRecord, match=row.right):
        list(FrameFolder(tmp_path / "a", 2).read(range))


# ---- MNIST's files


def idx(*shape: int, magic: int = 0) -> bytes:
    """uint8 of a shape, (N,) or (N, H, W), or with another magic number."""
    magic = magic or 0x800 + len(shape)
    return b"".join(n.to_bytes(4, "big") for n in (magic, *shape)) + bytes(int(np.prod(shape)))


TRAIN, TEST = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
WHOLE = dict(zip((*TRAIN, *TEST), (idx(6, 2, 2), idx(6), idx(4, 2, 2), idx(4)), strict=True))


@table(
    [
        Row("swapped", "mv", {TRAIN[0]: idx(6), TRAIN[1]: idx(6, 2, 2)}, "got 0x00000801, labels"),
        Row("labels of the test set", "mv", {TRAIN[1]: idx(4)}, "6 images but .* 4 labels; expected as many"),
        Row("labels of 32 bits", "QMNIST", {TRAIN[1]: idx(6, 8, magic=0xC02)}, "got 0x00000c02"),
    ]
)
def test_files_of_mnist_that_do_not_fit(row: Row, tmp_path):
    for name, content in (WHOLE | row.given).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=row.right):
        read_set(tmp_path, "train")


def test_the_names_of_kaggles_copy(tmp_path):
    for name, content in WHOLE.items():
        (tmp_path / name.replace("-idx", ".idx")).write_bytes(content)
    assert len(read_set(tmp_path, "t10k").label_N) == 4


# ---- labels


@table(
    [
        Row("from 1", "Matlab", ([1, 2, 3], 3), "they count from 1"),
        Row("of more classes", "--num-classes of another set", ([0, 1, 5], 3), "they need 6 classes"),
        Row("below 0", "lists with -1 for nobody", ([-1, 0, 2], 3), "leave out what has no class"),
        Row("a huge label", "hashes as labels", ([0, 1 << 28], (1 << 28) + 1), "label is 268,435,456: it is wrong"),
        Row("a huge number of classes", "a wrong flag", ([0, 1], 1 << 28), "number of classes is wrong"),
        Row("all 0", "labels lost", ([0, 0], 1), "every label is 0"),
    ]
)  # fmt: skip
def test_what_labels_tell(row: Row):
    labels, num_classes = row.given
    found = check_labels(np.array(labels), num_classes, lambda i: {})
    assert row.right in found[0].what


@table(
    [
        Row("the folder above", "ROOT of train and val", ["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"], "train"),
        Row("a folder of one folder", "unzip", ["faces/a/1.jpg", "faces/b/1.jpg"], "faces"),
        Row("folders of days", "photo archives", ["kim/monday/1.jpg", "lee/monday/1.jpg"], None),
    ]
)
def test_a_path_that_is_one_level_too_high(row: Row, tmp_path):
    for name in row.given:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(image(0, 0))
    with pytest.raises(ValueError, match="too deep") as error:
        open_source(tmp_path)
    if row.right:
        assert str(error.value).endswith(f"one level too high: give {tmp_path / row.right}")
    else:
        assert str(error.value).endswith(".tiff")


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_a_label_beyond_int64_is_named(tmp_path, suffix):
    label_N = np.array([1, 2**63], np.uint64)
    if suffix == ".npy":
        np.save(tmp_path / "a.npy", np.eye(2, dtype=np.float32))
        np.save(tmp_path / "a.labels.npy", label_N)
    else:
        write_parquet(tmp_path / "a.parquet", {"embedding": np.eye(2).tolist(), "label": label_N})
    with pytest.raises(ValueError, match=rf"a\{suffix}: label 9223372036854775808"):
        open_source(tmp_path / f"a{suffix}", vectors=True)


def test_a_pack_that_was_killed_is_named(tmp_path):
    (tmp_path / "train.rec.partial").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train\.rec\.partial: its writing was interrupted"):
        open_source(tmp_path)
