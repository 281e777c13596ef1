"""The same images as one .rec, three .rec files, tar shards here and on a server, and Parquet give the same curve."""

import shutil
from pathlib import Path

import pytest

from partial_fc.data import open_source
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.data.sets.tar_shards import write_tar_index
from partial_fc.train.guards.signals import EXIT_PREEMPTED
from tests.recipes.conftest import SMALL, losses, train_here, train_several
from tests.recipes.launch import here
from tests.unit.data.shards import serving, write_tar

CLASSES, STEPS = 80, 4


@pytest.fixture(scope="module")
def forms(glyphs: Path, tmp_path_factory: pytest.TempPathFactory):
    """--rec of each form."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

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
    pyarrow.parquet.write_table(arrow.table(columns), root / "all.parquet", row_group_size=50)
    with serving(root) as url:
        yield {
            "one .rec": str(glyphs),
            "three .rec": f"{root}/0.rec {root}/1.rec {root}/2.rec --shared-classes",
            "tar": f"{root}/{{0..2}}.tar",
            "http": f"{url}/{{0..2}}.tar",
            "parquet": f"{root}/all.parquet",
        }


def flags(rec: str, batch: int, steps: int) -> str:
    common = f"--num-classes {CLASSES} --val-targets --batch-size {batch} --lr-scheduler constant --image-size 24"
    return f"--rec {rec} {common} --warmup-steps 1 --sync-bn --sample-rate 0.5 --max-steps {steps}"


@pytest.mark.slow
def test_every_form_gives_the_same_curve(forms, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    curves: dict[int, dict[str, list[float]]] = {1: {}, 2: {}, 3: {}}
    for form, rec in forms.items():
        train_here(tmp_path / "1" / form, flags(rec, 24, STEPS))
    train_several({tmp_path / "2" / form: flags(rec, 12, STEPS // 2) for form, rec in forms.items()})
    for form in forms:
        shutil.copytree(tmp_path / "2" / form, tmp_path / "3" / form)
    train_several({tmp_path / "2" / form: flags(rec, 12, STEPS) for form, rec in forms.items()})
    train_several({tmp_path / "3" / form: flags(rec, 8, STEPS) for form, rec in forms.items()}, 3)
    for num_ranks, curve in curves.items():
        curve |= {form: losses(tmp_path / str(num_ranks) / form) for form in forms}
        assert len(curve["one .rec"]) == STEPS
        for form in forms:
            assert curve[form] == curve["one .rec"], (num_ranks, form)


def test_a_server_that_is_gone_ends_the_run_with_a_checkpoint(forms, glyphs, tmp_path, monkeypatch):
    """Which goes on, when the server is back, as if nothing had been."""
    from partial_fc.data.sets import ranges

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ranges, "WAITS_S", (0.0, 0.01))
    folder = Path(forms["parquet"]).parent
    answers: list[int] = []
    read = ranges.RemoteFile._ask

    def ask(self: ranges.RemoteFile, offset: int, count: int) -> bytes:
        ask.calls += 1  # type: ignore[attr-defined]
        if ask.calls == 160:  # type: ignore[attr-defined]
            answers[:] = [503] * 10_000
        return read(self, offset, count)

    ask.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(ranges.RemoteFile, "_ask", ask)
    with serving(folder, answers) as url:
        words = flags(f"{url}/{{0..2}}.tar", 8, 30) + " --check-data off"
        given = ["--models-root", str(tmp_path / "run"), *SMALL, *words.split()]
        assert here("recipes.face", given) == EXIT_PREEMPTED
        log = (tmp_path / "run/logs/rank-0000.log").read_text()
        assert "the training data is unreachable, ending after this step" in log
        assert 2 < len(losses(tmp_path / "run")) < 29
        answers.clear()
        assert here("recipes.face", given) == 0
    train_here(tmp_path / "whole", flags(str(glyphs), 8, 30))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
