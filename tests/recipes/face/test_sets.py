"""The same images as one .rec, three .rec files, tar shards here and on a server, and Parquet give the same curve."""

import re
import shutil
from pathlib import Path

import pytest

from partial_fc.data import open_source
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.data.sets.tar_shards import write_tar_index
from partial_fc.files import in_cache
from partial_fc.train.guards.signals import EXIT_PREEMPTED
from tests.running import endings, face, killed, losses, several, train_here, train_several
from tests.unit.data.shards import serving, write_parquet, write_tar

CLASSES, STEPS = 80, 4


@pytest.fixture(scope="module")
def forms(glyphs: Path, tmp_path_factory: pytest.TempPathFactory):
    """--rec of each form."""
    root = tmp_path_factory.mktemp("forms")
    source = open_source(glyphs)
    samples = [source.read(index) for index in range(len(source))]
    third = -(-len(samples) // 3)
    for part, some in enumerate(samples[start : start + third] for start in range(0, len(samples), third)):
        with RecordWriter(root / f"{part}.rec") as writer:
            for key, sample in enumerate(some):
                writer.write(key, pack(sample.label, sample.data))
        write_tar(root / f"{part}.tar", [(f"{sample.key}", sample.data, str(sample.label)) for sample in some])
        write_tar_index(root / f"{part}.tar")
    columns = {"image": [{"bytes": s.data} for s in samples], "label": [s.label for s in samples]}
    write_parquet(root / "all.parquet", columns, row_group_size=50)
    with serving(root) as url:
        yield {
            "one .rec": str(glyphs),
            "three .rec": f"{root}/0.rec {root}/1.rec {root}/2.rec --shared-classes",
            "tar": f"{root}/{{0..2}}.tar",
            "http": f"{url}/{{0..2}}.tar",
            "parquet": f"{root}/all.parquet",
        }


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for the indices. The compiled kernels stay: each set of them takes a compiler a while."""
    kernels = in_cache("kernels", "any").parent
    (tmp_path / "cache/partial-fc").mkdir(parents=True)
    (tmp_path / "cache/partial-fc/kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def flags(rec: str, batch: int, steps: int) -> str:
    common = f"--num-classes {CLASSES} --val-targets --batch-size {batch} --lr-scheduler constant --image-size 24"
    return f"--rec {rec} {common} --warmup-steps 1 --sync-bn --sample-rate 0.5 --max-steps {steps}"


@pytest.mark.long
@pytest.mark.slow
def test_every_form_gives_the_same_curve(forms, tmp_path, cache):
    """On one process; on two, of which one is killed; and resumed on two and on three."""
    curves: dict[int, dict[str, list[float]]] = {1: {}, 2: {}, 3: {}}
    saved = f"checkpoints/step-{STEPS - 2:08d}"  # complete when the next one begins
    for form, rec in forms.items():
        train_here(tmp_path / "1" / form, flags(rec, 24, STEPS))
        given = face(tmp_path / "2" / form, flags(rec, 12, STEPS) + " --checkpoint-every 1", f"stall@{STEPS}")
        killed(given, 2, tmp_path / "2" / form / saved / "COMPLETE", tmp_path / "output")
        shutil.copytree(tmp_path / "2" / form, tmp_path / "3" / form)
    train_several({tmp_path / "2" / form: flags(rec, 12, STEPS) for form, rec in forms.items()})
    train_several({tmp_path / "3" / form: flags(rec, 8, STEPS) for form, rec in forms.items()}, 3)
    for num_ranks, curve in curves.items():
        curve |= {form: losses(tmp_path / str(num_ranks) / form) for form in forms}
        assert len(curve["one .rec"]) == STEPS
        for form in forms:
            assert curve[form] == curve["one .rec"], (num_ranks, form)
            log = (tmp_path / str(num_ranks) / form / "logs/rank-0000.log").read_text()
            assert num_ranks == 1 or re.search(f"resumed from .*{saved}", log)


def test_a_server_that_is_gone_ends_all_ranks_with_a_checkpoint(forms, glyphs, tmp_path, cache):
    """Which go on, when the server is back, as if nothing had been."""
    left, run = [60], tmp_path / "run"
    with serving(Path(forms["parquet"]).parent, left=left) as url:
        given = face(run, flags(f"{url}/{{0..2}}.tar", 4, 12) + " --check-data off", "impatient")
        printed = several([given])
        assert [endings(printed, rank) for rank in range(2)] == [[str(EXIT_PREEMPTED)]] * 2, printed[-4000:]
        logs = [(run / f"logs/rank-000{rank}.log").read_text() for rank in range(2)]
        assert any("the training data is unreachable, ending after this step" in log for log in logs)
        assert 0 < len(losses(run)) < 11
        left.clear()
        assert endings(several([given]), 1) == ["0"]
    train_several({tmp_path / "whole": flags(str(glyphs), 4, 12)})
    assert losses(run) == losses(tmp_path / "whole")
