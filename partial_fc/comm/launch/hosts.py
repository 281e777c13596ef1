"""The hosts of a run, and how our modules run on them: here directly, elsewhere over ssh."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partial_fc.comm.launch import addresses
from partial_fc.files import read_text

ROOT = Path(__file__).parents[3]
"""The folder of the package, on all hosts."""

# A host's DNS name has at most 253 letters. Slots or a port: int() of 5,000 digits is an error.
NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,252}")
COUNT = re.compile(r"[0-9]{1,6}")
HOST_FILE_BYTES = 16 << 20


class HostError(RuntimeError):
    """A host did not answer as expected; contains its output."""


@dataclass(frozen=True)
class Host:
    """A host. name: as given to the launchers. slots: processes there, 0: unspecified."""

    name: str
    slots: int = 0
    ssh_port: int | None = None

    @property
    def is_here(self) -> bool:
        """Tells whether it is this machine, which needs no ssh."""
        if self.name in ("", "localhost", socket.gethostname()):
            return True
        try:
            address = socket.gethostbyname(self.name)
        except OSError:
            return False
        return addresses.is_local(address)

    def command(self, words: Sequence[str], timeout_s: float) -> list[str]:
        """Returns the command that runs `words` there non-interactively."""
        if self.is_here:
            return list(words)
        port = ["-p", str(self.ssh_port)] if self.ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(timeout_s))}"]
        return ["ssh", *options, *port, "--", self.name, shlex.join(words)]

    def check_ssh(self, timeout_s: float) -> None:
        """Checks that ssh works. Raises HostError."""
        self._run(["true"], "", timeout_s, grace_s=2)  # ssh's own errors come first

    def run_module(self, module: str, words: Sequence[str], mark: str, timeout_s: float, text: str = "") -> Any:
        """Returns the JSON that one of our modules, with Python and sources at the same path on all hosts, prints there
        after a mark (login scripts may print before it); text: its input. Raises HostError."""
        printed = self._run(["env", "-C", str(ROOT), sys.executable, "-m", module, *words], text, timeout_s)
        for line in printed.splitlines():
            if line.startswith(mark):
                return json.loads(line.removeprefix(mark))
        raise HostError(f"{module} printed {printed[-200:]!r}")

    def _run(self, words: Sequence[str], text: str, timeout_s: float, grace_s: float = 0) -> str:
        command = self.command(words, timeout_s)
        limit_s = timeout_s + grace_s
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise HostError(f"no answer within {limit_s:g} s") from None
        except OSError as error:
            raise HostError(f"{error.strerror}: {error.filename}") from None
        if done.returncode:
            complaint = done.stderr.strip().splitlines()
            raise HostError(complaint[-1] if complaint else f"exit status {done.returncode}")
        return done.stdout


def parse(text: str, ssh_port: int | None = None) -> list[Host]:
    """Parses "a:8,b:8", as horovodrun -H takes it, or a file with lines "a slots=8", in which other words like
    max_slots=8 are ignored. Raises ValueError."""
    is_path = os.path.exists(text) and not os.path.isdir(text)  # Path.exists raises for a name that is too long
    entries = read_text(text, HOST_FILE_BYTES).splitlines() if is_path else text.split(",")
    hosts = []
    for entry in (e.strip() for e in entries):
        if not entry or entry.startswith("#"):
            continue
        first, *rest = entry.partition("#")[0].split()
        name, _, slots = first.partition(":")
        slots = next((word[6:] for word in rest if word.startswith("slots=")), slots)
        right = NAME.fullmatch(name) and (not slots or COUNT.fullmatch(slots))
        if not right or not all("=" in word for word in rest):
            raise ValueError(f"{text}: {entry[:200]!r} is no host; expected a:8,b:8 or a file with lines `a slots=8`")
        hosts.append(Host(name, int(slots or 0), ssh_port))
    names = [host.name for host in hosts]
    if not hosts or len(set(names)) < len(names):
        raise ValueError(f"{text}: expected hosts like a:8,b:8, each once; got {', '.join(names)[:500] or 'none'}")
    return hosts
