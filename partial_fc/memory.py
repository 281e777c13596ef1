"""What a process can take of its machine or container: memory, cores, GPUs; allocator settings. Needs no torch."""

import contextlib
import ctypes
import math
import os
import platform
import re
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# mallopt(3): number of the parameter, the environment's name for it, value.
_MALLOC = (
    (-1, "MALLOC_TRIM_THRESHOLD_", 2**31 - 1),
    (-2, "MALLOC_TOP_PAD_", 2**26),
    (-3, "MALLOC_MMAP_THRESHOLD_", 2**30),
)


def keep_freed() -> None:
    """Makes the C library keep the memory that this process frees, for its next allocations. A step on a CPU allocates
    the same large tensors as the one before; glibc would return each to the kernel and have it cleared anew, 14 to 25 %
    of the demo's time. Settings in the environment take precedence; other C libraries are not changed."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for number, name, value in _MALLOC:
        if name not in os.environ and not libc.mallopt(number, value):
            warnings.warn(f"glibc's mallopt refuses {name}={value}: training takes longer", stacklevel=2)


def give_back_freed() -> None:
    """Gives the memory kept by `keep_freed` back to the system, between two steps that of the activations."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


# Errors of torch's allocators, RuntimeErrors: DefaultCPUAllocator: can't allocate memory; CUDA out of memory.
_REFUSED = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns torch's out-of-memory errors in the block into MemoryError, which Python and numpy raise."""
    try:
        yield
    except RuntimeError as error:
        if not _REFUSED.search(str(error)):
            raise
        raise MemoryError(str(error).splitlines()[0]) from error


def available_memory_bytes(proc: Path = Path("/proc/self")) -> int:
    """Returns the memory that this process can take without swapping or being killed: what the machine has free, and at
    most what each of its memory cgroups has left (a container, a job of SLURM or Kubernetes)."""
    return max(0, min([_free_on_machine_bytes(), *_cgroup_bytes_left(proc)]))


def _free_on_machine_bytes() -> int:
    found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found, "/proc/meminfo has no MemAvailable; Linux has it since 3.14"
    return int(found[1]) * 1024


def _cgroup_bytes_left(proc: Path) -> Iterator[int]:
    """Yields the bytes left in each memory cgroup of the process, and in those above. Pages of files not used lately
    count as free: the kernel reclaims them."""
    for group, is_v2 in _cgroups(proc, "memory"):
        limit_file, usage_file, inactive_files = _V2 if is_v2 else _V1
        limit, usage, stat = (_read(group / name) for name in (limit_file, usage_file, "memory.stat"))
        if limit.isdigit() and usage.isdigit():
            files = re.search(rf"^{inactive_files} (\d+)$", stat, re.MULTILINE)
            yield int(limit) - int(usage) + (int(files[1]) if files else 0)


def cores_allowed(proc: Path = Path("/proc/self")) -> float:
    """Returns how many cores' time the cgroups of this process allow (v1 and v2); inf: any."""
    allowed = math.inf
    for group, is_v2 in _cgroups(proc, "cpu"):
        files = ["cpu.max"] if is_v2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        quota, *period = " ".join(_read(group / name) for name in files).split() or [""]
        if quota.isdigit() and period:  # neither "max" nor -1
            allowed = min(allowed, int(quota) / int(period[0]))
    return allowed


def may_have_gpu(dev: Path = Path("/dev")) -> bool:
    """Returns False where torch finds no GPU: of a build for CPUs, where all are hidden or no driver (NVIDIA's, WSL's,
    Jetson's, AMD's) has a device."""
    there = any((dev / name).exists() for name in ("nvidiactl", "dxg", "nvmap", "kfd"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return there and not hidden and not metadata.version("torch").endswith("+cpu")


# Of a memory cgroup, v1 and v2: the files of its limit and its usage, and a line of its memory.stat (man 7 cgroups).
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _cgroups(proc: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields (folder, whether it is v2's) of the process's cgroups of a controller, and of those above (man 5 proc)."""
    # By controller; v2 has one path for all of them, after an empty name.
    paths: dict[str, Path] = {}
    for line in _read(proc / "cgroup").splitlines():
        _, controllers, below = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), Path(below))
    for line in _read(proc / "mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(maxsplit=2)
        is_v2 = kind == "cgroup2"
        path = paths.get("" if is_v2 else controller)
        if path is None or not (is_v2 or (kind == "cgroup" and controller in options.split(","))):
            continue
        # A container sees its own cgroup at the mount point, whose path outside is the mount's root.
        root, top = (Path(field.replace("\\040", " ")) for field in mount.split()[3:5])
        within = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else Path()
        for group in (top / within, *(top / within).parents):
            yield group, is_v2
            if group == top:
                break


def _read(path: Path) -> str:
    """Returns a file of the kernel; "" if it is missing or unreadable."""
    try:
        return path.read_text().strip()
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return ""
