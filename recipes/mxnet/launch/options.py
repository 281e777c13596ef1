"""The flags of `partial-fc launch`, those of MXNet's tools/launch.py, and the split between them and COMMAND."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc import recipe_table
from partial_fc.flags.facts import PROCESSES, In, check_numbers

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables of a process's role: set by the launcher only.
OURS = frozenset(
    (
        *("DMLC_ROLE", "DMLC_TASK_ID", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_JOB_CLUSTER"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    )
)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Starts COMMAND as the scheduler, the servers and the workers of an MXNet job, on the hosts of a file; the flags
    are those of MXNet's tools/launch.py. When a process fails, all end, its name, host and status are printed, and its
    status (128 + n for signal n) is that of the job.

    partial-fc launch -n 2 --launcher local python train.py mnist --engine mxnet --kv-store dist_sync
    partial-fc launch -n 2 -s 1 -H hosts python train.py mnist --engine mxnet --kv-store dist_async        (over ssh)
    partial-fc launch -n 8 -s 0 -H hosts python train.py face --rec DIR                                    (torch)

    A line of the host file is `host`, `host:port` (sshd's) or `host slots=N` (workers there, at most). Servers come
    first, then workers, round robin; the scheduler runs here. With -s 0 there are no servers: COMMAND is a torch job,
    and its processes get RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as from torchrun.
    Ctrl-C and SIGTERM reach the workers, wherever they are. docs/recipes/mxnet.md has more."""

    num_workers: Annotated[int, In(PROCESSES), tyro.conf.arg(aliases=["-n"])]
    """Number of workers."""
    num_servers: Annotated[int | None, In("[0, 65536]"), tyro.conf.arg(aliases=["-s"])] = None
    """Servers. none: as many as workers; 0 where COMMAND is one of our recipes (`train.py RECIPE`, `partial-fc train
    RECIPE`) without --engine mxnet. 0: neither servers nor a scheduler."""
    hostfile: Annotated[Path | None, tyro.conf.arg(aliases=["-H"])] = None
    """The host file; required by ssh and mpi."""
    launcher: Literal["local", "ssh", "mpi"] = "ssh"
    """local: all here. mpi: through mpirun."""
    sync_dst_dir: str | None = None
    """Copy the current folder there on all hosts (rsync), and run in it. none: the hosts share the current folder."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE, or NAME for the value that it has here; for all processes. May be repeated."""
    env_server: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME:VALUE (or NAME=VALUE), for servers only. May be repeated."""
    env_worker: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME:VALUE (or NAME=VALUE), for workers only. May be repeated."""
    p3: bool = False
    """Priority-based propagation of parameters (MXNet's P3 store, with --kv-store dist_sync)."""
    dry_run: bool = False
    """Print what would be started, and start nothing."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.launcher != "local" and self.hostfile is None:
            default = "" if self.launcher == "mpi" else " (the default, as launch.py's)"
            raise ValueError(
                f"--launcher {self.launcher}{default} needs -H HOSTFILE, a line for each host; or --launcher local"
            )
        if self.launcher == "local" and self.hostfile is not None:
            raise ValueError(f"-H {self.hostfile} goes with --launcher ssh and mpi, not with local")
        if self.launcher == "local" and self.sync_dst_dir is not None:
            raise ValueError("--sync-dst-dir goes with --launcher ssh and mpi, not with local")
        if self.sync_dst_dir is not None and not self.sync_dst_dir.startswith("/"):
            raise ValueError(f"--sync-dst-dir {self.sync_dst_dir}: expected a path that begins with /")

    def servers(self, command: Sequence[str]) -> int:
        """Returns the number of servers. Raises ValueError for servers that COMMAND does not use."""
        recipe = torch_recipe(command)
        if recipe and self.num_servers:
            raise ValueError(
                f"-s {self.num_servers}, but recipe {recipe} on torch uses no servers: omit -s, or add "
                "--engine mxnet where the recipe has it"
            )
        if recipe or self.num_servers == 0:
            for name, given in (("--p3", self.p3), ("--env-server", self.env_server)):
                if given:
                    raise ValueError(f"{name} applies to servers, and this job has none")
            return 0
        return self.num_workers if self.num_servers is None else self.num_servers

    def variables(self, environ: Mapping[str, str] = os.environ) -> dict[str, dict[str, str]]:
        """Returns the variables given by flags: "" -> for all, "server", "worker" -> for those. Raises ValueError."""
        found = {
            "": dict(_pair("--env", text, "=", environ) for text in self.env),
            "server": dict(_pair("--env-server", text, ":=", None) for text in self.env_server),
            "worker": dict(_pair("--env-worker", text, ":=", None) for text in self.env_worker),
        }
        if self.p3:
            found[""] = {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10", **found[""]}
        return found


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (flags, COMMAND), which begins with the first word that is neither a flag nor its value, or after --."""
    switches = {field.name for field in dataclasses.fields(LaunchOptions) if field.type in (bool, "bool")}
    flags: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word[1:2] in ("n", "s", "H") and len(word) > 2:
            flags += [word[:2], word[2:].removeprefix("=")]  # -n2
            continue
        flags.append(word)
        name = word.lstrip("-").replace("-", "_").removeprefix("no_")
        if rest and "=" not in word and name not in (*switches, "h", "help"):
            flags.append(rest.pop(0))
    return flags, rest


def torch_recipe(command: Sequence[str]) -> str:
    """Returns our recipe that COMMAND trains on torch; "" for another program or with MXNet."""
    text = " ".join(command).replace("--engine=", "--engine ")
    if "--engine mxnet" in text:
        return ""
    for at, word in enumerate(command[:-1]):
        program = command[at - 1] if at and word == "train" else ""
        ours = os.path.basename(word) == "train.py" or os.path.basename(program) in ("partial-fc", "partial_fc")
        if ours and command[at + 1] in recipe_table.RECIPES:
            return command[at + 1]
    return ""


def _pair(flag: str, text: str, marks: str, environ: Mapping[str, str] | None) -> tuple[str, str]:
    at = min((text.index(mark) for mark in marks if mark in text), default=len(text))
    name, value = text[:at], text[at + 1 :]
    form = "NAME=VALUE or NAME" if environ is not None else "NAME:VALUE"
    if not _VARIABLE.fullmatch(name) or (at == len(text) and environ is None):
        raise ValueError(f"{flag} {text}: expected {form}")
    if name in OURS:
        raise ValueError(f"{flag} {text}: {name} identifies a process and is set by the launcher")
    if at == len(text) and environ is not None:
        if name not in environ:
            raise ValueError(f"{flag} {name}: it is not set here; export it, or write {name}=VALUE")
        value = environ[name]
    return name, value
