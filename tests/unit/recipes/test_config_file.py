"""`face --config FILE.toml`: the same run as by the command line; what is no flag is named with file and key."""

import re
import shlex
from pathlib import Path

import pytest

from recipes.face import main as face

ROOT = Path(__file__).parents[3]


def parsed(text: str, folder: Path, more: str = "") -> face.Config:
    (folder / "a.toml").write_text(text)
    return face.parse(["--config", str(folder / "a.toml"), *more.split()])[0]


def test_the_file_of_the_documents_is_its_command_line(tmp_path: Path) -> None:
    page = (ROOT / "docs/many-labels.md").read_text()
    command = re.search(r"    (python train\.py face --rec image=.*\\\n.*)", page)[1].replace("\\\n", " ")
    text = re.search(r"(?m)^    batch_size = (?:.*\n)+?\n(?=## )", page)[0]
    file, line = parsed(re.sub(r"(?m)^ {4}", "", text), tmp_path), face.parse(shlex.split(command)[3:])[0]
    assert face.face_heads.of(file) == face.face_heads.of(line)
    assert (file.data.recs, file.optim, file.data.labels_drawn) == (line.data.recs, line.optim, line.data.labels_drawn)


def test_given_flags_count_more(tmp_path: Path) -> None:
    text = 'lr = 0.5\nrec = ["a=x", "b=y"]\nmirror = false\n[a]\nsample_rate = 0.1\nquota = "insightface"\n'
    text += 'margins = [1, 0.5, 0]\nloss = "combined"\n'
    config = parsed(text, tmp_path, "--lr 0.25 --sample-rate a=0.2")
    a, b = face.face_heads.of(config)
    assert (config.schedule.lr, config.data.mirror) == (0.25, False)
    assert (a.flags.sample_rate, a.flags.quota, a.flags.margins) == (0.2, "insightface", (1.0, 0.5, 0.0))
    assert (b.flags.sample_rate, b.flags.quota, b.flags.margins) == (1.0, "negatives", None)
    assert config.data.config is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sample_rte = 0.1", "a.toml: sample_rte: there is no flag of that name; did you mean sample_rate"),
        ("[a]\nsample_rte = 0.1", r"a.toml: \[a\] sample_rte: .*did you mean sample_rate"),
        ("[a]\nlr = 0.1", r"a.toml: \[a\] lr: there is no flag"),
        ("lr = 2020-01-01", "a.toml: lr is 2020-01-01; expected a number"),
        ("[a]\nmargins = []", r"a.toml: \[a\] margins is \[\]"),
        ('rec = "x"\n[a]\nrec = "y"', "a.toml: rec: the tables have one each"),
        ("lr = ", "a.toml: Invalid value"),
        ("lr = 'x'", "--lr is x; expected a number"),
        ("import os", "a.toml: Expected"),
    ],
)
def test_what_is_no_flag_is_named_with_file_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        parsed(text, tmp_path)
