"""Compiles head.cpp for every instruction set that it knows: `python -m partial_fc.head.kernels.native.build`.

`make setup` runs it. Each variant is a library of its own, since a function that the linker shares between objects
would be taken from one of them, and perhaps from one that this processor cannot run.
"""

import hashlib
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]
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


def library(variant: str) -> Path:
    """Where a variant's library is, or will be: its name holds a hash of what it is made of."""
    digest = hashlib.sha256(" ".join(FLAGS + VARIANTS[variant]).encode())
    for source in sorted((*HERE.glob("*.h"), *HERE.glob("*.cpp"))):
        digest.update(source.read_bytes())
    return HERE / "build" / f"{variant}-{digest.hexdigest()[:16]}.so"


def build() -> None:
    """Compiles what is not there yet; removes what earlier sources left. RuntimeError with the compiler's words."""
    wanted = {library(variant): flags for variant, flags in VARIANTS.items()}
    missing = {path: flags for path, flags in wanted.items() if not path.exists()}
    (HERE / "build").mkdir(exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(_compile, missing.keys(), missing.values()))
    for old in (HERE / "build").glob("*.so"):
        if old not in wanted:
            old.unlink()


def _compile(path: Path, flags: list[str]) -> None:
    partial = path.with_suffix(".partial")
    command = ["g++", *FLAGS, *flags, str(HERE / "head.cpp"), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    partial.replace(path)


if __name__ == "__main__":
    try:
        build()
    except (RuntimeError, FileNotFoundError) as error:
        sys.exit(f"the head's CPU kernels could not be built (is g++ installed?): {error}")
