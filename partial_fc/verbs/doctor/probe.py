"""The probe of `partial-fc doctor env`, run on each host: reports facts.

    python -m partial_fc.verbs.doctor.probe <<<'{"checkout": PATH, "models_root": PATH}'

The answer is a line of JSON after MARK.
"""

import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

from partial_fc import recipe_table
from partial_fc.memory import available_memory_bytes

# Precedes the answer: login scripts may print before it.
MARK = "partial-fc doctor: "

_PACKAGES = ("torch", "numpy", "horovod", *recipe_table.PACKAGES, "opencv-python-headless", "safetensors")


def facts(checkout: str, models_root: str) -> dict[str, Any]:
    """Returns this host's facts for a run."""
    folder = next(p for p in (Path(models_root), *Path(models_root).absolute().parents) if p.exists())
    return {
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "checkout": _digest(Path(checkout)),
        "horovod": _horovod(),
        "torch": _torch(),
        "gpus": _output(["nvidia-smi", "--list-gpus"]).splitlines(),
        "mpirun": _output(["mpirun", "--version"]).partition("\n")[0],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": available_memory_bytes(),
        "shm_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "disk": {
            "path": str(folder),
            "free_bytes": shutil.disk_usage(folder).free,
            "writable": os.access(folder, os.W_OK | os.X_OK),
        },
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "own_address": _address(socket.gethostname()),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _digest(checkout: Path) -> str:
    """Returns a checksum of a run's sources; "" without them."""
    files = [checkout / "train.py", checkout / "config.sh"]
    files += [path for folder in ("partial_fc", "recipes") for path in (checkout / folder).rglob("*.py")]
    sources = sorted((str(path.relative_to(checkout)), path) for path in files if path.is_file())
    digest = hashlib.sha256()
    for name, path in sources:
        digest.update(f"{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12] if sources else ""


def _horovod() -> dict[str, Any]:
    """Returns Horovod's build options. `frameworks`: by its files, since loading one takes seconds."""
    spec = util.find_spec("horovod")
    if spec is None or not spec.origin:
        return {"error": "not installed"}
    folder = Path(spec.origin).parent
    frameworks = [name for name in ("torch", *recipe_table.PACKAGES) if any((folder / name).glob("mpi_lib*.so"))]
    try:
        import horovod.torch as hvd
    except Exception as error:  # a missing library, another version ...: any message is the finding
        return {"error": f"{type(error).__name__}: {error}", "frameworks": frameworks}
    built = {"gloo": hvd.gloo_built(), "mpi": hvd.mpi_built(), "nccl": hvd.nccl_built()}
    return {"frameworks": frameworks, "built": [name for name, is_built in built.items() if is_built]}


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    usable = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda or "",
        "gpus": torch.cuda.device_count() if usable else 0,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable else "",
    }


def _output(command: list[str]) -> str:
    """Returns a command's output; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


if __name__ == "__main__":
    print(MARK + json.dumps(facts(**json.load(sys.stdin))), flush=True)
    os._exit(0)  # probed libraries need no cleanup, and some crash in it
