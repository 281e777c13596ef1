"""`partial-fc doctor env`: what hosts may say, and what is made of it."""

import copy
import socket
import sys
from pathlib import Path

import pytest

from partial_fc.comm.launch.hosts import Host, HostError, parse
from partial_fc.verbs.doctor.env import EnvOptions, common_findings, doctor_env, host_findings
from partial_fc.verbs.doctor.probe import MARK
from tests.house.test_setup import script

GOOD = {
    "name": "node1",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "numpy": "1.23.5", "horovod": "0.28.1", "mxnet": ""},
    "checkout": "abcdef",
    "horovod": {"frameworks": ["torch"], "built": ["gloo", "mpi", "nccl"]},
    "torch": {"cuda": "12.8", "gpus": 8, "nccl": "2.27.3"},
    "gpus": [f"GPU {i}" for i in range(8)],
    "mpirun": "mpirun (Open MPI) 4.1.4",
    "cores": 64,
    "memory_bytes": 1 << 38,
    "shm_bytes": 1 << 35,
    "disk": {"path": "/data", "free_bytes": 1 << 40, "writable": True},
    "open_files": [65536, 65536],
    "own_address": "10.0.0.1",
}


def with_values(**values) -> dict:
    """GOOD, changed at "a__b": its ["a"]["b"]."""
    facts = copy.deepcopy(GOOD)
    for path, value in values.items():
        *outer, last = path.split("__")
        at = facts
        for name in outer:
            at = at[name]
        at[last] = value
    return facts


def lines(facts: dict, num_hosts: int = 2) -> list[tuple[str, str, str]]:
    """Those that are not ok."""
    findings = host_findings(Host("10.0.0.1", 8), facts, num_hosts)
    return [(f.status, f.subject, f"{f.observed}: {f.remedy}") for f in findings if f.status != "ok"]


# what a host says -> (status, what, words)
WRONG = {
    "horovod is missing": ({"horovod": {"error": "not installed"}}, "warning", "Horovod", "make setup"),
    "no controller": ({"horovod__built": []}, "fault", "Horovod", "built with nothing"),
    "no NCCL": ({"horovod__built": ["mpi"]}, "warning", "Horovod", "HOROVOD_GPU_OPERATIONS=NCCL"),
    "no mpirun": ({"mpirun": ""}, "warning", "MPI", "no mpirun"),
    "torch without CUDA": ({"torch__gpus": 0}, "fault", "GPUs", "none of the 8 GPU(s)"),
    "fewer GPUs than processes": ({"torch__gpus": 4}, "fault", "GPUs", "8 process(es)"),
    "fewer cores": ({"gpus": [], "torch__gpus": 0, "cores": 4}, "warning", "GPUs", "4 core(s), for 8 process(es)"),
    "little memory": ({"memory_bytes": 1 << 30}, "warning", "memory", "1.0 GiB free"),
    "little shm": ({"shm_bytes": 1 << 26}, "warning", "/dev/shm", "--shm-size"),
    "disk full": ({"disk__free_bytes": 1 << 30}, "warning", "models root", "1.0 GiB free"),
    "disk read-only": ({"disk__writable": False}, "fault", "models root", "not writable"),
    "few files": ({"open_files": [1024, 65536]}, "warning", "open files", "ulimit -n 65536"),
    "own name is loopback": ({"own_address": "127.0.1.1"}, "fault", "name", "/etc/hosts"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_host_is_said(name):
    values, status, what, words = WRONG[name]
    findings = lines(with_values(**values))
    assert [line[:2] for line in findings] == [(status, what)]
    assert words in findings[0][2]


def test_what_must_be_the_same_everywhere():
    first = (Host("a"), GOOD)
    assert list(common_findings([first, (Host("b"), GOOD)])) == []
    other = with_values(packages__torch="2.12.0", checkout="", python="3.11.2", gpus=[], mpirun="")
    findings = {line.subject: line for line in common_findings([first, (Host("b"), other)])}
    assert findings.keys() == {"checkout", "python", "torch", "MPI", "GPUs"}
    assert {line.status for line in findings.values()} == {"fault"}
    assert findings["torch"].observed == "2.12.0, not 2.13.0 as on a"
    assert list(common_findings([first])) == []


def test_hosts_as_launchers_take_them(tmp_path):
    assert parse("a:8,b") == [Host("a", 8), Host("b")]
    (tmp_path / "hosts").write_text("# both\n10.0.0.1 slots=8\n\n10.0.0.2 slots=4\n")
    assert parse(str(tmp_path / "hosts"), 2222) == [Host("10.0.0.1", 8, 2222), Host("10.0.0.2", 4, 2222)]
    (tmp_path / "hosts").write_text("10.0.0.1\tslots=8\nb slots=4 max_slots=8  # new\nc\n")
    assert parse(str(tmp_path / "hosts")) == [Host("10.0.0.1", 8), Host("b", 4), Host("c")]
    for wrong in ("a:b", "", "a,a", ":3", "a 8", "a slots=x", "a;b"):
        with pytest.raises(ValueError, match="expected"):
            parse(wrong)
        assert doctor_env(EnvOptions(hosts=wrong or ",")) == 2


@pytest.mark.parametrize("in_file", [True, False])
def test_what_is_no_name_is_refused_before_ssh_sees_it(tmp_path, capsys, in_file):
    """ssh would take it for an option."""
    hosts = f"-oProxyCommand=touch${{IFS}}{tmp_path}/executed"
    if in_file:
        (tmp_path / "hosts").write_text(f"{hosts} slots=8\n")
        hosts = str(tmp_path / "hosts")
    assert doctor_env(EnvOptions(hosts=hosts)) == 2
    assert "is no host" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


def test_this_machine_needs_no_ssh():
    assert Host("localhost").is_here
    assert Host("127.0.0.1").is_here
    assert Host(socket.gethostname()).is_here
    assert not Host("192.0.2.77").is_here  # RFC 5737: nobody's
    command = Host("192.0.2.77", ssh_port=2222).command(["echo", "two words"], 5)
    assert command[0] == "ssh"
    assert command[-4:] == ["2222", "--", "192.0.2.77", "echo 'two words'"]
    assert "BatchMode=yes" in command


def python(folder: Path, body: str) -> str:
    """Another Python, by a script of a shell."""
    return str(script(folder / "python", f'#!/bin/sh\n{body} {sys.executable} "$@"\n'))


def test_a_python_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python(tmp_path, "echo no such module >&2; exit 3 #"))
    with pytest.raises(HostError, match="no such module"):
        Host("localhost").run_module("partial_fc.verbs.doctor.probe", [], MARK, 60, "{}")


SSH = {
    "Permission denied (publickey).": "ssh-copy-id 192.0.2.77",
    "Host key verification failed.": "ssh-keyscan 192.0.2.77",
    "ssh: connect to host x port 22: Connection timed out": "ssh 192.0.2.77 hostname",
}


@pytest.mark.parametrize("words", SSH)
def test_ssh_that_does_not_answer(tmp_path, monkeypatch, capsys, words):
    script(tmp_path / "ssh", f"#!/bin/sh\necho '{words}' >&2\nexit 255\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor_env(EnvOptions(hosts="192.0.2.77:8")) == 1
    printed = capsys.readouterr().out
    assert f"fault     192.0.2.77: ssh: {words}\n" in printed
    assert SSH[words] in printed


@pytest.mark.slow
def test_this_machine(tmp_path, capsys, monkeypatch):
    """All of it, as a user calls it; its Python greets, as a login script would."""
    monkeypatch.setattr(sys, "executable", python(tmp_path, "echo welcome; exec"))
    status = doctor_env(EnvOptions(models_root=tmp_path / "not" / "there"))
    printed = capsys.readouterr().out
    assert "localhost: Horovod: 0." in printed
    assert f"models root: {tmp_path}" in printed
    assert status == int("\nfault " in printed)
