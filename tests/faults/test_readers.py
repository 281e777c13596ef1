"""Any bytes give a value or an error that names the file: no other exception, no code that runs, no hang, and no more
memory than the file is worth. `make torture` does so for far longer, guided by coverage (tests/faults/fuzz.py)."""

import logging
import os
import pickle
import signal
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.mutations import mutate
from tests.faults.readers import READERS
from tests.faults.trial import Trial
from tests.faults.watching import Fault, read_watched


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """A folder for each reader, made once: hypothesis calls a test many times."""
    logging.disable(logging.CRITICAL)
    made: dict[str, Trial] = {}

    def trial(name: str) -> Trial:
        if name not in made:
            made[name] = Trial(READERS[name], tmp_path_factory.mktemp(name))
        return made[name]

    yield trial
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", READERS)
def test_changed_files(trials, name):
    trial = trials(name)
    outcomes = set()

    @settings(max_examples=60)
    @given(st.randoms(use_true_random=False))
    def any_change(random: Random) -> None:
        seed = random.choice(trial.seeds)[trial.reader.changed]
        outcomes.add(trial.read(mutate(seed, random, trial.reader.words, trial.reader.inside)).outcome)

    any_change()
    assert (
        outcomes - {"value"} or not trial.reader.may_fail
    )  # the changes are not harmless; that unchanged files are read, Trial has seen


@pytest.mark.parametrize("name", READERS)
def test_cut_off_files(trials, name):
    trial = trials(name)
    for files in trial.seeds:
        whole = files[trial.reader.changed]
        for end in sorted({*range(0, len(whole), len(whole) // 12 + 1), len(whole) - 1}):
            trial.read(whole[:end])


@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file(tmp_path, name, kind):
    """A folder of strangers may have a FIFO, which never begins, a link to a device, which never ends, or to itself."""
    reader = READERS[name]
    files = next(files for files in reader.seeds() if reader.changed in files)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    path = tmp_path / reader.changed
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    before = signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(60)
    try:
        outcome = read_watched(reader.read, tmp_path, more_bytes=reader.more_bytes).outcome
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert outcome != "value" or kind == "loop" or not reader.may_fail  # as a file that is not there


def _too_late(*_: object) -> None:
    raise TimeoutError("it waits")


# What a fault looks like to the watch: without these the tests above could pass for nothing.


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda folder: {}["x"], "KeyError"),
        (lambda folder: int("x"), "names no file"),
        (lambda folder: bytes(1 << 40), "MemoryError"),
        (lambda folder: os.system("true"), "os.system"),
        (lambda folder: pickle.loads(b"cbuiltins\nlen\n."), "find_class"),
        (lambda folder: exec("1"), "exec"),
        (lambda folder: (folder.parent / "pwned").mkdir(), "os.mkdir"),
        (lambda folder: (folder.parent / "written").write_text(""), "open"),
        (lambda folder: [None for _ in iter(int, 1)], "still reading"),
        (lambda folder: b"x" * (100 << 20), r"MiB of memory for 0 bytes"),
    ],
)
def test_the_watch_sees(tmp_path, monkeypatch, read, told):
    monkeypatch.setattr("tests.faults.watching.SECONDS", 0.2)
    folder = tmp_path / "files"
    folder.mkdir()
    with pytest.raises(Fault, match=told):
        read_watched(read, folder)


def test_the_watch_lets_pass(tmp_path):
    def names_it(folder: Path) -> None:
        raise ValueError(f"{folder}/a: damaged")

    assert read_watched(names_it, tmp_path).outcome == "ValueError"
    assert read_watched(lambda folder: (folder / "nothing").read_bytes(), tmp_path).outcome == "FileNotFoundError"
    assert read_watched(lambda folder: (folder / "own").write_text(""), tmp_path).outcome == "value"
