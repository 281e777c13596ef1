"""Texts that people and other programs write: hosts, lists, tables; arrays; what a run has left for its report."""

import io
import struct
import zlib
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import save_file

from partial_fc import models
from partial_fc.checkpoint.class_names import read_names
from partial_fc.embedding.load import find
from partial_fc.verbs.checkpoint.imprint import from_file
from partial_fc.verbs.doctor import hosts
from partial_fc.verbs.launcher import host_file
from partial_fc.verbs.model.ijb import Ijb
from partial_fc.verbs.model.pair_list import read_pair_list
from partial_fc.verbs.model.search import read_npz
from partial_fc.verbs.report.run_facts import read_run
from tests.faults.mutations import any_bytes, in_json, in_safetensors_header, in_zip
from tests.faults.reader import Files, Reader, written

_HOSTS = {"hosts": b"# ours\nip1 slots=8\n10.0.0.2 slots=8 max_slots=8\n\n"}
_PORTS = {"hosts": b"# ours\nip1:22\n10.0.0.2 slots=8\nip3\n"}
_HOST_WORDS = (
    b"slots=",
    b":",
    b"-oProxyCommand=touch pwned",
    b"$(touch pwned)",
    b"9" * 5000,
    b"\x1b[31m",
    b"/dev/zero",
)


def read_hosts(folder: Path) -> None:
    for host in hosts.parse(str(folder / "hosts")):
        assert 0 <= host.slots < 10**7
        assert host.name[0] != "-"


def read_launcher_hosts(folder: Path) -> None:
    found = host_file.read(folder / "hosts")
    assert all(0 <= host.slots < 10**7 and host.name[0] != "-" for host in found)


# ---- arrays


@cache
def npy_files() -> list[Files]:
    files = []
    for array in (np.ones(4, np.float32), np.ones((3, 4)), np.asfortranarray(np.ones((3, 4), "<f2"))):
        out = io.BytesIO()
        np.save(out, array)
        files.append({"x.npy": out.getvalue()})
    return files


def read_directions(folder: Path) -> None:
    assert from_file(folder / "x.npy", 4).shape == (4,)


@cache
def npz_files() -> list[Files]:
    rows = np.eye(3, 4, dtype=np.float32)
    out = io.BytesIO()
    np.savez(
        out,
        embeddings=rows,
        labels=np.array([0, 1, 1]),
        keys=np.array(["a", "bc", "d"]),
        class_names=np.array(["x", "é"]),
    )
    return [{"x.npz": out.getvalue()}]


def read_embeddings(folder: Path) -> None:
    found = read_npz(folder / "x.npz")
    assert found.row_ND.shape[0] == len(found.label_N)


_NPY = (
    b"(",
    b")",
    b",",
    b"'shape': (1000000000000, 32)",
    b"'descr': '|O'",
    b"(" * 4000,
    b"<f4",
    b"<U9",
    b"True",
    b"-1",
    b"x" * 9,
)


def in_npy(data: bytes, random: Random) -> bytes:
    """Its header, with the length as it then is."""
    length = int.from_bytes(data[8:10], "little")
    header = any_bytes(data[10 : 10 + length], random)[:60000]
    return data[:8] + struct.pack("<H", len(header)) + header + data[10 + length :]


# ---- models and runs


@cache
def model_files() -> list[Files]:
    facts = {"network": "tiny", "embedding_size": "4", "image_size": "56", "flip": "true", "step": "3"}

    def write(folder: Path) -> None:
        torch.manual_seed(0)
        weights = models.build("tiny", 4, 56).state_dict()
        save_file(
            {name: t.half() if t.is_floating_point() else t for name, t in weights.items()},
            folder / "model.safetensors",
            facts,
        )

    return [written(write)]


def read_model(folder: Path) -> None:
    find(folder / "model.safetensors").model()


_RUN = {
    "configuration.json": b'{"recipe": "face", "configuration": {"lr": 0.1, "dataset": "glyphs"}, "differs": {}}',
    "result.json": b'{"steps": 4, "configuration": {"lr": 0.1}, "scores": {"lfw": 0.5}}',
    "loss.csv": b"step,loss,lr\n1,2.5,0.1\n2,2.25,0.1\n3,nan,0.1\n4,2,0.05\n",
    "history.jsonl": b'{"event": "start", "step": 0, "total_steps": 4}\n{"step": 2, "images_per_s": 3.5}\n'
    b'{"event": "evaluation", "step": 4, "scores": {"lfw": 0.5}}\n{"event": "end", "step": 4}\n',
}


def read_report(folder: Path) -> None:
    found = read_run(folder)
    assert found.loss_N3.shape[1] == 3
    assert found.recipe


# ---- pairs and templates


_CSV = {
    "pairs.csv": b"first,second,same\na.png,b.png,1\na.png,c.png,different\n",
    **dict.fromkeys(("a.png", "b.png", "c.png"), b""),
}
_POINTS = b" 38.3 51.7 73.5 51.5 56.0 71.7 41.5 92.4 70.7 92.2 0.9\n"
_IJB = {
    "ijbc_name_5pts_score.txt": b"1.png" + _POINTS + b"2.png" + _POINTS + b"3.png" + _POINTS,
    "ijbc_face_tid_mid.txt": b"1.png 7 70\n2.png 8 71\n3.png 9 71\n",
    "ijbc_template_pair_label.txt": b"7 8 1\n7 9 0\n",
    "ijbc_1N_gallery_G1.csv": b"T,S,F\n7,1,1.png\n",
    "ijbc_1N_gallery_G2.csv": b"T,S,F\n8,2,2.png\n",
    "ijbc_1N_probe_mixed.csv": b"T,S,F\n9,1,3.png\n",
}


def read_csv(folder: Path) -> None:
    read_pair_list(folder / "pairs.csv").digest()


def read_ijb(folder: Path) -> None:
    """Its lists are in a folder below."""
    meta = folder / "meta"
    if not meta.exists():
        meta.symlink_to(folder.resolve())  # (absolute: what it leads to is inside of the folder that is watched)
    assert Ijb(folder, "IJBC", 112).galleries


def read_name_list(folder: Path) -> None:
    zlib.crc32("".join(read_names(folder / "names.txt")).encode())


_NUMBERS = (b"nan", b"1e30", b"-1", b"9223372036854775808", b"9" * 5000, b"\t", b",", b" ", b'"', b"\r", b"\x00")
_JSON = (
    b"null",
    b"{}",
    b"[]",
    b"[" * 5000,
    b"NaN",
    b"1e999",
    b'"steps"',
    b'"event": "start"',
    b'"scores": {"a": "b"}',
    b"9" * 5000,
)
_MODEL_WORDS = (
    b"__metadata__",
    b"BF16",
    b"F64",
    b'"shape":[9223372036854775807,4]',
    b"tiny",
    b"r200",
    b"99999",
    b"mean",
    b"[" * 5000,
)

READERS = (
    Reader("hosts", "hosts", lambda: [_HOSTS], read_hosts, _HOST_WORDS),
    Reader("launcher-hosts", "hosts", lambda: [_PORTS], read_launcher_hosts, _HOST_WORDS),
    Reader("npy", "x.npy", npy_files, read_directions, _NPY, (in_npy, in_npy)),
    Reader("npz", "x.npz", npz_files, read_embeddings, _NPY, (in_zip(in_npy), in_zip(in_npy))),
    Reader("model", "model.safetensors", model_files, read_model, _MODEL_WORDS, (in_safetensors_header,)),
    Reader("run-configuration", "configuration.json", lambda: [_RUN], read_report, _JSON, (in_json,)),
    Reader("run-result", "result.json", lambda: [_RUN], read_report, _JSON, (in_json,)),
    Reader("run-losses", "loss.csv", lambda: [_RUN], read_report, _NUMBERS),
    Reader("run-history", "history.jsonl", lambda: [_RUN], read_report, _JSON, may_fail=False),
    Reader("pairs-csv", "pairs.csv", lambda: [_CSV], read_csv, _NUMBERS),
    Reader("ijb-points", "ijbc_name_5pts_score.txt", lambda: [_IJB], read_ijb, _NUMBERS),
    Reader("ijb-templates", "ijbc_face_tid_mid.txt", lambda: [_IJB], read_ijb, _NUMBERS),
    Reader("ijb-gallery", "ijbc_1N_gallery_G1.csv", lambda: [_IJB], read_ijb, _NUMBERS),
    Reader("names", "names.txt", lambda: [{"names.txt": "alice\nbób\n".encode()}], read_name_list, _NUMBERS),
)
