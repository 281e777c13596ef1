"""Fault injection at seeded moments: kills processes of a run, here or over ssh, or runs a user's command."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any, TextIO

from partial_fc.comm.launch.hosts import Host, HostError

from . import victims

_ANSWER_S = 20.0
_GONE_S = 30.0


class Faults:
    """The faults of a run, and their moments. counts: how often each kind has happened."""

    def __init__(
        self, hosts: Sequence[Host], folder: str, kinds: Sequence[str], command: str | None, random: Random,
        mtbf_s: float | None, mean_steps: float | None, events: TextIO,
    ):  # fmt: skip
        self.counts: dict[str, int] = {}
        self._hosts = hosts
        self._folder = folder
        self._kinds = [*kinds, *(["command"] if command else [])]
        self._command = command
        self._random = random
        self._mtbf_s = mtbf_s
        self._mean_steps = mean_steps
        self._events = events
        self._launcher = 0
        self._began = time.monotonic()
        self._running: subprocess.Popen[bytes] | None = None
        self._due = 0.0
        self._next(0)

    def started(self, launcher: int, step: int) -> None:
        """Records that the command runs, as this process."""
        self._launcher = launcher
        self.note(f"the command was started, process {launcher}", step)

    def strike(self, step: int) -> bool:
        """Injects the faults that are due; returns whether there were any."""
        now = time.monotonic() if self._mtbf_s else step
        if now < self._due:
            return False
        kind = self._random.choice(self._kinds)
        # Drawn even without a victim: the moments depend on the seed alone.
        chosen = self._random.random()
        done = self._strike(kind, chosen, step)
        if done or self._mtbf_s:
            self._next(step)
        if done:
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return done

    def note(self, what: str, step: int) -> None:
        at = round(time.monotonic() - self._began, 3)
        self._events.write(json.dumps({"at_s": at, "step": step, "what": what}) + "\n")
        self._events.flush()

    def wait_until_gone(self, step: int) -> None:
        """Waits some seconds for processes left after the command's end, then kills them."""
        give_up = time.monotonic() + _GONE_S
        while left := {(host, pid) for host in self._hosts for pid in self._processes(host)}:
            if time.monotonic() > give_up:
                self.note(f"{len(left)} processes were left {_GONE_S:.0f} s after the command's end, and killed", step)
                self.counts["processes left"] = self.counts.get("processes left", 0) + len(left)
                for host in self._hosts:
                    self._kill(host, [pid for one, pid in left if one == host])
            time.sleep(0.1)

    def end(self) -> None:
        if self._running is not None:
            self._running.wait()

    def _next(self, step: int) -> None:
        mean = self._mtbf_s or self._mean_steps
        assert mean is not None
        wait = self._random.expovariate(1 / mean)
        self._due = time.monotonic() + wait if self._mtbf_s else step + max(1, round(wait))

    def _strike(self, kind: str, chosen: float, step: int) -> bool:
        if kind == "command":
            return self._run_command(step)
        if kind == "launcher":
            with suppress(ProcessLookupError):
                os.kill(self._launcher, signal.SIGKILL)
            self.note(f"killed the launcher, process {self._launcher}", step)
            return True
        ranks = [(host, pid) for host in self._hosts for pid, rank in self._processes(host).items() if rank]
        if not ranks:
            if self._mtbf_s:
                self.note(f"no rank runs that a {kind} fault could hit", step)
            return False
        host, pid = ranks[int(chosen * len(ranks))]
        pids = [pid] if kind == "rank" else [one for at, one in ranks if at == host]
        killed = self._kill(host, pids)
        self.note(f"killed {kind}: {', '.join(map(str, killed)) or 'it was gone already'} on {host.name}", step)
        return bool(killed)

    def _run_command(self, step: int) -> bool:
        if self._running is not None and self._running.poll() is None:
            self.note("the fault command still runs: not started again", step)
            return False
        assert self._command is not None
        self.note(f"ran {self._command}", step)
        self._running = subprocess.Popen(["sh", "-c", self._command], stdin=subprocess.DEVNULL)
        return True

    def _processes(self, host: Host) -> dict[int, bool]:
        return {int(pid): rank for pid, rank in (self._ask(host, []) or {}).items()}

    def _kill(self, host: Host, pids: Sequence[int]) -> list[int]:
        return self._ask(host, [str(pid) for pid in pids]) or [] if pids else []

    def _ask(self, host: Host, words: list[str]) -> Any:
        """Returns the victims module's answer there; None without one, which is noted."""
        if host.is_here:
            numbers = [int(word) for word in words]
            return victims.kill(self._folder, numbers) if numbers else victims.processes(self._folder)
        try:
            return host.run_module("tests.faults.torture.victims", [self._folder, *words], victims.MARK, _ANSWER_S)
        except HostError as error:
            self.note(f"{host.name}: {error}", -1)
            return None
