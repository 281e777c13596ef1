"""The files of our own checkpoints."""

import hashlib
import json
from functools import cache
from pathlib import Path

import torch

from partial_fc import checkpoint
from partial_fc.checkpoint.folders import mark
from partial_fc.comm import SingleWorld
from partial_fc.data.order import Keyed, PerEpoch
from partial_fc.embedding.load import facts_of
from partial_fc.head import CosFace, PartialFC
from partial_fc.train.begin.differences import compare
from partial_fc.train.precision import LossScaler
from partial_fc.train.resume import state_of
from partial_fc.verbs.checkpoint.inspect import summary
from partial_fc.verbs.checkpoint.verify import findings
from tests.faults.mutations import in_json, in_safetensors_header
from tests.faults.reader import Files, Reader, written

_FACTS = {
    "recipe": "face",
    "position": 21,
    "left_out": [[7, 9]],
    "num_overflows": 1,
    "best": {"lfw": 0.5},
    "best_score": 0.5,
    "score": 0.5,
    "loss_scaler": {"scale": 8.0, "clean_steps": 2},
    "contract": {"network": "tiny"},
    "configuration": {"network": "tiny", "epochs": 2.0, "max_steps": None, "batch_size": 7, "accumulate": 1},
}


@cache
def checkpoint_files() -> list[Files]:
    """One of the format without checksums, so that what is changed is read at all, and one with them."""

    def write(folder: Path) -> None:
        head = _head()
        assert len(head.centres) == 5
        backbone, momentum = {"w": torch.ones(2)}, {"w/momentum_buffer": torch.ones(2)}
        names = ["a", "b", "c", "d", "é"]
        checkpoint.capture(3, backbone, momentum, {}, head, _FACTS, world=head.world, class_names=names).write(
            folder, leads=True
        )
        mark(folder, 3, [0])

    whole = written(write)
    old = {name: content for name, content in whole.items() if not name.endswith(".sha256")}
    old["manifest.json"] = json.dumps({**json.loads(old["manifest.json"]), "format": 3}).encode()
    old["COMPLETE"] = b""
    return [old, whole]


def signed(files: Files) -> Files:
    """With the checksums that the files have now: damage is found by them, what somebody wrote on purpose is not."""
    lists = [name for name in files if name.endswith(".sha256")]
    listed = sorted(name for name in files if name != "COMPLETE" and name not in lists)
    text = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in listed)
    return files | dict.fromkeys(lists, text.encode())


def _head() -> PartialFC:
    return PartialFC(5, 2, CosFace(), seed=1)


def read_checkpoint(folder: Path) -> None:
    """As a run goes on from it, then as the tools look at it."""
    bad = [text for kind, text in findings([folder], finite=True) if kind == "bad"]
    summary(folder)
    found = checkpoint.Checkpoint(folder)
    assert found.step >= 0
    found.optimizer()
    found.backbone()
    assert found.class_names is None or len(found.class_names) == 5 or bad
    found.buffers(SingleWorld())
    found.load_head(_head())
    use_manifest(found)
    if bad:
        raise ValueError(bad[0])


def use_manifest(found: checkpoint.Checkpoint) -> None:
    """What a run makes of it that goes on from there."""
    start = state_of(found, [0] * 7)
    Keyed(7, seed=1).select(start.position, 2, 0, 1)
    PerEpoch(7, seed=1).select(start.position, 2, 0, 1)
    compare(found.manifest, "face", {"network": "tiny"}, {"epochs": 1.0, "network": "tiny"}, num_classes=5)
    LossScaler().load_state(found.manifest.get("loss_scaler", {"scale": 1.0, "clean_steps": 0}))
    facts_of(found.manifest)


_HEAD = "head-00000-of-00001-classes-000000000000-000000000005.safetensors"
_JSON = (
    b"null",
    b"{}",
    b"[]",
    b'"x"',
    b"1e999",
    b"NaN",
    b"-1",
    b"[" * 5000,
    b"BF16",
    b"F64",
    b'"shape":[9223372036854775807,4]',
)
_SUMS = (b"  ", b"manifest.json", b"/", b"\n")


def _reader(name: str, file: str, *words: bytes, is_json: bool = False, sign: bool = False) -> Reader:
    inside = (in_json, in_json) if is_json else (in_safetensors_header,) if file.endswith(".safetensors") else ()
    if sign:
        return Reader(name, file, lambda: checkpoint_files()[1:], read_checkpoint, words, inside, completed=signed)
    return Reader(name, file, checkpoint_files, read_checkpoint, words, inside)


READERS = (
    _reader("manifest", "manifest.json", *_JSON, is_json=True),
    _reader("marker", "COMPLETE", *_JSON, is_json=True),
    _reader("sums", "rank-00000-of-00001.sha256", *_SUMS),
    _reader("class-names", "class-names.txt"),
    _reader("backbone", "backbone.safetensors", *_JSON),
    _reader("optimizer", "optimizer.safetensors", *_JSON),
    _reader("head", _HEAD, *_JSON),
    _reader("signed-manifest", "manifest.json", *_JSON, is_json=True, sign=True),
    _reader("signed-names", "class-names.txt", b"\x1b[31m", b"\t", b"\n" * 1000, sign=True),
    _reader("signed-backbone", "backbone.safetensors", *_JSON, sign=True),
    _reader("signed-optimizer", "optimizer.safetensors", *_JSON, sign=True),
    _reader("signed-head", _HEAD, *_JSON, sign=True),
)
