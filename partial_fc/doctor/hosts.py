"""The hosts of a run, and how the doctor runs its probe on them: here directly, elsewhere over ssh."""

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from partial_fc.doctor import probe

_SOURCE = Path(probe.__file__).read_text()


class Failed(RuntimeError):
    """A host did not answer as expected; says what it said."""


@dataclass(frozen=True)
class Host:
    """name: as the launchers are given it. slots: processes there, 0: not said."""

    name: str
    slots: int = 0
    ssh_port: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, to which the launchers need no ssh."""
        if self.name in ("", "localhost", socket.gethostname()):
            return True
        try:
            address = socket.gethostbyname(self.name)
        except OSError:
            return False
        own = {entry.address for found in psutil.net_if_addrs().values() for entry in found}
        return address in own

    def command(self, words: Sequence[str], timeout_s: float) -> list[str]:
        """What runs `words` there, without ever asking anything."""
        if self.is_here:
            return list(words)
        port = ["-p", str(self.ssh_port)] if self.ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(timeout_s))}"]
        return ["ssh", *options, *port, self.name, shlex.join(words)]

    def check_ssh(self, timeout_s: float) -> None:
        """Raises Failed."""
        self._run(["true"], "", timeout_s, grace_s=2)  # ssh's own words come first

    def ask(self, what: str, values: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """What the probe answers there. Raises Failed."""
        said = self._run(_probe(what, values), _SOURCE, timeout_s)
        return json.loads(_marked(said))

    @contextmanager
    def serving(self, seconds: float) -> Iterator[int]:
        """The port at which the probe answers one `connect` there, within the block. Raises Failed."""
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self.command(_probe("serve", {"seconds": seconds}), seconds),
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            try:
                yield _port(process)
            finally:
                process.kill()

    def _run(self, words: Sequence[str], text: str, timeout_s: float, grace_s: float = 0) -> str:
        command = self.command(words, timeout_s)
        limit_s = timeout_s + grace_s
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"no answer within {limit_s:g} s") from None
        except OSError as error:
            raise Failed(f"{error.strerror}: {error.filename}") from None
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise Failed(said[-1] if said else f"exit status {done.returncode}")
        return done.stdout


def _probe(what: str, values: Mapping[str, Any]) -> list[str]:
    """The Python of this environment, which lies at the same path on all hosts."""
    return [sys.executable, "-I", "-", what, json.dumps(values)]


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_SOURCE)
    process.stdin.close()
    for line in process.stdout:
        if line.startswith(probe.MARK):
            return int(line.removeprefix(probe.MARK))
    raise Failed(f"its end of the transfer ended with status {process.wait()}")


def _marked(said: str) -> str:
    for line in said.splitlines():
        if line.startswith(probe.MARK):
            return line.removeprefix(probe.MARK)
    raise Failed(f"the probe printed {said[-200:]!r}")


def parse(text: str, ssh_port: int | None = None) -> list[Host]:
    """ "a:8,b:8", as horovodrun -H takes it, or a file with lines "a slots=8", in which other words like max_slots=8
    are left aside. Raises ValueError."""
    path = Path(text)
    entries = path.read_text().splitlines() if path.is_file() else text.split(",")
    found = []
    for entry in (e.strip() for e in entries):
        if not entry or entry.startswith("#"):
            continue
        first, *rest = entry.partition("#")[0].split()
        name, _, slots = first.partition(":")
        slots = next((word[6:] for word in rest if word.startswith("slots=")), slots)
        if not name or (slots and not slots.isdecimal()) or not all("=" in word for word in rest):
            raise ValueError(f"{text}: {entry!r} is no host; expected a:8,b:8 or a file with lines `a slots=8`")
        found.append(Host(name, int(slots or 0), ssh_port))
    names = [host.name for host in found]
    if not found or len(set(names)) < len(names):
        raise ValueError(f"{text}: expected hosts like a:8,b:8, each once; got {', '.join(names) or 'none'}")
    return found
