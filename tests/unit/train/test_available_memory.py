"""Free memory and cores are the container's where it has less than the machine: cgroups v1 and v2."""

import math
from pathlib import Path

import pytest

from partial_fc import memory
from partial_fc.memory import available_memory_bytes, cores_allowed

GB = 10**9
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = "memory.max", "memory.current", "inactive_file"


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A machine with 64 GB free."""
    monkeypatch.setattr(memory, "_free_on_machine_bytes", lambda: 64 * GB)


def group(folder: Path, names: tuple[str, str, str], limit: object, usage: int, inactive: int = 0) -> None:
    """The files of one cgroup."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, usage), strict=False):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"cache 1\n{names[2]} {inactive}\nactive_file 7000000000\n")


def proc(folder: Path, cgroup: str, mountinfo: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(f"22 1 0:5 / /proc rw - proc proc rw\n{mountinfo}\n")
    return folder


def v1(tmp_path: Path, path: str, root: str = "/") -> Path:
    mount = f"35 31 0:32 {root} {tmp_path}/memory rw,relatime - cgroup cgroup rw,memory"
    other = f"36 31 0:33 {root} {tmp_path}/cpu rw,relatime - cgroup cgroup rw,cpu"
    return proc(tmp_path / "proc", f"9:name=systemd:/\n4:memory:{path}\n1:cpu:{path}\n0::/\n", f"{other}\n{mount}")


def v2(tmp_path: Path, path: str, root: str = "/") -> Path:
    mount = f"29 22 0:26 {root} {tmp_path}/unified rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    return proc(tmp_path / "proc", f"0::{path}\n", mount)


def test_without_limits_it_is_the_machines(tmp_path):
    group(tmp_path / "memory", V1, 2**63 - 4096, 10 * GB)
    assert available_memory_bytes(v1(tmp_path, "/")) == 64 * GB
    group(tmp_path / "unified/a", V2, "max", 10 * GB)
    assert available_memory_bytes(v2(tmp_path, "/a")) == 64 * GB
    assert available_memory_bytes(tmp_path / "nothing") == 64 * GB


@pytest.mark.parametrize(("make", "names", "top"), [(v1, V1, "memory"), (v2, V2, "unified")])
def test_the_tightest_of_nested_limits_counts_and_pages_of_files_are_free(tmp_path, make, names, top):
    group(tmp_path / top / "job", names, 8 * GB, 6 * GB, inactive=1 * GB)
    group(tmp_path / top / "job/task", names, 5 * GB, 1 * GB)
    assert available_memory_bytes(make(tmp_path, "/job/task")) == 3 * GB
    group(tmp_path / top / "job/task", names, 5 * GB, 4 * GB, inactive=GB // 2)
    assert available_memory_bytes(make(tmp_path, "/job/task")) == 3 * GB // 2
    group(tmp_path / top / "job/task", names, 5 * GB, 6 * GB)
    assert available_memory_bytes(make(tmp_path, "/job/task")) == 0


@pytest.mark.parametrize(("make", "names", "top"), [(v1, V1, "memory"), (v2, V2, "unified")])
@pytest.mark.parametrize(
    ("path", "root"), [("/docker/ab", "/docker/ab"), ("/", "/"), ("/", "/docker/ab"), ("/../x", "/")]
)
def test_a_container_sees_its_own_limit_at_the_mount_point(tmp_path, make, names, top, path, root):
    group(tmp_path / top, names, 2 * GB, 1 * GB)
    assert available_memory_bytes(make(tmp_path, path, root)) == 1 * GB


@pytest.mark.parametrize(
    ("make", "top", "limits", "cores"),
    [
        (v2, "unified", {"cpu.max": "150000 100000"}, 1.5),
        (v2, "unified", {"cpu.max": "max 100000"}, math.inf),
        (v1, "cpu", {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000}, 3),
        (v1, "cpu", {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}, math.inf),
    ],
)
def test_the_cores_are_those_of_the_tightest_quota(tmp_path, make, top, limits, cores):
    (tmp_path / top / "job/task").mkdir(parents=True)
    for name, value in limits.items():
        (tmp_path / top / "job" / name).write_text(f"{value}\n")
    assert cores_allowed(make(tmp_path, "/job/task")) == cores
    assert cores_allowed(make(tmp_path, "/other")) == math.inf
