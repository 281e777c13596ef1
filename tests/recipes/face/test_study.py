"""A study trains, measures and repeats a row of one's own (docs/fidelity.md)."""

import json
from dataclasses import replace

import pytest

from benchmarks import fidelity
from benchmarks.study import command
from benchmarks.study.cells import Cell
from benchmarks.study.command import Study
from benchmarks.study.statistics import Results
from partial_fc.data import open_source
from partial_fc.data.recordio import RecordWriter, pack

FLAGS = "--backbone tiny --embedding-size 32 --batch-size 16 --precision fp32 --num-workers 1"


def test_a_row_of_ones_own_is_trained_and_repeats(glyphs, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    own = Cell("own", "0.3")
    source, held_out = open_source(glyphs), tmp_path / "few.rec"
    with RecordWriter(held_out) as few:  # they are embedded six times, twice
        for key, sample in enumerate(map(source.read, range(200))):
            few.write(key, pack(sample.label, sample.data))
    study = Study("fidelity", fidelity.ARMS, [(own, 0)], fidelity.data, fidelity.analyse)
    options = fidelity.FidelityOptions(
        cell="own-0.3", seed=0, rec=glyphs, held_out=held_out, steps=5, flags=FLAGS, folder=tmp_path / "runs"
    )
    study.do(options)
    (run,) = Results.read(study.results).by_run.values()
    assert sorted(run["figures"]["curve"], key=int) == ["1", "2", "3", "4", "5"]
    assert 0 < run["figures"]["error"]["1e-4"] <= 1

    # Repeated, it has the figures that it had, so not those of a file that was changed.
    figures = str(run["figures"])
    run["figures"]["error"]["1e-4"] -= 1e-12
    study.result(own, 0).write_text(json.dumps(run))
    with pytest.raises(ValueError, match="other figures") as raised:
        study.do(replace(options, repeat=1))
    assert str(raised.value).endswith(figures)
