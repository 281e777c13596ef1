"""What is installed, by which hash, what is known against it, and that it is not reached (SECURITY.md)."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import cv2
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from partial_fc.data.decode import decode
from partial_fc.data.sample import BadRecord
from scripts import lock, sbom

ROOT = Path(__file__).parents[2]
ADVISORIES = json.loads((ROOT / "lock/advisories.json").read_text())
NATIVE = json.loads((ROOT / "lock/native.json").read_text())


def test_the_locks_have_hashes_the_versions_tested_together_and_all_that_setup_cfg_asks_for():
    locked = {name: hashes for entries in sbom.locked().values() for name, hashes in entries.items()}
    for name, hashes in locked.items():
        assert hashes, name
        assert all(re.fullmatch(r"[0-9a-f]{64}", text) for text in hashes), name
    tested = dict(line.split("==") for line in lock.versions())
    for requirement in map(Requirement, lock.wanted()):
        version = tested[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version)
        assert importlib.metadata.version(requirement.name).split("+")[0] == version
    here = {name.split("==")[0]: name.split("==")[1].split("+")[0] for name in locked}
    assert not {name for name in here.keys() & tested.keys() if here[name] != tested[name]}, "make lock"
    wanted = {canonicalize_name(Requirement(line).name) for line in lock.wanted()}
    assert not (wanted | {*lock.FOR_HOROVOD, *lock.FOR_MXNET, "horovod", "mxnet"}) - here.keys(), "make lock"


def test_set_up_takes_nothing_from_an_index_without_a_hash():
    for path in ("scripts/setup.sh", "scripts/build_horovod.sh"):
        text = re.sub(r"^\s*#.*\n", "", (ROOT / path).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        for line in re.findall(r".*(?:pip|\{pip\[@\]\}\")\s+(?:install|download|wheel)\b.*", text):
            # Our own sources, and the wheel that was just built of Horovod's.
            ours = "--no-index" in line or "$wheels" in line or "pip wheel" in line
            assert "--require-hashes" in line or (ours and ("--no-deps" in line or "--no-index" in line)), line


def test_the_sbom_names_every_package_once_and_what_is_known_against_it():
    made = sbom.sbom()
    parts = [part for item in made["components"] for part in item.get("components", [])]
    refs = [item["bom-ref"] for item in (*made["components"], *parts)]
    assert len(refs) == len(set(refs)) > 100
    for name in NATIVE:
        assert sbom.purl(name) in refs, f"lock/native.json: look again at what {name} brings along"
    for advisory, told in zip(ADVISORIES, made["vulnerabilities"], strict=True):
        assert told["affects"][0]["ref"] in refs, f"lock/advisories.json: {advisory['id']} is of another version"
        assert date.fromisoformat(advisory["date"]) >= date(2026, 11, 23)
        assert advisory["reason"]
        assert advisory["tests"]
        assert all((ROOT / path).exists() for path in advisory["tests"])


# Beginnings of what OpenCV can read, too.
UNWANTED = {
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "JPEG 2000's stream": b"\xff\x4f\xff\x51",
    "AVIF": b"\0\0\0\x20ftypavif",
    "HDR": b"#?RADIANCE",
    "PNM": b"P6\n1 1\n255\n",
    "Sun raster": b"\x59\xa6\x6a\x95",
    "OpenEXR": b"\x76\x2f\x31\x01",
}


@pytest.mark.parametrize("beginning", UNWANTED.values(), ids=UNWANTED)
def test_no_other_format_reaches_opencv(beginning, monkeypatch):
    def reached(*_: object) -> None:
        raise AssertionError("OpenCV was asked")

    monkeypatch.setattr(cv2, "imdecode", reached)
    with pytest.raises(BadRecord, match="no image that OpenCV can read"):
        decode(beginning + bytes(200))


def calls(text: str) -> set[str]:
    """Attributes of modules that a file names: "cv2.imread"."""
    tree = ast.parse(text)
    pairs = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {f"{node.value.id}.{node.attr}" for node in pairs}


def test_images_are_decoded_in_one_place_and_videos_not_by_opencv():
    """benchmarks/data.py compares decoders, on the user's own files; Pillow draws, and opens nothing."""
    readers = re.compile(
        r"cv2\.(imread\w*|imdecode\w*|imcount|VideoCapture|VideoWriter|dnn|FileStorage|CascadeClassifier)|"
        r"Image\.open|mx\.image|mx\.recordio|\w+\.ImageRecordIter"
    )
    texts = {
        path: path.read_text() for folder in ("partial_fc", "recipes", "demo") for path in (ROOT / folder).rglob("*.py")
    }
    found = {
        f"{path.relative_to(ROOT)}: {call}"
        for path, text in texts.items()
        if any(word in text for word in ("cv2.", "Image.", "mx.", "ImageRecordIter")) and "/bench/" not in str(path)
        for call in calls(text)
        if readers.fullmatch(call)
    }
    # augment.py decodes what it has just encoded. The last has two functions of MXNet's changed, and calls none.
    decoders = {f"partial_fc/data/{name}.py: cv2.imdecode" for name in ("augment", "decode")}
    assert found == decoders | {"recipes/mxnet/library.py: mx.recordio"}
    assert not re.findall(r"\.(?:jp2|j2k|jpx)\b", "".join(texts.values())), "JPEG 2000 is nothing that we write"


def test_the_image_runs_as_a_user_checks_host_keys_and_names_its_base_by_digest():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1:] == ["trainer"]
    assert not re.search(r"StrictHostKeyChecking no|UserKnownHostsFile /dev/null", "\n".join(lines))
    assert [line for line in lines if re.fullmatch(r"ARG BASE=\S+@sha256:[0-9a-f]{64}", line)]
    assert "COPY lock lock" in lines


def test_what_the_image_copies_before_the_set_up_is_enough_for_it(tmp_path):
    """Horovod imports MXNet, the kernel is compiled; the other sources come later."""
    lines = (ROOT / "Dockerfile").read_text().partition("RUN ")[0].splitlines()
    copied = [word for line in lines if re.match("COPY (partial_fc|recipes)/", line) for word in line.split()[1:-1]]
    for name in copied:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    # MXNet itself, and torch, would be seconds.
    imported = "import sys, logging; sys.modules['mxnet'] = m = logging; m.recordio = m; m.pack = m.pack_img = m.info; "
    imported += "import recipes.mxnet.library, partial_fc.recipe_table\n"
    imported += "import partial_fc.head.native.build as b; print(b.__file__)"
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "DMLC_ROLE": "server"}
    found = subprocess.run([sys.executable, "-P", "-c", imported], env=environ, capture_output=True, text=True)
    assert found.stdout.startswith(str(tmp_path)), found.stderr
