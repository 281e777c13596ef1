"""`pip install .` somewhere else: the wheel has everything, and only under our name."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from partial_fc.head.kernels.cpu import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
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
            if source.suffix in (".py", ".h", ".cpp"):
                assert f"{there}/{source.relative_to(ROOT / folder)}" in names


STEP = """
import torch
from partial_fc import comm
from partial_fc.head import ArcFace, PartialFC
head = PartialFC(num_classes=300, embedding_size=32, margin=ArcFace(), sample_rate=0.5, impl="cpu", world=comm.init())
feat_BD = torch.randn(4, 32, requires_grad=True)
before = head.centres.clone()
head(feat_BD, torch.arange(4)).backward()
head.step(lr=0.1)
assert not torch.equal(before, head.centres)
print(comm.__file__)
"""


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


def test_the_first_step_compiles_the_kernel_into_an_empty_cache(environment, tmp_path):
    environ = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)}
    assert run(environment / "bin/python", "-I", "-c", STEP, **environ).startswith(str(environment))
    compiled = {path.name.partition("-")[0] for path in (tmp_path / "partial-fc/kernels").glob("*.so")}
    best = load("portable").head_best().decode()
    # portable knows the best; amx is compared with avx512_bf16 before it is taken.
    assert compiled == {"portable", best} | ({"avx512_bf16"} if best == "amx" else set())


def test_its_command_line(environment):
    assert "checkpoint verify" in run(environment / "bin/partial-fc", "--help", PATH="/usr/bin:/bin")
    assert "--sample-rate" in run(environment / "bin/partial-fc", "train", "face", "--help", PATH="/usr/bin:/bin")
