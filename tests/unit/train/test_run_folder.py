"""What a run's folder is called where nobody says so, and that all ranks are told whose it is."""

import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from partial_fc.checkpoint.lock import acquire
from partial_fc.train.begin import run_folder
from partial_fc.train.begin.run_folder import hold_folders
from partial_fc.train.begin.start import is_asked_for, named
from recipes.face import main as face
from recipes.imagenet import main as imagenet
from recipes.mnist import main as mnist
from tests.unit.models.test_arcface_torch_config import HEAD, write
from tests.unit.thread_world import in_world


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rec /data/faces --device cuda", "runs/face-faces-r50"),
        ("--rec /data/my.faces/train.rec --network mbf", "runs/face-my.faces-mbf"),
        ("--rec lists/a+b:c.lst --device cpu", "runs/face-a+b_c-tiny"),
        ("--rec /data/faces --dataset emore --network r100", "runs/face-emore-r100"),
        ("--dataset 100w --device cuda", "runs/face-100w-r50"),
        ("--rec x --models-root mine", "mine"),
    ],
)
def test_two_experiments_do_not_meet(words, expected):
    config = face.parse(shlex.split(words))[0]
    assert named(config, face._called(config)).run.models_root == Path(expected)


def test_a_configuration_file_gives_its_name(tmp_path):
    path = write(tmp_path, f"{HEAD}config.network = 'r100'\nconfig.rec = '/data/x'\n", "ms1mv3_r50.py")
    config = face.parse(["--config", str(path)])[0]
    assert named(config, face._called(config)).run.models_root == Path("runs/face-ms1mv3_r50-r100")
    path.write_text(path.read_text() + "config.output = 'work'\n")
    config = face.parse(["--config", str(path)])[0]
    assert named(config, face._called(config)).run.models_root == Path("work")


def test_images_that_are_made_up_are_trained_on_for_nothing_unless_somebody_asks():
    def asked(words: str) -> bool:
        return is_asked_for(face.parse(["--dataset", "100w", *shlex.split(words)])[0])

    assert not asked("--max-steps 20")
    assert all(map(asked, ("--models-root x", "--checkpoint-dir x", "--checkpoint-every 5")))
    assert not is_asked_for(imagenet.parse(["--train_data", "null"])[0])


def config_of(root: Path, **more: object):
    config = mnist.parse(["--models-root", str(root)])
    return replace(config, run=replace(config.run, **more))


def test_all_ranks_are_told_whose_the_folder_is(tmp_path):
    """Also that of the checkpoints alone; and a folder is free again where the other one is another run's."""
    (tmp_path / "shared").mkdir()
    holder, _ = acquire(tmp_path / "shared", "another")

    config = config_of(tmp_path / "run", checkpoint_dir=tmp_path / "shared")

    def begin(world) -> str:
        with pytest.raises(ValueError) as refused:
            hold_folders(config, world)
        return str(refused.value)

    said = in_world(3, begin)
    assert len(set(said)) == 1
    assert f"{tmp_path / 'shared'} is in use" in said[0]
    assert list((tmp_path / "run").iterdir()) == []
    holder.release()


def test_processes_start_before_torch_is_imported(tmp_path):
    asked = f"""
import sys
from partial_fc.train.begin.start import launch
from recipes.imagenet import main as imagenet
from recipes.kinetics import main as kinetics
from recipes.mnist import main as mnist
assert launch(mnist.parse(["--models-root", {str(tmp_path)!r}])) is None
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", asked], check=True)


def test_hosts_that_may_go_are_told_that_they_share_no_folder():
    with_restarts = {"TORCHELASTIC_MAX_RESTARTS": "100"}
    own, shared = {Path("/scratch/run"): [0, 1]}, {Path("/shared/run"): [0, 1, 2, 3]}
    (note,) = run_folder.separate({**shared, **own}, 4, with_restarts)
    assert "/scratch/run" in note
    assert "/shared/run" not in note
    assert run_folder.separate(shared, 4, with_restarts) == run_folder.separate(own, 4, {}) == []


def test_of_two_that_begin_at_once_one_gets_both_folders(tmp_path, monkeypatch):
    """Also where what one has for its checkpoints is the other one's for all else. Both find nobody there, and each
    asks for its first folder before anybody asks for a second one."""
    meeting, begun = threading.Barrier(2, timeout=20), set()

    def meet(root, run):
        try:
            return acquire(root, run)
        finally:
            if run not in begun:
                begun.add(run)
                meeting.wait()

    monkeypatch.setattr(run_folder, "acquire", meet)

    def begin(config) -> str:
        folders = None
        try:
            [(folders, _)] = in_world(1, lambda world: hold_folders(config, world))
            said = "trains"
        except ValueError as refused:
            said = str(refused)
        meeting.wait()
        if folders:
            folders.release()
        return said

    a, b = tmp_path / "a", tmp_path / "b"
    configs = [config_of(one, checkpoint_dir=other) for one, other in ((a, b), (b, a))]
    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(begin, configs))
    assert f"{a} is in use" in said[0]
    assert said[1] == "trains"
