"""`partial-fc doctor env`: are this machine, and the hosts of a run, ready to train together?"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from partial_fc.doctor.hosts import Failed, Host, parse
from partial_fc.doctor.judge_host import Line, judge_host, judge_hosts
from partial_fc.findings import check_writable

_ROOT = Path(__file__).parents[2]
_PROBE_S = 120.0  # loading the libraries, from a slow network folder
_TRANSFER_S = 60.0

# What ssh says -> what to do (docs/launching.md)
_SSH = {
    "Permission denied": "let this user log in without a password: ssh-copy-id {host}",
    "Host key verification failed": "make the host known: ssh-keyscan {host} >> ~/.ssh/known_hosts",
    "Could not resolve": "write its address instead, or put its name into /etc/hosts",
    "Connection refused": "start sshd there, or give --ssh-port",
    "No such file": "install an ssh client",
}
_SSH_ELSE = "see whether it is on, its address right, and no firewall between; `ssh {host} hostname` must answer"


@dataclass(frozen=True)
class EnvOptions:
    """Looks at Horovod, MPI, NCCL, ssh, versions, clocks, memory, disk and network of this machine, or of all hosts of
    a run. Exit status 0: nothing that would fail; 1: faults; 2: the hosts given are none."""

    hosts: Annotated[str | None, tyro.conf.arg(aliases=["-H"])] = None
    """As horovodrun takes them, a:8,b:8, or a host file; this machine alone if not given."""
    models_root: Path = Path("runs/face")
    """Where the run would write."""
    ssh_port: int | None = None
    """Where it is not ssh's own."""
    ssh_timeout: float = 10.0
    """Seconds in which a host must answer."""
    transfer: bool = True
    """Measure latency, bandwidth and clocks between the hosts: a second for each pair of neighbours."""
    report: Path | None = None
    """A JSON file to write: all lines, and what the hosts said."""


def doctor_env(options: EnvOptions) -> int:
    """Prints a line for everything looked at and returns the exit status."""
    try:
        check_writable(options.report)
        hosts = parse(options.hosts, options.ssh_port) if options.hosts else [Host("localhost")]
    except (ValueError, OSError) as error:
        print(f"partial-fc doctor env: {error}", file=sys.stderr)
        return 2
    lines: list[Line] = []

    def say(line: Line) -> None:
        lines.append(line)
        print(line, flush=True)

    seen = _ask_all(hosts, options, say)
    for host, facts in seen:
        for line in judge_host(host, facts, len(hosts)):
            say(line)
    for line in judge_hosts(seen):
        say(line)
    links = []
    if options.transfer and len(seen) > 1:
        for line, link in _links([host for host, _ in seen]):
            say(line)
            links.append(link)
    faults, warnings = (sum(line.status == status for line in lines) for status in ("fault", "warning"))
    print(f"\n{faults} fault(s), {warnings} warning(s) on {len(hosts)} host(s)")
    if options.report:
        report = {
            "hosts": {host.name: facts for host, facts in seen},
            "links": links,
            "lines": [asdict(line) for line in lines],
        }
        options.report.write_text(json.dumps(report, indent=1) + "\n")
        print(f"what the hosts said: {options.report}")
    return int(faults > 0)


def _ask_all(hosts: list[Host], options: EnvOptions, say: Callable[[Line], None]) -> list[tuple[Host, dict[str, Any]]]:
    """What the hosts say that answer."""

    def ask(host: Host) -> tuple[Line | None, dict[str, Any] | None]:
        line = None
        if not host.is_here:
            try:
                host.check_ssh(options.ssh_timeout)
                line = Line("ok", host.name, "ssh", "answers without asking")
            except Failed as error:
                to_do = next((do for said, do in _SSH.items() if said in str(error)), _SSH_ELSE)
                return Line("fault", host.name, "ssh", str(error), to_do.format(host=host.name)), None
        wanted = {
            "checkout": str(_ROOT),
            "models_root": str(options.models_root.absolute()),
            "peers": [other.name for other in hosts if other is not host],
        }
        try:
            return line, host.ask("facts", wanted, _PROBE_S)
        except Failed as error:
            to_do = f"this checkout must lie at {_ROOT} there, too, with `make setup` done"
            return Line("fault", host.name, "python", f"{sys.executable}: {error}", to_do), None

    seen = []
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        for host, (line, facts) in zip(hosts, pool.map(ask, hosts), strict=True):
            if line:
                say(line)
            if facts:
                seen.append((host, facts))
    return seen


def _links(hosts: list[Host]) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Each host and the next, the last and the first: every host's network then sends and receives."""
    pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    for one, other in pairs[:1] if len(hosts) == 2 else pairs:
        what = f"network to {other.name}"
        try:
            with other.serving(_TRANSFER_S) as port:
                link = one.ask("connect", {"address": other.name, "port": port}, _TRANSFER_S)
        except Failed as error:
            to_do = (
                "the processes talk over ports that the system chooses: open all of them between the hosts; is the "
                "right network named (--network-interfaces)?"
            )
            yield Line("fault", one.name, what, str(error), to_do), {"from": one.name, "to": other.name}
            continue
        yield from _judge_link(one, other, what, link)


def _judge_link(one: Host, other: Host, what: str, link: dict[str, Any]) -> Iterator[tuple[Line, dict[str, Any]]]:
    found = f"{link['latency_ms']:.2f} ms there and back, {link['up']:.2f} Gbit/s there, {link['down']:.2f} back"
    slow = min(link["up"], link["down"]) < 1
    status: Literal["ok", "warning"] = "warning" if slow else "ok"
    seconds = 8 * 0.175 / min(link["up"], link["down"])
    to_do = f"r50's gradient (175 MB) takes {seconds:.1f} s a step: is it the right network? See --gradient-compression"
    values = {"from": one.name, "to": other.name, **link}
    yield Line(status, one.name, what, found, to_do if slow else ""), values
    apart = link["clock_s"]
    found = f"{other.name} is {abs(apart):.3f} s {'ahead' if apart > 0 else 'behind'}"
    if abs(apart) > 1:
        yield Line("warning", one.name, "clocks", found, "set them by NTP: logs cannot be compared"), {}
    else:
        yield Line("ok", one.name, "clocks", found), {}
