"""`partial-fc doctor env`: checks that this machine, and the hosts of a run, can train together."""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from partial_fc.comm.launch.hosts import ROOT, Host, HostError, parse
from partial_fc.findings import check_writable
from partial_fc.flags.facts import PORT, In
from partial_fc.verbs.doctor.host_findings import HostFinding, common_findings, host_findings
from partial_fc.verbs.doctor.probe import MARK

_PROBE_S = 120.0  # loading the libraries, from a slow network folder

# ssh's message -> remedy (docs/launching.md)
_SSH = {
    "Permission denied": "let this user log in without a password: ssh-copy-id {host} (keys that others may read are "
    "ignored: chmod 400 ~/.ssh/id_rsa; docs/launching.md has more)",
    "Host key verification failed": "make the host known: ssh-keyscan {host} >> ~/.ssh/known_hosts",
    "Could not resolve": "write its address instead, or put its name into /etc/hosts",
    "Connection refused": "start sshd there, or give --ssh-port",
    "No such file": "install an ssh client",
}
_SSH_ELSE = "see whether it is on, its address right, and no firewall between; `ssh {host} hostname` must answer"


@dataclass(frozen=True)
class EnvOptions:
    """Looks at Horovod, MPI, NCCL, ssh, versions, memory, disk and names of this machine, or of all hosts of a run.
    Exit status 0: no faults; 1: faults; 2: invalid hosts."""

    hosts: Annotated[str | None, tyro.conf.arg(aliases=["-H"])] = None
    """Hosts as for horovodrun, a:8,b:8, or a host file; by default this machine."""
    models_root: Path = Path("runs")
    """The output folder of the run."""
    ssh_port: Annotated[int | None, In(PORT)] = None
    """The port of sshd, if it is not 22."""
    ssh_timeout: Annotated[float, In("(0, 86400]")] = 10.0
    """Seconds in which a host must answer."""
    report: Path | None = None
    """A JSON file to write: all lines, and the answers of the hosts."""


def doctor_env(options: EnvOptions) -> int:
    """Prints a line per check and returns the exit status."""
    try:
        check_writable(options.report)
        hosts = parse(options.hosts, options.ssh_port) if options.hosts else [Host("localhost")]
    except (ValueError, OSError) as error:
        print(f"partial-fc doctor env: {error}", file=sys.stderr)
        return 2
    findings: list[HostFinding] = []

    def report(finding: HostFinding) -> None:
        findings.append(finding)
        print(finding, flush=True)

    answers = _ask_all(hosts, options, report)
    for host, facts in answers:
        for finding in host_findings(host, facts, len(hosts)):
            report(finding)
    for finding in common_findings(answers):
        report(finding)
    faults, warnings = (sum(finding.status == status for finding in findings) for status in ("fault", "warning"))
    print(f"\n{faults} fault(s), {warnings} warning(s) on {len(hosts)} host(s)")
    if options.report:
        content = {
            "hosts": {host.name: facts for host, facts in answers},
            "lines": [asdict(finding) for finding in findings],
        }
        options.report.write_text(json.dumps(content, indent=1) + "\n")
        print(f"answers of the hosts: {options.report}")
    return int(faults > 0)


Answers = list[tuple[Host, dict[str, Any]]]
"""The facts of each host (probe.facts)."""


def _ask_all(hosts: list[Host], options: EnvOptions, report: Callable[[HostFinding], None]) -> Answers:
    """Returns the answers of the hosts; reports those that do not answer."""

    def ask(host: Host) -> tuple[HostFinding | None, dict[str, Any] | None]:
        finding = None
        if not host.is_here:
            try:
                host.check_ssh(options.ssh_timeout)
            except HostError as error:
                remedy = next((remedy for words, remedy in _SSH.items() if words in str(error)), _SSH_ELSE)
                return HostFinding("fault", host.name, "ssh", str(error), remedy.format(host=host.name)), None
            finding = HostFinding("ok", host.name, "ssh", "works without a password")
        given = json.dumps({"checkout": str(ROOT), "models_root": str(options.models_root.absolute())})
        try:
            return finding, host.run_module("partial_fc.verbs.doctor.probe", [], MARK, _PROBE_S, given)
        except HostError as error:
            remedy = f"this checkout must also be at {ROOT} there, set up by `make setup`"
            return HostFinding("fault", host.name, "python", f"{sys.executable}: {error}", remedy), None

    answers = []
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        for host, (finding, facts) in zip(hosts, pool.map(ask, hosts), strict=True):
            if finding:
                report(finding)
            if facts:
                answers.append((host, facts))
    return answers
