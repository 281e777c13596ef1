"""Compiles head.cpp into the user's cache at first use, for one instruction set.

`python partial_fc/head/native/build.py [VARIANT ...]` does it for those (`all`: for an image that many machines run;
`runnable`: for the tests), or for those that the head takes on this processor, as `make setup` does.
Each variant is a library of its own, since a function that the linker shares between objects would be taken from one
of them, and perhaps from one that this processor cannot run.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from partial_fc.files import in_cache

HERE = Path(__file__).parent
_log = logging.getLogger("partial_fc")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-math-errno"]
FLAGS += ["-Wall", "-Wextra", "-Wno-psabi"]
# More of the compiler's, such as -fsanitize=address,undefined; a library of other flags has another name.
FLAGS += os.environ.get("PARTIAL_FC_KERNEL_FLAGS", "").split()
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
# The emulated ones are for tests: what amx computes, on processors without it. They are never chosen.
VARIANTS: dict[str, list[str]] = {"portable": [], "amx_emulated": ["-DEMULATE_TILES"]}
if platform.machine() == "x86_64":
    VARIANTS |= {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": _AVX512,
        "avx512_bf16": [*_AVX512, "-mavx512bf16"],
        "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],  # GCC 11 or later
        "amx_emulated_avx512": [*_AVX512, "-mavx512bf16", "-DEMULATE_TILES"],
    }


def runnable() -> list[str]:
    """Returns the variants whose instructions this processor has; all where /proc/cpuinfo does not list them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    listed = next((line for line in lines if line.startswith("flags")), None)
    if listed is None:
        return list(VARIANTS)
    has = {"-m" + word.replace("_", "-" if word.startswith("amx_") else "") for word in listed.split()}
    return [variant for variant, flags in VARIANTS.items() if {f for f in flags if f.startswith("-m")} <= has]


def taken() -> list[str]:
    """Returns the variants that kernels/cpu.py loads to choose one, and that one."""
    best = [variant for variant in runnable() if "emulated" not in variant][-1]
    return {"avx2": ["avx2"], "amx": ["portable", "avx512_bf16", "amx"]}.get(best, ["portable", best])


class CompilerNotFoundError(ValueError):
    """No library of a variant exists on this machine, and no compiler that works."""


def library(variant: str) -> Path:
    """Returns the path of a variant's library in the user's cache (the package's folder may be read-only). Its name has
    a hash of sources and flags."""
    digest = hashlib.sha256(" ".join(FLAGS + VARIANTS[variant]).encode())
    for source in sorted((*HERE.glob("*.h"), *HERE.glob("*.cpp"))):
        digest.update(source.read_bytes())
    return in_cache("kernels", f"{variant}-{digest.hexdigest()[:16]}.so")


def build(variants: Iterable[str] = tuple(VARIANTS)) -> None:
    """Compiles the missing variants. Raises CompilerNotFoundError without g++, RuntimeError with the compiler's
    message, OSError where the folder cannot be written."""
    missing = [variant for variant in variants if not _is_whole(library(variant))]
    if not missing:
        return
    with open(library(missing[0]).with_name("lock"), "w") as lock:
        # All ranks of a host come here at once: the first compiles, the others wait and find that it is done.
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [variant for variant in missing if not _is_whole(library(variant))]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_compile, missing))


def _is_whole(path: Path) -> bool:
    """Whether a library is there, and ends behind its section headers, its last part: to load one that a power cut has
    shortened may end the process (SIGBUS)."""
    try:
        with path.open("rb") as file:
            header, size = file.read(64), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    (begin,), (entry_bytes, entries) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return size >= begin + entry_bytes * entries


def _compile(variant: str, path: Path | None = None) -> None:
    """Compiles a variant. path: of the library, if not in the cache."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise CompilerNotFoundError(
            f"the head's C++ kernel is not compiled on this machine, and there is no {compiler} to do it: install it "
            "(Debian: `apt-get install g++`; CXX names another compiler), or take impl 'plain', which needs none and "
            "is slower"
        )
    path = path or library(variant)
    # The name is this process' own: hosts that share the folder need not share the lock.
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    command = [compiler, *FLAGS, *VARIANTS[variant], str(HERE / "head.cpp"), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        partial.unlink(missing_ok=True)
        raise RuntimeError(f"the head's C++ kernel cannot be compiled: {' '.join(command)} said\n{done.stderr}")
    with partial.open("rb") as file:
        os.fsync(file.fileno())  # else a power cut may leave its name to a file without contents
    partial.replace(path)


def load_library(variant: str) -> ctypes.CDLL:
    """Loads the library of a variant; compiles it if it is missing, and once more if it cannot be loaded. Where the
    cache does not allow it (full, mounted noexec), it is compiled in a temporary folder. Raises
    CompilerNotFoundError."""
    try:
        return _load(variant)
    except (RuntimeError, OSError) as error:
        problem = f"the head's C++ kernel cannot be made in the cache ({_last_line(error)})"
    try:
        with tempfile.TemporaryDirectory(prefix="partial-fc-") as folder:  # a library that is loaded needs no name
            _compile(variant, path := Path(folder, f"{variant}.so"))
            found = ctypes.CDLL(str(path))
    except (RuntimeError, OSError) as error:
        raise CompilerNotFoundError(f"{problem}, nor in {tempfile.gettempdir()} ({_last_line(error)})") from error
    _log.warning(f"{problem}, and was compiled for this process alone; XDG_CACHE_HOME names another cache")
    return found


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _load(variant: str) -> ctypes.CDLL:
    build([variant])
    path = library(variant)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning(f"{path} cannot be loaded ({error}): it is compiled again")
    _compile(variant)
    return ctypes.CDLL(str(path))


if __name__ == "__main__":
    try:
        named = {"all": [*VARIANTS], "runnable": runnable()}
        build([name for word in sys.argv[1:] for name in named.get(word, [word])] or taken())
    except (CompilerNotFoundError, RuntimeError, OSError) as error:
        sys.exit(str(error))
