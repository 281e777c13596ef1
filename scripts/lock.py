"""Writes lock/: what set-up installs, each version with the SHA-256 of every file that its index has of it.

    .venv/bin/python scripts/lock.py                        after a change of constraints.txt or setup.cfg: `make lock`
    .venv/bin/python scripts/lock.py --torch 2.13.0+cu126 --index-url URL      one more build of PyTorch, from its index

Versions are those of constraints.txt; what that does not name (PyTorch's CUDA libraries) is resolved by uv, for all
Pythons from 3.11 and all platforms at once. A file is believed once, here; from then on it is the same one everywhere.

base        what PyTorch imports, and what Horovod's build wants
torch-V     PyTorch V and the CUDA libraries that it names. torch-2.13.0 is the registry's, for CUDA 13.0
trainer     what the command partial-fc and the demo import, and no more: `make setup`
more        what else setup.cfg's extras name, for the tests too: `make setup-all`
mxnet, horovod    MXNet and what it needs but numpy, Horovod's sources
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "lock"
# Of scripts/setup.sh.
TRAINER = ("train", "glyphs")
ALL = (*TRAINER, "digits", "export", "redis", "video", "dev")
FOR_HOROVOD = ("setuptools", "wheel", "numpy", "cffi", "cloudpickle", "packaging", "psutil", "pyyaml")
FOR_MXNET = ("graphviz", "requests")
# Name -> its entry: the requirement, a marker where it has one, and a line for each file.
Entries = dict[str, str]


def resolve(requirements: Iterable[str], *options: str) -> Entries:
    """All that the requirements want, by uv."""
    command = ["uv", "pip", "compile", "-", *options, "--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-annotate", "--no-header", "--quiet"]
    command += ["--constraints", str(ROOT / "constraints.txt")]
    try:
        done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("lock.py needs uv: `.venv/bin/python -m pip install uv`, or any on the PATH")
    if done.returncode:
        sys.exit(f"lock.py: uv could not resolve that:\n{done.stderr}")
    # Two versions of one package, for two Pythons, are two entries of one name.
    found: Entries = {}
    for entry in re.split(r"\n(?=\S)", done.stdout.strip()):
        name = entry.partition("==")[0]
        found[name] = f"{found[name]}\n{entry}" if name in found else entry
    return found


def versions() -> list[str]:
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def version(name: str) -> str:
    return next(line for line in versions() if line.startswith(f"{name}=="))


def wanted(extras: Iterable[str] = ALL) -> list[str]:
    """What setup.cfg asks for, with these extras."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    for extra in extras:
        lines += setup["options.extras_require"][extra].splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def write(name: str, entries: Entries) -> None:
    if bare := [key for key, entry in entries.items() if "--hash=sha256:" not in entry]:
        sys.exit(f"lock.py: the index gives no hash of {', '.join(bare)}")
    text = "# Written by scripts/lock.py, which says what is where.\n"
    (LOCK / f"{name}.txt").write_text(text + "".join(f"{entries[key]}\n" for key in sorted(entries)))
    print(f"lock/{name}.txt: {len(entries)} packages, {sum(entry.count('--hash') for entry in entries.values())} files")


def for_cuda(entries: Entries) -> Entries:
    return {name: entry for name, entry in entries.items() if name.startswith(("nvidia-", "cuda-", "triton"))}


def less(entries: Entries, *others: Entries) -> Entries:
    return {name: entry for name, entry in entries.items() if not any(name in other for other in others)}


def write_all() -> None:
    torch = resolve([version("torch")])
    cuda = for_cuda(torch) | {"torch": torch["torch"]}
    base = less(torch, cuda) | resolve(FOR_HOROVOD)
    without = {name: entry for name, entry in cuda.items() if name != "triton"}
    more = less(resolve(wanted()), base, without)
    names = resolve(wanted(TRAINER))
    trainer = {name: entry for name, entry in more.items() if name in names and name not in cuda}
    write("base", base)
    write(version("torch").replace("==", "-"), cuda)
    write("trainer", trainer)
    write("more", less(more, trainer))
    write("mxnet", less(resolve(FOR_MXNET), base) | resolve([version("mxnet")], "--no-deps"))
    write("horovod", resolve([version("horovod")], "--no-deps"))


def write_torch(build: str, index: str) -> None:
    """Of another build. Its own index has copies of what it needs, too; those are taken from pip's."""
    torch = resolve([f"torch=={build}"], "--index", index, "--index-strategy", "unsafe-best-match")
    write(f"torch-{build}", for_cuda(torch) | {"torch": torch["torch"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", metavar="VERSION", help="write only this build of PyTorch, for example 2.13.0+cu126")
    parser.add_argument("--index-url", metavar="URL", help="pip's index of that build")
    options = parser.parse_args()
    if bool(options.torch) != bool(options.index_url):
        parser.error("--torch and --index-url go together")
    LOCK.mkdir(exist_ok=True)
    if options.torch:
        write_torch(options.torch, options.index_url)
    else:
        write_all()


if __name__ == "__main__":
    main()
