"""Several sets as one source, tar shards here and on a server, and their orders."""

import json
import re
import tarfile
from pathlib import Path

import pytest
import torch

from partial_fc.data import BadRecord, open_source
from partial_fc.data.pairs import read_pairs
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.data.sample import LabelOutOfRange, SourceGone, SourceRefused
from partial_fc.data.sets import joined, ranges
from partial_fc.data.sets import parquet as sets_parquet
from partial_fc.data.sets.joined import Joined, open_sets, stated_together
from partial_fc.data.sets.tar_shards import write_tar_index
from partial_fc.data.sets.weighted import Weighted
from tests.unit.data.shards import serving, write_parquet, write_tar


def rec(path: Path, labels: list[int]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with RecordWriter(path) as writer:
        for key, label in enumerate(labels):
            writer.write(key, pack(label, f"{path.stem} {key}".encode()))
    return path


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [rec(tmp_path / "a.rec", [0, 1, 1, 2]), rec(tmp_path / "b.rec", [0, 0, 1])]


def contents(source) -> list[tuple[bytes, int]]:
    samples = [source.read(index) for index in range(len(source))]
    assert [sample.label for sample in samples] == source.labels().tolist()
    return [(sample.data, sample.label) for sample in samples]


# ---- several sets


def test_classes_of_sets_follow_one_another(two: list[Path]) -> None:
    source = open_sets(two)
    assert isinstance(source, Joined)
    assert source.num_classes == 5
    assert [label for _, label in contents(source)] == [0, 1, 1, 2, 3, 3, 4]
    assert source.where(5) == f"set b: {two[1]}, key 1"
    assert source.read(5).key == 5
    assert [sample.data for sample in map(source.read, range(3, 5))] == [b"a 3", b"b 0"]
    source.will_need([6, 0, 3, 4])
    source.read_ahead(2, 6)
    assert "set b: 3 images, classes 3 to 4" in source.notes(False)


def test_a_pattern_names_the_shards_of_one_set(two: list[Path]) -> None:
    folder = two[0].parent
    for pattern in (folder / "*.rec", folder / "[ab].rec"):
        source = open_sets([pattern])
        assert isinstance(source, Joined)
        assert source.num_classes == 3
        assert [label for _, label in contents(source)] == [0, 1, 1, 2, 0, 0, 1]
        assert source.where(5) == f"{two[1]}, key 1"
    shared = open_sets(two, shared_classes=True)
    assert contents(shared) == contents(source)
    assert [str(path) for path in joined.matching(Path("http://host/s-{08..10}.tar"))] == [
        f"http:/host/s-{number}.tar" for number in ("08", "09", "10")
    ]
    assert ranges.as_url("http:/host/s-08.tar") == "http://host/s-08.tar"


def test_classes_are_shared_by_name(two: list[Path], tmp_path: Path) -> None:
    named = [rec(tmp_path / name / "train.rec", labels) for name, labels in (("one", [0, 1]), ("two", [0, 1, 2]))]
    (tmp_path / "one/classes.txt").write_text("alice\nbob\n")
    (tmp_path / "two/classes.txt").write_text("carol\nbob\ndora\n")
    source = open_sets([path.parent for path in named], shared_classes=True)
    assert source.class_names() == ["alice", "bob", "carol", "dora"]
    assert [label for _, label in contents(source)] == [0, 1, 2, 1, 3]
    apart = open_sets([path.parent for path in named])
    assert apart.class_names() == ["one/alice", "one/bob", "two/carol", "two/bob", "two/dora"]
    with pytest.raises(ValueError, match="set a has 3 classes and 0 names"):
        open_sets([named[0], two[0]], shared_classes=True)


def test_classes_of_one_set_with_the_same_name_are_one(tmp_path: Path) -> None:
    path = rec(tmp_path / "one/train.rec", [0, 1, 2, 3, 1])
    (tmp_path / "one/classes.txt").write_text("alice\nbob\nalice\ncarol\n")
    for given in (path.parent, tmp_path / "one/*.rec"):
        source = open_sets([given], 3, shared_classes=True)
        assert source.class_names() == ["alice", "bob", "carol"]
        assert source.num_classes == 3
        assert [label for _, label in contents(source)] == [0, 1, 0, 2, 1]
        assert source.notes(True) == ["set one: 5 images, 4 classes of 3 names"]
        assert open_sets([given]).num_classes == 4
    with pytest.raises(ValueError, match="3 classes together"):
        open_sets([path], 2, shared_classes=True)


def test_a_sets_file_has_names_and_weights(two: list[Path]) -> None:
    lines = two[0].parent / "all.sets"
    lines.write_text("# comment\nfirst a.rec 2\nsecond b.rec 0.34\n")
    source = open_sets([lines])
    assert isinstance(source, Joined)
    assert source.sets == [("first", 4, 2.0), ("second", 3, 0.34)]
    assert "set second: 3 images, classes 3 to 4, 1 draws an epoch" in source.notes(False)
    for line in ("first a.rec 0", "first", "first a.rec 2000"):
        lines.write_text(line)
        with pytest.raises(ValueError, match=re.escape("all.sets, line 1: expected `name path [weight]`")):
            open_sets([lines])


def test_weights_draw_each_sample_equally_often() -> None:
    sets = [("a", 40, 1.0), ("b", 30, 2.0), ("c", 20, 0.5), ("d", 7, 0.3)]
    order = Weighted(sets, seed=5)
    assert order.num_samples == 40 + 60 + 10 + 2
    index = order.select(0, 2 * 112, 0, 1).index_B
    count = torch.bincount(index, minlength=97)
    assert count[:40].unique().tolist() == [2]
    assert count[40:70].unique().tolist() == [4]
    assert count[70:90].unique().tolist() == [1]
    assert sorted(count[90:].tolist()) == [0, 0, 0, 1, 1, 1, 1]
    halves = [Weighted(sets, seed=5).select(start, 8, rank, 2).index_B for start in (0, 16) for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), index[:32])
    assert not torch.equal(Weighted(sets, seed=6).select(0, 32, 0, 1).index_B, index[:32])


def test_mistakes_name_the_set(two: list[Path], tmp_path: Path) -> None:
    for paths, says in (
        ([tmp_path / "*.tar"], "no file matches"),
        ([*two, two[0]], "is in set a and again in set a-2"),
        ([two[0], tmp_path / "*.rec"], "again in set"),
        ([two[0], tmp_path / "c.rec"], "c.rec not found"),
    ):
        with pytest.raises(ValueError, match=says):
            open_sets(paths)
    with pytest.raises(ValueError, match=r"5 classes together \(a 3, b 2\); --num-classes is 4"):
        open_sets(two, 4)
    for folder, size in (("x", 8), ("y", 9)):
        path = rec(tmp_path / folder / "train.rec", [0])
        path.with_name("property").write_text(f"1,{size},{size}")
    with pytest.raises(ValueError, match=r"x \(.*\) 8 x 8, y .* 9 x 9; choose one with --image-size"):
        stated_together([tmp_path / "x", tmp_path / "y"], True)
    rec(tmp_path / "x/train.rec", [0, 3])
    source = open_sets([tmp_path / "x", tmp_path / "y"])
    with pytest.raises(LabelOutOfRange, match=r"set x: .*train.rec, key 1: label 3; expected less than the 1 classes"):
        source.read(1)
    assert source.labels().tolist() == [0, 5, 1]  # of no class, not of another set's


# ---- tar shards


SAMPLES = [(f"dir.v1/{i:03}", f"image {i}".encode() * (i + 1), str(i % 3)) for i in range(20)]


def test_a_tar_gives_what_went_in(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [*SAMPLES, ("x" * 150, b"long name", '{"label": 7, "caption": "x"}')])
    assert write_tar_index(path) == (tmp_path / "a.tar.index", 21)
    source = open_source(path)
    assert contents(source) == [(image, int(label)) for _, image, label in SAMPLES] + [(b"long name", 7)]
    assert source.num_classes == 8
    source.will_need([3, 4])
    with pytest.raises(ValueError, match=r"a.tar, offset \d+: label 7; expected less than the 7 classes"):
        open_source(path, 7)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"a.jpg": "x", "b.cls": "1"}, r"offset 1536: a has no key.cls or key.json"),
        ({"a.cls": "1", "b.jpg": "x"}, r"offset 1536: a has no key.jpg"),
        ({"a.jpg": "x", "a.cls": "one"}, "got b'one'; expected a class number"),
        ({"a.jpg": "x", "a.json": '{"id": 3}'}, "expected a class number under label or labels"),
        ({"a.jpg": "x", "a.cls": "-1"}, "got b'-1'"),
        ({"a.txt": "x"}, "has no images"),
    ],
)
def test_a_tar_of_another_layout(tmp_path: Path, files: dict[str, str], says: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            tar.add(tmp_path / name, name)
    with pytest.raises(ValueError, match=says):
        write_tar_index(tmp_path / "a.tar")


def test_a_damaged_or_changed_tar_is_named_with_the_offset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", SAMPLES)
    with pytest.raises(ValueError, match=r"a.tar.index not found.*Write it: partial-fc data index .*a.tar"):
        open_source(path)
    write_tar_index(path)
    source, whole = open_source(path), path.read_bytes()
    offset = int(source._row_N["offset"][9])  # type: ignore[union-attr]
    path.write_bytes(whole[: offset + 20])
    with pytest.raises(
        ValueError, match=rf"first image beyond its end is at offset {offset}: it is truncated, or newer"
    ):
        open_source(path)
    for damaged in (whole[: offset + 20], whole[: offset - 300], whole[: offset - 512] + b"x" * 512 + whole[offset:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a.tar, offset \d+: .* truncated or damaged"):
            write_tar_index(path)
    write_tar(path, [(name, image[::-1], label) for name, image, label in reversed(SAMPLES)])
    assert path.stat().st_size == len(whole)
    with pytest.raises(BadRecord, match=rf"a.tar, offset {offset}: no file of \d+ bytes starts here"):
        open_source(path).read(9)
    (tmp_path / "a.tar.index").write_bytes(b"PFCTAR03")
    with pytest.raises(ValueError, match="no index of a tar shard"):
        open_source(path)


# ---- over HTTP


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ranges, "WAITS_S", (0.0, 0.01))
    return write_tar(tmp_path / "a.tar", SAMPLES)


def test_a_tar_on_a_server(shard: Path) -> None:
    expected = [(image, int(label)) for _, image, label in SAMPLES]
    with serving(shard.parent) as url:
        with pytest.raises(ValueError, match=r"not found \(.*a.tar.index: the server answers 404"):
            open_sets([Path(f"{url}/a.tar")])
        _, count = write_tar_index(f"{url}/a.tar")  # in the cache
        assert count == 20
        assert contents(open_sets([Path(f"{url}/a.tar")])) == expected
    write_tar_index(shard)
    answers: list[int] = []
    with serving(shard.parent, answers) as url:  # another port: another URL
        source = open_sets([Path(f"{url}/a.tar")])
        answers[:] = [503, 500]
        assert source.remote
        assert contents(source) == expected


def test_redirects_are_followed_without_the_password(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar_index(shard)
    expected = [(image, int(label)) for _, image, label in SAMPLES]
    (shard.parent / "netrc").write_text("machine 127.0.0.1 login ann password s3cret\n default login eve password x\n")
    monkeypatch.setenv("NETRC", str(shard.parent / "netrc"))
    first: list = []
    second: list = []
    answers: list[int] = []
    with serving(shard.parent, answers, seen=second) as url:
        store = url.replace("127.0.0.1", "localhost")
        with serving(shard.parent, moved=store, seen=first) as door:
            source = open_sets([Path(f"{door}/a.tar")])
            opened = len(first)
            assert contents(source) == expected
            assert len(first) == opened  # later requests go where the first was led
            answers[:] = [403]  # as a signed URL that has expired
            assert source.read(3).data == SAMPLES[3][1]
            assert len(first) == opened + 1
            answers[:] = [404, 404]
            with pytest.raises(ValueError, match=rf"^{door}/a.tar: the server answers 404"):
                source.read(3)
        assert {headers["Authorization"] for _, headers in first} == {"Basic YW5uOnMzY3JldA=="}
        assert not any("Authorization" in headers for _, headers in second)
        assert all("signature=1" in line for line, _ in second)
        with pytest.raises(ValueError, match=r"http://127.0.0.1/a.tar: a password in a URL ends up in logs") as error:
            open_sets([Path("http://ann:s3cret@127.0.0.1/a.tar")])
        assert "s3cret" not in str(error.value)
    with serving(shard.parent, moved="/again") as url, pytest.raises(SourceRefused, match="TooManyRedirects"):
        ranges.RemoteFile(f"{url}/a.tar")
    ranges.check_redirect("https://a/b/c?d", "../e")
    for target, scheme in (("http://a/b", "http"), ("file:///etc/passwd", "file")):
        with pytest.raises(ValueError, match=f"redirected from https to {scheme}, which is not followed"):
            ranges.check_redirect("https://a/b", target)


def test_a_proxy_of_the_environment(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar_index(shard)
    seen: list = []
    with serving(shard.parent, seen=seen) as url:
        for scheme in ("http", "https"):
            monkeypatch.setenv(f"{scheme}_proxy", url.replace("://", "://ann:s%21cret@"))
        assert contents(open_sets([Path("http://shards.invalid:81/a.tar")]))[3] == (SAMPLES[3][1], 0)
        with pytest.raises(SourceRefused, match=r"^https://shards.invalid/a.tar: ClientHttpProxyError 403"):
            open_sets([Path("https://shards.invalid/a.tar")])
    assert {headers["Proxy-Authorization"] for _, headers in seen} == {"Basic YW5uOnMhY3JldA=="}
    assert seen[0][0] == "GET http://shards.invalid:81/a.tar HTTP/1.1"


def test_a_tar_in_an_object_store(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    with pytest.raises(ValueError, match=r"^gs://shards/a.tar: .*pip install fsspec gcsfs`"):
        open_sets([Path("gs://shards/a.tar")])
    store = fsspec.filesystem("memory", skip_instance_cache=True)
    monkeypatch.setattr(fsspec, "filesystem", lambda scheme, **_: store)
    store.pipe("s3://shards/a.tar", shard.read_bytes())
    write_tar_index(Path("s3://shards/a.tar"))
    source = open_sets([Path("s3://shards/a.tar")])
    assert contents(source) == [(image, int(label)) for _, image, label in SAMPLES]
    monkeypatch.setattr(store, "cat_file", lambda *_, **__: b"")
    with pytest.raises(SourceGone, match=r"^s3://shards/a.tar, offset \d+: ConnectionError got 0 of \d+ bytes"):
        source.read(3)


# ---- Parquet


def test_parquet_gives_what_went_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [{"bytes": image, "path": None} for _, image, _ in SAMPLES]
    columns = {"image": images, "label": [int(label) for *_, label in SAMPLES]}
    expected = [(image, int(label)) for _, image, label in SAMPLES]
    names = {"info": {"features": {"label": {"names": ["a", "b", "c", "d"], "_type": "ClassLabel"}}}}
    said = {"huggingface": json.dumps(names)}
    named = open_sets([write_parquet(tmp_path / "a.parquet", columns, said, row_group_size=3)])
    assert contents(named) == expected
    assert (named.num_classes, named.class_names(), len(named._groups)) == (4, ["a", "b", "c", "d"], 7)  # type: ignore
    monkeypatch.setattr(sets_parquet, "_CACHE_BYTES", 300)
    bare = open_sets(
        [write_parquet(tmp_path / "b.parquet", columns | {"image": [i["bytes"] for i in images]}, row_group_size=3)]
    )
    assert contents(bare) == expected
    assert bare.num_classes == 3
    assert len(bare._groups) < 7  # type: ignore
    assert bare.where(4) == f"{tmp_path}/b.parquet, row 4"


def test_parquet_mistakes(tmp_path: Path) -> None:
    for columns, says in (
        ({"image": [b"x"]}, "no column label or labels .*; its columns are image"),
        ({"label": [1], "text": ["x"]}, "no column image or img .*; its columns are label, text"),
        ({"image": [b"x", b"y"], "label": [0, None]}, "1 of its labels are missing"),
        ({"image": [b"x"], "label": ["alice"]}, "labels are string"),
        ({"image": [b"x", b"y"], "label": [0, -1]}, r"a.parquet, row 1: label -1; expected 0 to 0"),
    ):
        with pytest.raises(ValueError, match=says):
            open_source(write_parquet(tmp_path / "a.parquet", columns))
    with pytest.raises(BadRecord, match=r"a.parquet, row 0: no bytes of an image"):
        open_source(write_parquet(tmp_path / "a.parquet", {"image": [None, b"y"], "label": [0, 1]})).read(0)
    with pytest.raises(ValueError, match=r"a.parquet, row 1: label 1; expected 0 to 0"):
        open_source(tmp_path / "a.parquet", 1)
    path = write_parquet(tmp_path / "text.parquet", {"image": ["x"], "label": [0]})
    with pytest.raises(ValueError, match="column image has type string"):
        open_source(path).read(0)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is no Parquet file, or cut short"):
        open_source(path)


def test_parquet_pairs(tmp_path: Path) -> None:
    columns = {
        "label": [1, 0],
        "image1": [{"bytes": b"a"}, {"bytes": b"c"}],
        "image2": [{"bytes": b"b"}, {"bytes": b"d"}],
    }
    pairs = read_pairs(write_parquet(tmp_path / "p.parquet", columns, row_group_size=1))
    assert (pairs.images, pairs.same.tolist()) == ([b"a", b"b", b"c", b"d"], [True, False])
    with pytest.raises(ValueError, match="no column image2"):
        read_pairs(write_parquet(tmp_path / "p.parquet", {"image1": [b"a"], "label": [1]}))
