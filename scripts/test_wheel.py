"""Tests the wheel where nothing else is: builds it, installs it into empty environments, runs docs/library.md there.

    .venv/bin/python scripts/test_wheel.py

Each environment has torch, numpy, the wheel, and what its program names. Python 3.11 has the oldest torch of setup.cfg,
Python 3.13 that of constraints.txt. A Python that is not on this machine is left out, with a line. uv finds Pythons,
downloads and caches; TORCH_INDEX_URL is the index of PyTorch for CPUs; without it uv takes PyTorch for CUDA.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OLDEST_TORCH = "2.6.0"
# What the head does with torch, apart from the trainer. Run beside the installed wheel, with pytest from elsewhere.
CORE_TESTS = ("module", "predict")
SMOKE = """
import sys, time
import torch
before = time.perf_counter()
from partial_fc import PartialFC
took = time.perf_counter() - before
from importlib.util import find_spec
from partial_fc.errors import TRAINER
found = [name for name in TRAINER if name != "jinja2" and find_spec(name)]  # jinja2 is torch's, too
assert not found, f"installed, but not needed: {found}"
head = PartialFC(300, 32, "cosface", impl="cpu")  # compiled here: the cache is empty
head(torch.randn(4, 32, requires_grad=True), torch.arange(4)).backward()
head.step(lr=0.1)
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: importing PartialFC after torch takes {took:.2f} s")
"""


class Environment(NamedTuple):
    python: str
    torch: str
    programs: tuple[str, ...]  # of docs/library.md; those that are named as a package have this package beside torch

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}"


FRAMEWORKS = ("lightning", "accelerate")


def environments() -> list[Environment]:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    new = next(line.removeprefix("torch==") for line in constraints if line.startswith("torch=="))
    return [
        Environment("3.11", OLDEST_TORCH, ("one", "ddp")),  # fully_shard on CPUs needs torch 2.7
        Environment("3.13", new, ("one", "ddp", "fsdp", *FRAMEWORKS)),
    ]


# Program -> its words for 1 process, and for 2 that resume what 1 has saved. (From the first on the page to the last.)
WORDS = {
    "one": ("",),
    "ddp": ("3", "3"),
    "fsdp": ("checkpoints 5", "checkpoints 8"),
    "lightning": ("1", "2 model.ckpt"),
    "accelerate": ("1", "2"),
}


def run(*command: object, folder: Path | None = None, status: int = 0, environ: Mapping[str, str] | None = None) -> str:
    """Returns what the command printed; exits with that where its status is another one."""
    words = [str(word) for word in command]
    settings = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    settings |= environ or {}
    settings |= {name: value for name, value in os.environ.items() if name.startswith(("UV_", "SSL_", "XDG_DATA"))}
    done = subprocess.run(words, capture_output=True, text=True, env=settings, cwd=folder, timeout=600)
    if done.returncode != status:
        raise SystemExit(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def find_python(version: str) -> str | None:
    """The interpreter of that version: uv's, one on the PATH, or pyenv's."""
    found = subprocess.run(
        ["uv", "python", "find", "--no-python-downloads", version], capture_output=True, text=True, cwd="/"
    )
    if found.returncode == 0:
        return found.stdout.strip()
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next((str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python"))), None)


def build(folder: Path) -> Path:
    """The wheel, built from a source distribution that is built from a copy; both pass twine."""
    copy = folder / "sources"
    for name in ("partial_fc", "recipes", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run("uv", "tool", "run", "--from", "build", "pyproject-build", "--installer", "uv", "--outdir", folder, copy)
    files = sorted(folder.glob("partial_fc-*"))
    print(run("uv", "tool", "run", "twine", "--no-color", "check", "--strict", *files), flush=True)
    (wheel,) = folder.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB", flush=True)
    return wheel


def test(environment: Environment, wheel: Path, folder: Path, cache: Path) -> None:
    interpreter = find_python(environment.python)
    if interpreter is None:
        print(f"skipped: {environment}: there is no such Python on this machine", flush=True)
        return
    start = time.monotonic()
    folder.mkdir()
    run("uv", "venv", "--quiet", "--python", interpreter, folder / "venv")
    bin_folder = folder / "venv/bin"
    index = ("--extra-index-url", os.environ["TORCH_INDEX_URL"]) if os.environ.get("TORCH_INDEX_URL") else ()

    def pip(verb: str, *words: object) -> str:
        return run("uv", "pip", verb, "--quiet", "--python", bin_folder / "python", *words)

    pip("install", *index, wheel, f"torch=={environment.torch}")
    (folder / "packages.txt").write_text(pip("freeze"))
    settings = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache), "PYTHONWARNINGS": "ignore"}
    print(run(bin_folder / "python", "-c", SMOKE, folder=folder, environ=settings).strip(), flush=True)
    told = run(bin_folder / "partial-fc", "evaluate", "x", folder=folder, status=1, environ=settings)
    assert len(told.splitlines()) == 1, told
    assert 'pip install "partial-fc[train]"' in told, told
    if environment.torch == OLDEST_TORCH:
        core_tests(bin_folder, folder, settings)
    texts = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    page = dict(zip(WORDS, texts, strict=True))
    for name in environment.programs:
        if name in FRAMEWORKS:
            pip("sync", *index, folder / "packages.txt")  # removes the other one
            pip("install", *index, name)
        run_program(name, page[name], bin_folder, folder / name, settings)
    print(f"passed: {environment}: {time.monotonic() - start:.0f} s", flush=True)


def run_program(name: str, text: str, bin_folder: Path, folder: Path, settings: dict[str, str]) -> None:
    """Runs a program of the page on 1 process and then on 2."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    for size, words in enumerate(WORDS[name], start=1):
        launcher: tuple[str, ...] = ("torchrun", "--standalone", f"--nproc_per_node={size}")
        if size == 1 and "init_process_group" not in text:
            launcher = ("python",)
        command = (bin_folder / launcher[0], *launcher[1:], "train.py", *words.split())
        printed = run(*command, folder=folder, environ=settings)
        if name == "ddp":  # its files are of one number of ranks
            for path in folder.glob("checkpoint*"):
                path.unlink()
        assert name == "one" or re.search(r"^\d+ \d+\.\d+$", printed, re.MULTILINE), printed


def core_tests(bin_folder: Path, folder: Path, settings: dict[str, str]) -> None:
    """Tests of the head, in a copy beside which there is no checkout; pytest lies outside of the environment."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = slow\n")
    python = bin_folder / "python"
    run("uv", "pip", "install", "--quiet", "--python", python, "--target", folder / "pytest", "pytest", "hypothesis")
    files = [f"tests/unit/head/test_{name}.py" for name in CORE_TESTS]
    environ = settings | {"PYTHONPATH": f"{folder / 'pytest'}:{folder}"}
    print(run(python, "-m", "pytest", "-q", *files, folder=folder, environ=environ).splitlines()[-1], flush=True)


def main() -> None:
    if shutil.which("uv") is None:
        sys.exit("test_wheel.py needs uv: `make setup` brings it into .venv/bin, which the PATH must have")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        wheel = build(folder)
        tests = [
            pool.submit(test, environment, wheel, folder / str(number), folder / "cache")
            for number, environment in enumerate(environments())
        ]
        for each in tests:
            each.result()


if __name__ == "__main__":
    main()
