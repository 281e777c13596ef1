"""The CSV log of Caffe2's trainers, to the letter."""

import logging
from argparse import Namespace
from datetime import datetime
from types import SimpleNamespace

import torch

from partial_fc.train.job import RunState
from recipes.imagenet import main as imagenet
from recipes.imagenet.caffe2_log import Caffe2Log, first_start
from recipes.imagenet.epochs import Caffe2Rows, LastUpdate
from tests.unit.thread_world import ThreadWorld, in_world

STARTED = datetime(2017, 4, 11, 14, 16, 17)
NAME = "resnet50_gpu2_b64_L1000_lr0.10_v2_20170411_141617.log"
ARGUMENTS = Namespace(train_data="my_lmdb", test_data=None, num_gpus=2)

# What ModelTrainerLog writes for epochs of 10 updates that end after 4, 6 and 8.5 seconds. Written by hand from the
# source: input_count is of the epoch's start.
GOLDEN = """\
# Namespace(train_data='my_lmdb', test_data=None, num_gpus=2)
time_spent,cumulative_time_spent,input_count,cumulative_input_count,cumulative_batch_count,inputs_per_sec,accuracy,\
epoch,learning_rate,loss,test_accuracy
4.0,4.0,0,0,9,0.0,0.15625,0,0.1,4.8115196,-1
2.0,6.0,640,640,19,320.0,0.25,1,0.1,3.3333333,-1
2.5,8.5,640,1280,29,256.0,0.3,2,0.01,2.0,0.5
"""


def log(folder, *times, **more):
    return Caffe2Log(folder, ARGUMENTS, 2, 64, 1000, 0.1, STARTED, clock=iter(times).__next__, **more)


def add(it, *epochs):
    rows = [
        {"accuracy": 0.15625, "loss": 4.811519622802734, "learning_rate": 0.1, "test_accuracy": -1},
        {"accuracy": 0.25, "loss": 10 / 3, "learning_rate": 0.1, "test_accuracy": -1},
        {"accuracy": 0.3, "loss": 2.0, "learning_rate": 0.01, "test_accuracy": 0.5},
    ]
    for epoch in epochs:
        it.add(epoch, 10, **rows[epoch])


def test_golden_text(tmp_path):
    it = log(tmp_path, 100.0, 104.0, 106.0, 108.5)
    assert it.path == tmp_path / NAME
    add(it, 0, 1, 2)
    assert it.path.read_text() == GOLDEN


def test_the_header_comes_with_the_first_row(tmp_path):
    assert log(tmp_path, 100.0).path.read_text() == GOLDEN.splitlines(keepends=True)[0]
    add(log(tmp_path, 200.0, 204.0, 206.0, 208.5), 0, 1, 2)  # a run that ended before its first row
    assert (tmp_path / NAME).read_text() == GOLDEN


def test_a_resumed_run_goes_on_in_the_file(tmp_path):
    """Epoch 1 was lost after its row, and the row of epoch 2 was cut."""
    add(log(tmp_path, 100.0, 104.0, 107.0), 0, 1)
    with (tmp_path / NAME).open("a") as file:
        file.write("1.0,8.0,64")
    add(log(tmp_path, 900.0, 902.0, 904.5, epoch=1), 1, 2)
    assert (tmp_path / NAME).read_text() == GOLDEN


def test_a_run_that_begins_anew_under_its_name_leaves_no_old_rows(tmp_path):
    add(log(tmp_path, 100.0, 104.0, 107.0), 0, 1)
    add(log(tmp_path, 900.0, 904.0, 906.0, 908.5), 0, 1, 2)
    assert (tmp_path / NAME).read_text() == GOLDEN


def test_a_resumed_run_knows_when_it_was_first_started(tmp_path):
    path = tmp_path / "started.txt"
    now = first_start(path, resumed=True)  # of a run whose start wrote none
    assert abs((datetime.now() - now).total_seconds()) < 60
    path.write_text("2017-04-11T14:16:17\n")
    assert first_start(path, resumed=True) == STARTED
    assert first_start(path, resumed=False) >= now


def test_every_host_has_the_rows_of_its_first_process(tmp_path, monkeypatch):
    """Two hosts of two processes, in one folder, by the clock of the first."""
    monkeypatch.chdir(tmp_path)
    config, _ = imagenet.parse(["--train_data", "db", "--num_labels", "7", "--batch_size", "2"])

    def of_rank(world: ThreadWorld) -> None:
        world.local_rank, world.local_size = world.rank % 2, 2
        (root := tmp_path / f"root-{world.rank}").mkdir()
        (root / "started.txt").write_text(f"2017-04-11T14:16:{17 + world.rank}\n")
        order, state = SimpleNamespace(num_samples=24), RunState(position=24, step=3)
        run = SimpleNamespace(config=config, device=torch.device("cpu"), root=root, world=world, global_batch=8,
                              logger=logging.getLogger("test"))  # fmt: skip
        head = SimpleNamespace(
            last_step={"correct_B": torch.tensor([1, world.rank == 0])},
            row_losses=lambda batch, size: torch.full((size,), 2.0 + world.rank),
        )
        last = LastUpdate(head, config.optim.batch_size, run.device)  # type: ignore[arg-type]
        files = Caffe2Rows(run, order, last, ARGUMENTS)  # type: ignore[arg-type]
        files.begin(state)
        values = dict(last.run(None, world))  # type: ignore[arg-type]
        assert last.lines(6, 2.0, values, {})[0].startswith("Finished epoch 2; Training loss: ")
        state.position, state.step, state.lr = 48, 6, 0.05
        files.after_epoch(state, values)

    in_world(4, of_rank)
    name = "resnet50_gpu2_b4_L7_lr0.10_v2_20170411_141617"
    rows = {path.name: path.read_text().splitlines()[-1].split(",")[6:] for path in tmp_path.glob("*.log")}
    assert rows == {
        f"{name}.log": ["1.0", "1", "0.05", "2.0", "-1"],
        f"{name}_shard1.log": ["0.5", "1", "0.05", "4.0", "-1"],
    }
