"""Tests the wheel where nothing else is: builds it, installs it into empty environments, runs docs/library.md there.

    .venv/bin/python scripts/test_wheel.py

An environment has torch, numpy and the wheel; Lightning, accelerate and transformers come last. Python 3.11
and 3.14 have the torch of constraints.txt, Python 3.13 the oldest of setup.cfg. A Python that is not on this machine is
left out, with a line.
Packages come by uv, or by pip where there is no uv. TORCH_INDEX_URL is the index of PyTorch for CPUs; without it, and
without such a wheel in the folders that pip is configured to look in (find-links), it is PyTorch for CUDA.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OLDEST_TORCH = "2.6.0"
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where uv is
UV = shutil.which("uv") is not None
# What the head does with torch, apart from the trainer. Run beside the installed wheel, with pytest from elsewhere.
CORE_TESTS = ("module", "predict")
SMOKE = """
import sys, time
import torch
before = time.process_time()
from partial_fc import PartialFC
took = time.process_time() - before
assert took < 1, f"importing PartialFC after torch takes {took:.2f} s"
from importlib.util import find_spec
from partial_fc.head import Compute
from partial_fc.errors import TRAINER
found = [name for name in TRAINER if name != "jinja2" and find_spec(name)]  # jinja2 is torch's, too
assert not found, f"installed, but not needed: {found}"
head = PartialFC(300, 32, "cosface", device=Compute(impl="cpu"))  # compiled here where the cache is empty
head(torch.randn(4, 32, requires_grad=True), torch.arange(4)).backward()
head.step(lr=0.1)
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: importing PartialFC after torch takes {took:.2f} s")
"""


class Environment(NamedTuple):
    python: str
    torch: str
    programs: tuple[str, ...]  # of docs/library.md

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}"


FRAMEWORKS = ("lightning", "accelerate", "transformers")
# What a launcher tells the only process: starting torchrun for it takes longer than its program.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def environments() -> list[Environment]:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    new = next(line.removeprefix("torch==") for line in constraints if line.startswith("torch=="))
    return [
        Environment("3.11", new, tuple(WORDS)),
        Environment("3.13", OLDEST_TORCH, ("one", "labels", "ddp")),  # fully_shard on CPUs needs torch 2.7
        Environment("3.14", new, ("one", "labels", "heads", "ddp", "fsdp")),
    ]


# Program -> its words for 1 process, and for 2 that resume what 1 has saved. (In the page's order.)
WORDS = {
    "one": ("",),
    "labels": ("",),
    "heads": ("",),
    "ddp": ("3", "3"),
    "fsdp": ("checkpoints 5", "checkpoints 8"),
    "lightning": ("1", "2 model.ckpt"),
    "accelerate": ("1", "2"),
    "transformers": ("1", "2"),
}


def run(*command: object, folder: Path | None = None, status: int = 0, environ: Mapping[str, str] | None = None) -> str:
    """Returns what the command printed; exits with that where its status is another one."""
    words = [str(word) for word in command]
    settings = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    settings |= environ or {}
    kept = ("UV_", "PIP_", "SSL_", "XDG_DATA")
    settings |= {name: value for name, value in os.environ.items() if name.startswith(kept)}
    done = subprocess.run(words, capture_output=True, text=True, env=settings, cwd=folder, timeout=600)
    if done.returncode != status:
        raise SystemExit(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def find_python(version: str) -> str | None:
    """The interpreter of that version: the one that uv finds, pyenv's, or one on the PATH."""
    if UV:
        command = ["uv", "python", "find", "--no-python-downloads", version]
        found = subprocess.run(command, capture_output=True, text=True, cwd="/")
        if found.returncode == 0:
            return found.stdout.strip()
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next(map(str, pyenv.glob(f"versions/{version}.*/bin/python")), shutil.which(f"python{version}"))


class Venv:
    """An empty environment."""

    def __init__(self, folder: Path, interpreter: str):
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        if UV:
            run("uv", "venv", "--quiet", "--python", interpreter, folder)
        else:
            run(interpreter, "-m", "venv", folder)

    def install(self, *words: object) -> None:
        pip = ("uv", "pip", "install", "--python", self.python) if UV else (self.python, "-m", "pip", "install")
        index = os.environ.get("TORCH_INDEX_URL")
        run(*pip, "--quiet", *(("--extra-index-url", index) if index else ()), *words)


def use_folders_of_pip() -> None:
    """Makes uv look for wheels where pip does."""
    configured = run(sys.executable, "-m", "pip", "config", "list")
    folders = [word for line in re.findall(r"find-links='(.*)'", configured) for word in line.split()]
    if folders:
        os.environ.setdefault("UV_FIND_LINKS", ",".join(dict.fromkeys(folders)))


def build(folder: Path) -> Path:
    """The wheel, built from a source distribution that is built from a copy; both pass twine."""
    copy = folder / "sources"
    for name in ("partial_fc", "recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    tools = Venv(folder / "tools", sys.executable)
    tools.install("build", "twine")
    run(tools.python, "-m", "build", "--installer", "uv" if UV else "pip", "--outdir", folder, copy)
    files = sorted(folder.glob("partial_fc-*"))
    print(run(tools.python, "-m", "twine", "--no-color", "check", "--strict", *files), flush=True)
    (wheel,) = folder.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e3:.0f} kB", flush=True)
    return wheel


def test(environment: Environment, wheel: Future[Path], folder: Path) -> None:
    interpreter = find_python(environment.python)
    if interpreter is None:
        print(f"skipped: {environment}: there is no such Python on this machine", flush=True)
        return
    start = time.monotonic()
    folder.mkdir()
    venv = Venv(folder / "venv", interpreter)
    venv.install(f"torch=={environment.torch}")
    venv.install(wheel.result())
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if environment.torch == OLDEST_TORCH:  # the other one may find the kernel in this machine's cache
        settings["XDG_CACHE_HOME"] = str(folder / "cache")
    print(run(venv.python, "-c", SMOKE, folder=folder, environ=settings).strip(), flush=True)
    told = run(venv.bin / "partial-fc", "evaluate", "x", folder=folder, status=1, environ=settings)
    assert len(told.splitlines()) == 1, told
    assert "pip install 'torch>=" in told, told
    if environment.torch == OLDEST_TORCH:
        core_tests(venv, folder, settings)
    texts = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    page = dict(zip(WORDS, texts, strict=False))
    for name in environment.programs:
        if name == FRAMEWORKS[0]:
            venv.install(*FRAMEWORKS)
        run_program(name, page[name], venv.bin, folder / name, settings)
    print(f"passed: {environment}: {time.monotonic() - start:.0f} s", flush=True)


def run_program(name: str, text: str, bin_folder: Path, folder: Path, settings: dict[str, str]) -> None:
    """Runs a program of the page on 1 process and then on 2."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    for size, words in enumerate(WORDS[name], start=1):
        launcher = (
            [bin_folder / "torchrun", "--standalone", f"--nproc_per_node={size}"]
            if size > 1
            else [bin_folder / "python"]
        )
        alone = ALONE if size == 1 and "init_process_group" in text else {}
        printed = run(*launcher, "train.py", *words.split(), folder=folder, environ=settings | alone)
        if name == "ddp":  # its files are of one number of ranks
            for path in folder.glob("checkpoint*"):
                path.unlink()
        assert name in ("one", "labels", "heads") or re.search(r"^\d+ \d+\.\d+$", printed, re.MULTILINE), printed


def core_tests(venv: Venv, folder: Path, settings: dict[str, str]) -> None:
    """Tests of the head, in a copy beside which there is no checkout; pytest lies outside of the environment."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = slow\n")
    venv.install("--target", folder / "pytest", "pytest", "hypothesis")
    files = [f"tests/unit/head/test_{name}.py" for name in CORE_TESTS]
    environ = settings | {"PYTHONPATH": f"{folder / 'pytest'}:{folder}"}
    told = run(venv.python, "-m", "pytest", "-q", "-m", "not slow", *files, folder=folder, environ=environ)
    print(told.splitlines()[-1], flush=True)


def main() -> None:
    use_folders_of_pip()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(3) as pool:
        folder = Path(name)
        wheel = pool.submit(build, folder)
        tests = [
            pool.submit(test, environment, wheel, folder / str(number))
            for number, environment in enumerate(environments())
        ]
        for each in tests:
            each.result()


if __name__ == "__main__":
    main()
