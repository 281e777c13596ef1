"""`pip install .` somewhere else: the wheel has everything, and only under our name."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.house.test_library import programs
from tests.recipes.conftest import class_folders
from tests.running import result
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
ENVIRON = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
PARTS = ("partial_fc", "recipes", "setup.cfg", "setup.py", "pyproject.toml", "README.md")


def run(*command: object, **environ: str) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves files in the folder that it builds."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "build"))
        else:
            shutil.copy(ROOT / part, copy / part)
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index", "-w", out)
    run(sys.executable, "-m", "pip", "wheel", *options, copy)
    (built,) = out.iterdir()
    return built


def test_one_wheel_serves_every_python_and_holds_one_package(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"partial_fc"}
    for folder, there in (("partial_fc", "partial_fc"), ("recipes", "partial_fc/recipes")):
        for source in (ROOT / folder).rglob("*"):
            if source.suffix in (".py", ".h", ".cpp") or source.name == "py.typed":
                assert f"{there}/{source.relative_to(ROOT / folder)}" in names


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare one, with the wheel, and with what it needs from the environment that runs the tests."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # torch and the rest are those of this environment; its own .pth files, such as the checkout's, do not count there.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    run(sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index", wheel)
    return environment


def test_its_command_line(environment):
    assert "checkpoint verify" in run(environment / "bin/partial-fc", "--help", PATH="/usr/bin:/bin")
    assert "--sample-rate" in run(environment / "bin/partial-fc", "train", "face", "--help", PATH="/usr/bin:/bin")


def test_mypy_knows_the_types_of_the_installed_package(environment, tmp_path):
    texts = [*programs("library.md")]
    typo = texts[0].replace("sample_rate=", "smaple_rate=")
    assert typo != texts[0]
    for number, text in enumerate([*texts, typo]):
        given = (
            "from typing import Any\n\nloader: Any = ...\n" if "in loader:" in text and "loader =" not in text else ""
        )
        (tmp_path / f"program_{number}.py").write_text(given + text)
    words = ["-m", "mypy", "--python-executable", environment / "bin/python", "--ignore-missing-imports", "."]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, env=ENVIRON)
    *_, error, _, last = done.stdout.splitlines()
    assert last.startswith("Found 1 error in 1 file"), done.stdout
    assert f"program_{len(texts)}.py" in error
    assert 'did you mean "sample_rate"' in error


# ---- the recipes of docs/recipes.md, as they stand there


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, and data for them."""
    folder = tmp_path_factory.mktemp("recipes")
    told = zip(("folders.py", "titles.py"), programs("recipes.md"), (60, 120), strict=True)
    for name, program, most_lines in told:
        assert len(program.splitlines()) <= most_lines
        (folder / name).write_text(program)
    for split in ("photos", "test-photos"):
        class_folders(folder / split)
    words = [f"word{number}" for number in range(40)]
    for seed, split in enumerate(("train", "test")):
        rng = np.random.default_rng(seed)
        # Each class has words of its own, among those that all have.
        lines = [f"c{label}\town{label} {' '.join(rng.choice(words, 3))} own{label}" for label in range(30)] * 4
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def command(environment: Path, words: str) -> list[str]:
    return [str(environment / "bin/partial-fc"), "train", *words.split()]


def test_the_recipe_for_pictures(environment, recipes, monkeypatch):
    monkeypatch.chdir(recipes)
    run(
        *command(environment, "./folders.py --folder photos --test-folder test-photos --batch-size 8 --epochs 4"),
        **ENVIRON,
    )
    found = result(recipes / "runs/folders")
    assert found["evaluations"]["test/accuracy"] > 0.5
    assert found["images_per_s"] > 0
    assert (recipes / "runs/folders/first_batch.png").exists()


def test_the_recipe_for_texts_is_killed_and_goes_on_with_other_ranks(environment, recipes, monkeypatch):
    monkeypatch.chdir(recipes)
    flags = "--titles train.tsv --test-titles test.tsv --gpus 2 --sample-rate 0.5 --max-steps 100 --checkpoint-every 10"
    again = command(environment, f"./titles.py {flags} --models-root killed")
    killed = subprocess.Popen(
        again, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRON
    )
    until((recipes / "killed/checkpoints/step-00000020/COMPLETE").exists, 120.0, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (recipes / "killed/result.json").exists()
    alone = f"./titles.py {flags} --models-root killed --gpus 1 --batch-size 32"  # the same global batch
    run(*command(environment, alone), **ENVIRON)
    log = (recipes / "killed/logs/rank-0000.log").read_text()
    assert "resumed from" in log
    assert "samples/s" in log
    assert "images" not in log
    assert result(recipes / "killed")["world_size"] == 1
    assert result(recipes / "killed")["evaluations"]["recall@1"] > 0.9
    assert result(recipes / "killed")["samples_per_s"] > 0
    assert not (recipes / "killed/first_batch.png").exists()
