"""The programs of docs, as they stand there. (From the wheel: scripts/test_wheel.py.)"""

import os
import re
import runpy
import signal
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from partial_fc.head import CosFace, PartialFC
from partial_fc.verbs.train import exit_now
from tests import head_reference as reference
from tests.recipes.conftest import class_folders
from tests.running import ranks

pytestmark = pytest.mark.slow

STEPS = 6
PAGES = Path(__file__).parents[2] / "docs"


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


ONE, LABELS, HEADS, DDP, FSDP, LIGHTNING, ACCELERATE, HUGGING_FACE, *MORE = programs("library.md")
LOADER, *FROM_OTHERS, SEARCH, _, _ = MORE


def run(folder: Path, num_steps: int) -> list[float]:
    (folder / "train.py").write_text(DDP)
    return printed_losses(2, folder, str(num_steps))


def printed_losses(size: int, folder: Path, *words: str) -> list[float]:
    printed = ranks(size, program, folder, *words)  # also what goes to stderr
    return [float(loss) for loss in re.findall(r"^\d+ (\S+)$", printed, re.MULTILINE)]


def program(folder: Path, *words: str) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # by this Lightning knows torchrun
    os.chdir(folder)
    sys.argv = ["train.py", *words]
    # Its variables are kept, and not freed at the end: DDP's reducer may free the process group, which then waits with
    # the GIL for a thread of Gloo's that waits for the GIL (torch 2.13).
    kept = runpy.run_path("train.py", run_name="__main__")
    assert kept
    exit_now(0)


def dense_losses() -> list[float]:
    """One process with the batches of both ranks, and all centres in one parameter."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    centre_CD = nn.Parameter(PartialFC(1001, 16, CosFace(16.0)).centres.clone())
    optimizer = torch.optim.SGD([*backbone.parameters(), centre_CD], lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batches = []
        for rank in (0, 1):
            random = torch.Generator().manual_seed(2 * step + rank)
            batches.append((torch.randn(8, 32, generator=random), torch.randint(0, 1001, (8,), generator=random)))
        image, label = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss = reference.loss(backbone(image), label, centre_CD, CosFace(16.0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_shortest_program_has_twelve_lines_and_runs():
    assert len([line for line in ONE.splitlines() if line]) <= 12
    found: dict[str, torch.Tensor] = {}
    exec(ONE, found)
    assert found["nearest"].shape == (64, 5)


def test_several_labels_move_their_centres():
    found: dict = {}
    exec(LABELS, found)
    head, label = found["head"], found["label"]
    assert (head.row_state()["touched"][label[label >= 0].unique()] == 1).all()


def test_several_heads_move_the_centres_of_their_labels():
    found: dict = {}
    exec(HEADS, found)
    heads, label = found["heads"], found["label"]
    assert (heads.parts["words"].row_state()["touched"][(label[40:] - 10_000).unique()] == 1).all()


@pytest.mark.long
def test_the_page_trains_as_one_process_would_also_after_a_restart(tmp_path):
    losses = run(tmp_path, STEPS // 2) + run(tmp_path, STEPS)
    assert losses == pytest.approx(dense_losses(), rel=1e-5)


def test_the_loader_resumes_on_another_number_of_processes(tmp_path):
    assert len([line for line in LOADER.splitlines() if line]) <= 13
    class_folders(tmp_path / "photos")
    (tmp_path / "train.py").write_text(LOADER)

    def seen(size: int, steps: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for position, keys in re.findall(r"^(\d+) \[([\d, ]+)\]", ranks(size, program, tmp_path, str(steps)), re.M):
            found[int(position)] += map(int, keys.split(", "))
        return {position: sorted(keys) for position, keys in found.items()}

    parts = seen(1, 2) | seen(2, 3)
    assert list(parts) == [12, 24, 36, 48, 60]
    (tmp_path / "position").unlink()
    assert parts == seen(1, 5)


def program_killed(moment: str, folder: Path, *words: str) -> None:
    """The program, whose ranks are killed in the seventh step, or in the first save: rank 0 has written its file, the
    others have not."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def step(head: PartialFC, lr: float) -> None:
        head_step(head, lr)
        if head.num_steps == 7:
            die()

    def write_data(writer: FileSystemWriter, *arguments: Any) -> None:
        if torch.distributed.get_rank() == 0:
            written = write(writer, *arguments)
            written.wait()
        die()

    head_step, write = PartialFC.step, FileSystemWriter.write_data
    if moment == "step":
        PartialFC.step = step
    else:
        FileSystemWriter.write_data = write_data
    program(folder, *words)


@pytest.mark.long
def test_killed_ranks_resume_from_a_sharded_checkpoint_on_another_number_of_ranks(tmp_path):
    """Killed in the seventh step, with a checkpoint after the fifth; then in the save after the tenth."""
    (tmp_path / "train.py").write_text(FSDP)

    def losses(size: int, folder: str, *moment: str) -> dict[int, float]:
        killed = {"status": -signal.SIGKILL} if moment else {}
        target = partial(program_killed, *moment) if moment else program
        printed = ranks(size, target, tmp_path, folder, "12", **killed)
        return {int(step): float(loss) for step, loss in re.findall(r"^(\d+) (\S+)$", printed, re.MULTILINE)}

    undisturbed = losses(1, "one")
    assert list(undisturbed) == list(range(12))
    found = [losses(2, "several", "step"), losses(3, "several", "save")]
    half = tmp_path / "several/step-000010"
    assert list(half.iterdir())
    assert not (half / ".metadata").exists()
    found.append(losses(1, "several"))
    assert [(min(each), max(each)) for each in found] == [(0, 5), (5, 9), (5, 11)]
    for each in found:
        assert each == pytest.approx({step: undisturbed[step] for step in each}, rel=0, abs=1e-12)


FRAMEWORKS = [
    pytest.param(LIGHTNING, ["model.ckpt"], id="Lightning"),
    pytest.param(ACCELERATE, [], id="accelerate"),
    pytest.param(HUGGING_FACE, [], id="Hugging Face"),
]


@pytest.mark.long
@pytest.mark.parametrize(("text", "resumed"), FRAMEWORKS)
def test_frameworks_train_and_resume_on_another_number_of_processes(tmp_path, text, resumed):
    found = []
    for folder, before, after in (("a", 1, 1), ("b", 2, 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(text)
        losses = printed_losses(before, tmp_path / folder, "2")
        found.append(losses + printed_losses(after, tmp_path / folder, "4", *resumed))
    assert len(found[0]) == 16
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0][-1] < 0.7 * found[0][0]


def migrated(text: str) -> None:
    """Runs the program with some batches of one set, which it is to learn."""
    random = torch.Generator().manual_seed(0)
    image, label = torch.randn(64, 32, generator=random), torch.randint(0, 1000, (64,), generator=random)
    found: dict[str, Any] = {"loader": [(image, label)] * 30}
    exec(text, found)
    with torch.no_grad():
        first = text.index("head = ")
        assert found["head"](found["backbone"](image), label) < 10, text[first:]
    assert found.get("predicted", found.get("logits")).shape in ((4, 5), (4, 1000))


@pytest.mark.long
@pytest.mark.parametrize("text", FROM_OTHERS, ids=["nn.Linear", "PyTorch Metric Learning"])
def test_programs_after_a_migration_run_and_learn(text):
    ranks(1, migrated, text)


@pytest.mark.long
def test_the_search_for_products_learns(tmp_path):
    """A hundredth of the products, a fifth of the steps."""
    (tmp_path / "train.py").write_text(SEARCH)
    printed = [line for line in ranks(1, program, tmp_path, "2000", "60").splitlines() if "recall@" in line]
    before, after = (list(map(float, re.findall(r"recall@\d ([\d.]+\d)", line))) for line in printed)
    assert max(before) < 0.05
    assert after[0] > 0.3
    assert after[1] >= after[0]


# What stands there -> what is run: classes enough for a look, and a kernel that every machine has.
_SMALLER = {"C, G, D = 100_000, 128, 512": "C, G, D = 500, 16, 32", "range(480)": "range(462)"}
_VARIANTS = 'variants = ("avx512_bf16", "avx512", "avx2", "portable")'
_ONE_VARIANT = {_VARIANTS: 'variants = ("portable",)', **dict([*_SMALLER.items()][:1])}


@pytest.mark.parametrize(
    ("page", "number", "changes"),
    [
        pytest.param("benchmarks.md", 0, _ONE_VARIANT, marks=pytest.mark.long),
        pytest.param("benchmarks.md", 1, _SMALLER, marks=pytest.mark.long),
        ("library.md", -1, {}),
    ],
)
def test_a_program_runs(page, number, changes, tmp_path):
    """(The program with a trained model runs in tests/recipes/first_hour.sh, on README.md's model.)"""
    np.savez(tmp_path / "faces.npz", keys=np.array([*"abcdef"]), embeddings=np.eye(6, dtype=np.float32))
    text = programs(page)[number]
    for then, now in changes.items():
        assert then in text
        text = text.replace(then, now)
    (tmp_path / "train.py").write_text(text)
    ranks(1, program, tmp_path)
