"""`partial-fc launch`: parses its command line, prepares the hosts, and starts the processes through the supervisor."""

import functools
import os
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from partial_fc import errors, supervisor, terminal
from partial_fc.comm.launch.hosts import Host
from partial_fc.findings import counted
from partial_fc.flags.command_line import parse

from . import mpi, shell
from .job import Plan, Task, is_secret, plan
from .options import LaunchOptions, split

_PROGRAM = "partial-fc launch"
# sshd accepts ten unauthenticated connections at once (MaxStartups), and then refuses some.
_CROWD, _PAUSE_S = 8, 0.2
# After Ctrl-C a worker waits forever for the others in MXNet's exit.
_INTERRUPT_GRACE_S = 5.0
_MPI_GRACE_S = 15.0  # mpirun takes seconds to end its processes


@dataclass(frozen=True)
class Start:
    """A command behind a shell, here or on another host. leads_to: the host whose processes it starts, for messages."""

    name: str
    host: Host | None
    prepare: list[str]
    command: list[str]
    helper: bool = False
    leads_to: str = field(default_factory=socket.gethostname)
    pause_s: float = 0.0

    def as_command(self) -> supervisor.Command:
        prefix = f"{self.name}: "
        prepare = [*shell.exports(terminal.told(prefix)), *self.prepare]
        script = shell.script(self.command, prepare, far=self.host is not None)
        return supervisor.Command(
            name=self.name,
            words=shell.words(self.name, self.host),
            host=self.host.name if self.host else self.leads_to,
            prefix=prefix,
            helper=self.helper,
            lifeline=shell.lifeline(script),
            beats=self.host is not None,
            pause_s=self.pause_s,
        )

    def __str__(self) -> str:
        where = f"over {shlex.join(shell.words(self.name, self.host)[:-1])}" if self.host else "here"
        lines = [*(_without_secrets(line) for line in self.prepare), shlex.join(self.command)]
        return f"# {self.name}, {where}\n" + "\n".join(f"    {line}" for text in lines for line in text.splitlines())


def launch(arguments: list[str]) -> int:
    """Runs a job to its end; returns the exit status."""
    words, command = split(arguments)
    try:
        options = parse(LaunchOptions, words, _PROGRAM)
        if not command:
            raise ValueError("COMMAND is missing after the flags")
        return run(options, command)
    except (ValueError, OSError) as error:
        errors.report(_PROGRAM, error)
        return 2 if isinstance(error, ValueError) else 1


def run(options: LaunchOptions, command: Sequence[str]) -> int:
    """Runs a job. Raises ValueError for inconsistent flags, host file and COMMAND."""
    if len(command) == 1 and len(command[0].split()) > 1:
        command = ["sh", "-c", command[0]]  # launch.py's ssh passed it to the shells there
    planned = plan(options, command)
    starts = _starts(options, planned, list(command))
    if options.dry_run:
        print("\n".join(map(str, starts)))
        return 0
    if options.sync_dst_dir:
        copy = functools.partial(_copy, folder=options.sync_dst_dir)
        with ThreadPoolExecutor(8) as pool:
            problems = [problem for problem in pool.map(copy, planned.addresses) if problem]
        if problems:
            raise OSError("; ".join(problems))
    print(f"starting {counted(len(starts), 'process')}", file=sys.stderr, flush=True)
    served = any(start.helper for start in starts)
    return supervisor.run(
        [start.as_command() for start in starts],
        failure_grace_s=_MPI_GRACE_S if options.launcher == "mpi" else supervisor.FAILURE_GRACE_S,
        interrupt_grace_s=_INTERRUPT_GRACE_S if served else supervisor.INTERRUPT_GRACE_S,
    )


def _starts(options: LaunchOptions, planned: Plan, command: list[str]) -> list[Start]:
    """Returns the commands that this host starts."""
    if options.launcher != "mpi":
        return _each(options, planned, command)
    mpi.check_open_mpi()
    scheduler = [task for task in planned.tasks if task.role == "scheduler"]
    starts = [Start(task.name, None, task.prepare([], ""), command, helper=True) for task in scheduler]
    by_role = [[task for task in planned.tasks if task.role == role] for role in ("server", "worker")]
    folder = options.sync_dst_dir or os.getcwd()
    return starts + [_mpirun(planned, tasks, command, folder) for tasks in by_role if tasks]


def _each(options: LaunchOptions, planned: Plan, command: list[str]) -> list[Start]:
    """Starts every process from here."""
    starts = []
    num_there: Counter[Host | None] = Counter()
    for task in planned.tasks:
        num_there[task.host] += 1
        # A process on this host is in the right folder, unless that is a copy; the scheduler stays in this one.
        moves = task.host is not None or (options.sync_dst_dir and task.role != "scheduler")
        prepare = task.prepare(list(planned.addresses.values()), (options.sync_dst_dir or os.getcwd()) if moves else "")
        pause_s = _PAUSE_S if task.host is not None and num_there[task.host] > _CROWD else 0.0
        starts.append(Start(task.name, task.host, prepare, command, task.role != "worker", pause_s=pause_s))
    return starts


def _mpirun(planned: Plan, tasks: list[Task], command: list[str], folder: str) -> Start:
    variables, words = mpi.mpirun(planned, tasks, command, folder)
    role = tasks[0].role
    names = ", ".join(dict.fromkeys(task.place.name for task in tasks))
    return Start(f"{role}s", None, shell.exports(variables), words, role == "server", f"{names} (mpirun)")


def _copy(host: Host, folder: str) -> str:
    """Copies the current folder to that path on a host, creating it; returns the error, with the host, or ""."""
    here = host.is_here and host.ssh_port is None
    port = ["-p", str(host.ssh_port)] if host.ssh_port else []
    ssh = ["ssh", *shell.SSH_OPTIONS, *port]
    make = ["mkdir", "-p", "--", folder]
    remote = [] if here else [f"--rsh={shlex.join(ssh)}"]
    target = f"{folder}/" if here else f"{host.name}:{folder}/"
    # -s: the shell there does not parse names. -F: a file .rsync-filter in the folder may exclude files.
    steps = [make if here else [*ssh, "--", host.name, shlex.join(make)], ["rsync", "-azsF", *remote, "./", target]]
    for words in steps:
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        except FileNotFoundError:
            return f"--sync-dst-dir needs {words[0]} on this host: install it"
        if done.returncode:
            complaint = done.stderr.strip().splitlines() or [""]
            return f"--sync-dst-dir {folder}: {words[0]} for {host.name} ended with {done.returncode}: {complaint[0]}"
    return ""


def _without_secrets(line: str) -> str:
    """Removes secrets from a line for the terminal."""
    name = line.removeprefix("export ").partition("=")[0]
    return f"export {name}=..." if line.startswith("export ") and is_secret(name) else line


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
