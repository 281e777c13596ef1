"""The shell scripts around the program, with stand-ins for what they call."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FILES = ("setup.cfg", "setup.py", "pyproject.toml", "constraints.txt", "config.sh", "run.sh", "scripts/setup.sh")
TOOLS = ("bash", "dirname", "id", "uname", "cat", "sed", "sha256sum", "env", "nproc", "awk", "hostname")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without .venv, and next to it bin/ with nothing but the basic tools."""
    copy = tmp_path / "check out"
    (copy / "scripts").mkdir(parents=True)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "hosts", copy / "hosts")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"{tool} is needed by this test"
        (tmp_path / "bin" / tool).symlink_to(found)
    return copy


def run(checkout: Path, *command: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={"PATH": str(checkout.parent / "bin"), "HOME": str(checkout.parent)} | environ,
        cwd=checkout.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_setup_without_apt_names_what_is_missing_and_changes_nothing(checkout):
    before = sorted(checkout.rglob("*"))
    done = run(checkout, "bash", checkout / "scripts/setup.sh")
    assert done.returncode == 1
    for package in ("python3-venv", "g++", "cmake", "openmpi-bin", "libopenmpi-dev"):
        assert package in done.stderr
    assert "apt-get install" in done.stderr, "the command to type"
    assert "Nothing was changed" in done.stderr
    assert sorted(checkout.rglob("*")) == before


def test_setup_without_horovod_needs_no_compiler_and_no_mpi(checkout):
    done = run(checkout, "bash", checkout / "scripts/setup.sh", HOROVOD="0", MXNET="0")
    assert "are missing" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("--no-install-recommends python3 python3-venv")


def test_setup_refuses_a_python_that_cannot_work(checkout):
    old = script(checkout.parent / "python3.8", "#!/bin/sh\nexit 1\n")
    done = run(checkout, "bash", checkout / "scripts/setup.sh", PYTHON=str(old))
    assert done.returncode == 1
    assert f"PYTHON={old} is not a Python 3.11 or newer" in done.stderr


@pytest.fixture
def echoing(checkout: Path) -> Path:
    """The checkout with an interpreter that prints what it is asked to run, and how many threads it may use."""
    script(checkout / ".venv/bin/python", '#!/bin/sh\necho "threads $OMP_NUM_THREADS"\nprintf "%s\\n" "$@"\n')
    (checkout.parent / "bin" / "nproc").unlink()
    script(checkout.parent / "bin" / "nproc", '#!/bin/sh\necho "${OMP_NUM_THREADS:-12}"\n')
    return checkout


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, ""),
        ({"HOROVOD_LOCAL_SIZE": "4"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, 2),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
        ({"HOROVOD_LOCAL_SIZE": "4", "OMP_NUM_THREADS": "7"}, 7),
    ],
)
def test_config_divides_the_cores_among_the_processes_of_a_host(echoing, environ, threads):
    done = run(echoing, "bash", echoing / "config.sh", **environ)
    assert done.stdout.splitlines()[0] == f"threads {threads}", done.stderr


def test_config_runs_the_recipe_from_any_folder_and_puts_given_flags_last(echoing):
    done = run(echoing, "bash", echoing / "config.sh", "--lr", "0.2", "--rec", "with space", DATASET="emore")
    words = done.stdout.splitlines()[1:]
    assert words[:2] == [str(echoing / "train.py"), "face"]
    assert words[words.index("--dataset") + 1] == "emore"
    assert words[-4:] == ["--lr", "0.2", "--rec", "with space"]
    # Another recipe has other data, and gets no more than is said.
    done = run(echoing, "bash", echoing / "config.sh", "--save-dir", "x", RECIPE="kinetics")
    assert done.stdout.splitlines()[2:] == ["kinetics", "--save-dir", "x"]


@pytest.mark.parametrize("given", ["--rec photos", "--rec=photos", "--dataset emore", "--dataset=emore", "--config=x"])
def test_config_adds_the_demo_only_where_nothing_says_what_to_train_on(echoing, given):
    def words(*flags: str, **environ: str) -> list[str]:
        return run(echoing, "bash", echoing / "config.sh", *flags, **environ).stdout.splitlines()[2:]

    demo = ["face", "--dataset", "glyphs", "--rec", str(echoing / "demo" / "glyphs")]
    assert words("--max-steps", "2", *given.split()) == ["face", "--max-steps", "2", *given.split()]
    assert words("--recipe-version", "x") == [*demo, "--recipe-version", "x"]
    assert words(REC="photos") == ["face", "--rec", "photos"]


@pytest.fixture
def mpirun(checkout: Path) -> Path:
    script(checkout.parent / "bin" / "mpirun", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    return checkout


def test_run_starts_one_process_per_slot(mpirun):
    hosts = mpirun / "hosts" / "mine"
    hosts.write_text("# two of them\n10.0.0.1 slots=3\n\n10.0.0.2 slots=2\n10.0.0.3\n")
    words = run(mpirun, "bash", mpirun / "run.sh", hosts, "--lr", "0.2").stdout.splitlines()
    assert words[words.index("-np") + 1] == "6"
    assert words[words.index("--host") + 1] == "10.0.0.1:3,10.0.0.2:2,10.0.0.3:1"
    assert words[-4:] == ["bash", str(mpirun / "config.sh"), "--lr", "0.2"]


def test_run_takes_the_local_host_file_by_default_and_passes_the_environment(mpirun):
    done = run(mpirun, "bash", mpirun / "run.sh", "--lr", "1", NCCL_DEBUG="INFO", NETWORK_INTERFACE="eth7", SECRET="x")
    words = done.stdout.splitlines()
    assert words[words.index("-np") + 1] == "2"
    assert "NCCL_DEBUG" in words
    assert words[words.index("btl_tcp_if_include") + 1] == "eth7"
    assert "SECRET" not in words
    assert "LD_LIBRARY_PATH" not in words, "mpirun warns about a variable that is not set"
