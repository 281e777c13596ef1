"""`python -m tests.faults.torture`: trains undisturbed, then with faults, and compares."""

import json
import os
import random
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import tyro

from partial_fc import errors
from partial_fc.comm.launch import hosts as doctor_hosts
from partial_fc.comm.launch.hosts import Host
from partial_fc.flags.command_line import parse
from partial_fc.flags.facts import PORT, In, check_numbers

from .compare import Comparison, compare
from .faults import Faults
from .watch import Watch

_PROGRAM = "python -m tests.faults.torture"
_POLL_S = 0.02
_MOST_FRUITLESS = 20  # consecutive ends without progress


@dataclass(frozen=True, kw_only=True)
class TortureOptions:
    """Runs COMMAND twice, undisturbed and with processes killed at random moments, until each has ended with status 0,
    and says whether the losses can tell: the same steps, each once, the same samples, losses equal to --tolerance; how
    much of the time went into steps that counted; what happened when. Status 0: nothing can tell. 1: something can.

    python -m tests.faults.torture --folder runs/torture --mtbf 15 -- \\
        python train.py face --gpus 2 --restarts 99 --rec DIR
    python -m tests.faults.torture --folder /shared/torture --mtbf 60 -H hosts/h --kinds rank host -- \\
        bash run.sh hosts/h --rec DIR
    with --max-steps 1000 --checkpoint-every 10 --frequent 1 --precision fp64

    COMMAND is any that takes --models-root as its last flag; FOLDER/undisturbed, then FOLDER/disturbed is given to it.
    It has to go on from its own checkpoints (--checkpoint-every), and to repeat bit by bit: compare with as many
    processes, or in --precision fp64 with --sync-bn. With --frequent 1 every step is compared in all digits, and where
    the data stood; otherwise in loss.csv's nine. When COMMAND itself ends otherwise than with 0, it is started again.
    Killed are only processes of yours that have FOLDER/disturbed on their command line. A rank is what trains; what
    keeps it and starts it again (--restarts) is not."""

    folder: Path
    """Where both runs, output.txt, events.jsonl and torture.json are written; all hosts of COMMAND must see it. An
    undisturbed run that is finished there is not run again."""
    mtbf: Annotated[float | None, In("(0, 1e9]")] = None
    """Mean seconds between two faults (exponential)."""
    mean_steps: Annotated[float | None, In("[1, 1e9]")] = None
    """Instead of --mtbf: mean steps between two faults. So the same seed disturbs the same steps, on any machine."""
    seed: int = 1
    """Of the moments and victims."""
    hosts: Annotated[str | None, tyro.conf.arg(aliases=["-H"])] = None
    """Those of COMMAND, a:8,b:8 or a host file; they are reached over ssh. This one alone if not given."""
    ssh_port: Annotated[int | None, In(PORT)] = None
    """Where it is not ssh's own."""
    kinds: tuple[Literal["rank", "host", "launcher"], ...] = ("rank",)
    """What is killed, each as often. rank: one. host: all ranks of one host. launcher: what was started here as COMMAND
    (it must take its processes with it)."""
    fault_command: str | None = None
    """Another kind, as often: a shell command of yours, for example one that breaks a cable for some seconds."""
    undisturbed: Path | None = None
    """The folder of a finished run of the same COMMAND to compare with, instead of running it here."""
    tolerance: Annotated[float, In("[0, 1]")] = 1e-9
    """The largest relative difference of two losses that are called equal."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if (self.mtbf is None) == (self.mean_steps is None):
            raise ValueError("expected one of --mtbf and --mean-steps")
        if not self.kinds and not self.fault_command:
            raise ValueError("--kinds is empty and there is no --fault-command: nothing would happen")


@dataclass
class Result:
    """The content of torture.json."""

    command: str
    seed: int
    mtbf_s: float | None
    mean_steps: float | None
    faults: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    times_back: int = 0
    steps_repeated: int = 0
    until_first_step_s: float = 0.0
    recoveries_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    effective_s: float = 0.0
    effective: float = 0.0
    undisturbed_wall_s: float | None = None
    comparison: Comparison | None = None
    equal: bool = False


def torture(arguments: list[str]) -> int:
    """Runs both trainings; returns the exit status."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    words, command = arguments[:at], arguments[at + 1 :]
    try:
        options = parse(TortureOptions, words, _PROGRAM)
        if not command:
            raise errors.UsageError("no COMMAND; expected flags, then --, then what is to be run")
        return _torture(options, command)
    except errors.UsageError as error:
        errors.report(_PROGRAM, error)
        return 2
    except (ValueError, OSError) as error:
        errors.report(_PROGRAM, error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _torture(options: TortureOptions, command: list[str]) -> int:
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    disturbed = folder / "disturbed"
    if disturbed.exists():
        raise ValueError(f"{disturbed} is there already, from another time: remove it, or give another --folder")
    hosts = doctor_hosts.parse(options.hosts, options.ssh_port) if options.hosts else [Host("localhost")]
    result = Result(shlex.join(command), options.seed, options.mtbf, options.mean_steps)
    undisturbed = options.undisturbed or folder / "undisturbed"
    with (folder / "output.txt").open("ab") as output, (folder / "events.jsonl").open("a") as events:
        if not (undisturbed / "result.json").exists():
            if options.undisturbed:
                raise ValueError(
                    f"{undisturbed} holds no finished run (result.json): wait for its end, or leave it out"
                )
            result.undisturbed_wall_s = _undisturbed(command, undisturbed, output)
        faults = Faults(
            hosts, str(disturbed), options.kinds, options.fault_command, random.Random(options.seed),
            options.mtbf, options.mean_steps, events,
        )  # fmt: skip
        _disturbed(command, disturbed, output, faults, result)
    result.comparison = compare(undisturbed, disturbed)
    result.equal = result.comparison.equal(options.tolerance)
    (folder / "torture.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    _print(result, options.tolerance, folder)
    return 0 if result.equal else 1


def _undisturbed(command: list[str], root: Path, output: Any) -> float:
    print(f"{_PROGRAM}: undisturbed, to {root}", flush=True)
    began = time.monotonic()
    with _started(command, root, output) as process:
        status = process.wait()
    if status:
        raise ValueError(f"undisturbed, the command ended with status {status}: see the end of {output.name}")
    return time.monotonic() - began


def _disturbed(command: list[str], root: Path, output: Any, faults: Faults, result: Result) -> None:
    """Runs the command with faults until it ends with 0. Raises ValueError without progress."""
    print(f"{_PROGRAM}: disturbed, to {root}", flush=True)
    watch, began, fruitless = Watch(root / "loss.csv"), time.monotonic(), 0
    while True:
        furthest = watch.furthest
        result.starts += 1
        with _started(command, root, output) as process:
            faults.started(process.pid, watch.furthest)
            while process.poll() is None:
                time.sleep(_POLL_S)
                watch.look()
                if faults.strike(watch.step):
                    watch.look()  # over ssh it took time, in which steps were made
                    watch.struck()
        watch.look()
        if process.returncode == 0:
            break
        faults.note(f"the command ended with status {process.returncode}", watch.step)
        faults.wait_until_gone(watch.step)
        watch.interrupted()
        fruitless = fruitless + 1 if watch.furthest == furthest else 0
        if fruitless == _MOST_FRUITLESS:
            raise ValueError(
                f"{fruitless} starts in a row brought no step beyond {furthest}: give more time between faults, more "
                f"checkpoints, or see the end of {output.name}"
            )
    result.wall_s = time.monotonic() - began
    faults.end()
    result.effective_s = watch.effective_s()
    result.effective = result.effective_s / result.wall_s
    result.faults = faults.counts
    result.until_first_step_s = watch.first_step_at - began
    result.times_back = len(watch.backs)
    result.steps_repeated = sum(start - end for start, end in watch.backs)
    result.recoveries_s = [round(seconds, 3) for seconds in watch.recoveries_s]


@contextmanager
def _started(command: list[str], root: Path, output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the command's process and ends it after the block."""
    process = subprocess.Popen(
        [*command, "--models-root", str(root)], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _print(result: Result, tolerance: float, folder: Path) -> None:
    found = result.comparison
    assert found is not None
    struck = ", ".join(f"{number} x {kind}" for kind, number in sorted(result.faults.items())) or "none"
    print(f"faults: {struck}; {result.starts} start(s) of the command; went back {result.times_back} times, "
          f"{result.steps_repeated} steps were done again")  # fmt: skip
    digits = f"{found.in_full} of {found.steps} steps in all digits" if found.in_full else "in nine digits"
    print(f"losses: largest difference {found.largest_difference:.2g} ({digits}; in loss.csv's nine {found.differing} "
          f"steps differ), {tolerance:g} is allowed")  # fmt: skip
    for problem in found.problems:
        print(f"problem: {problem}")
    if not found.problems:
        print("samples: none lost or repeated" if found.in_full else "samples: position at the end as undisturbed")
    print(f"time: {result.effective:.1%}: {result.effective_s:.1f} s in steps that counted, of {result.wall_s:.1f} s; "
          f"{result.until_first_step_s:.1f} s until the first one")  # fmt: skip
    if result.recoveries_s:
        print(f"from a fault to the second step beyond it: median {median(result.recoveries_s):.1f} s, longest "
              f"{max(result.recoveries_s):.1f} s")  # fmt: skip
    print(f"{'EQUAL' if result.equal else 'NOT EQUAL'}; every event is in {folder / 'events.jsonl'}", flush=True)
