"""`partial-fc launch`: its flags, its host file, and what it would give to ssh."""

import re
import shlex
from pathlib import Path

import pytest

from partial_fc.comm.launch import addresses
from recipes.mxnet.launch import job
from recipes.mxnet.launch.command import launch
from recipes.mxnet.launch.options import split, torch_recipe

ECHO = ["sh", "-c", 'echo "$DMLC_ROLE $DMLC_TASK_ID"']


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Writes a host file; returns its path. Nothing is asked of the network."""
    monkeypatch.setattr(addresses, "towards", lambda destination: "127.0.0.1")

    def write(text: str) -> Path:
        (tmp_path / "hosts").write_text(text)
        return tmp_path / "hosts"

    return write


@pytest.mark.parametrize(
    ("words", "num_flags"),
    [
        ("-n 2 --launcher local python train.py -n 3", 4),
        ("-n 2 --p3 --env A=1 --env B -H hosts --dry-run python x.py --env C", 10),
        ("--num_workers=2 --sync-dst-dir /tmp/x ./program", 3),
        ("-n 2 -- -odd", 2),
        ("-n 2 --", 2),
    ],
)
def test_command_begins_where_the_flags_end(words, num_flags):
    words = words.split()
    flags, command = split(words)
    assert flags == words[:num_flags]
    assert command == [word for word in words[num_flags:] if word != "--"]
    assert split(["-n2", "-H=hosts", "x", "-n3"]) == (["-n", "2", "-H", "hosts"], ["x", "-n3"])


@pytest.mark.parametrize(
    ("command", "recipe"),
    [
        ("python train.py face --rec x", "face"),
        ("python -m partial_fc train face", "face"),
        ("/x/bin/partial-fc train imagenet", "imagenet"),
        ("python train.py mnist --engine mxnet --kv-store dist_sync", ""),
        ("python train.py mnist --engine=mxnet", ""),
        ("python train.py --kv-store dist_sync", ""),
        ("python train_mnist.py face", ""),
    ],
)
def test_our_torch_recipes_are_known(command, recipe):
    assert torch_recipe(command.split()) == recipe


def test_a_host_file(hosts):
    found = job.read_hosts(hosts("# all\n a:2222\n\nb slots=2  # two\n10.0.0.3\n"))
    assert [(host.name, host.slots, host.ssh_port) for host in found] == [
        ("a", 0, 2222),
        ("b", 2, None),
        ("10.0.0.3", 0, None),
    ]
    servers, workers = job.place(found, 2, 6)
    assert [host.name for host in servers] == ["a", "b"]
    assert [host.name for host in workers] == ["10.0.0.3", "a", "b", "10.0.0.3", "a", "b"]
    with pytest.raises(ValueError, match="-n 3, but the host file has slots for 2 workers"):
        job.place(job.read_hosts(hosts("a slots=2")), 0, 3)


@pytest.mark.parametrize(
    "line", ["-oProxyCommand=x", "a b", "a slots=0", "a slots=x", "a:", "a:0", "a:70000", "a;b", "a b=1 c=2"]
)
def test_a_line_that_is_no_host_is_named_and_none_is_an_error(hosts, line):
    with pytest.raises(ValueError, match=r"hosts, line 2: .*; expected lines `host`"):
        job.read_hosts(hosts(f"a\n{line}\n"))
    with pytest.raises(ValueError, match="names no host"):
        job.read_hosts(hosts("# none\n\n"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-n 2 true", "--launcher ssh (the default, as launch.py's) needs -H HOSTFILE"),
        ("-n 0 --launcher local true", "-n is 0; expected at least 1"),
        ("-n 1 --launcher local -H x true", "-H x goes with --launcher ssh and mpi"),
        ("-n 1 --launcher local --sync-dst-dir /x true", "--sync-dst-dir goes with"),
        ("-n 1 --launcher local", "COMMAND"),
        ("-n 1 --launcher local --env NOT_SET_HERE true", "--env NOT_SET_HERE: it is not set here"),
        ("-n 1 --launcher local --env DMLC_ROLE=x true", "DMLC_ROLE"),
        ("-n 1 --launcher local --env-worker X true", "--env-worker X: expected NAME:VALUE"),
        ("-n 1 --launcher local -s 0 --p3 true", "--p3"),
        ("-n 1 --launcher local -s 2 python train.py face", "-s 2, but recipe face"),
        ("-n 1 --launcher local --env DMLC_PS_ROOT_URI=192.0.2.7 true", "cannot listen at 192.0.2.7"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, words, says):
    assert launch(words.split()) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_an_interface_that_this_host_does_not_have(capsys, monkeypatch):
    monkeypatch.setenv("DMLC_INTERFACE", "eth77")
    assert launch(["-n", "1", "--launcher", "local", "true"]) == 2
    assert re.search(r"DMLC_INTERFACE=eth77: does not exist on .*lo \(127\.0\.0\.1\)", capsys.readouterr().err)


def test_what_would_go_over_ssh(hosts, capsys, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("DMLC_INTERFACE", "lo")
    monkeypatch.setenv("DMLC_NODE_HOST", "10.9.9.9")
    words = ["-n", "1", "-s", "1", "-H", str(hosts("198.51.100.1:2222\n198.51.100.2\n")), "--dry-run", "--p3"]
    assert launch([*words, "python", "it's.py"]) == 0
    scheduler, server, worker = capsys.readouterr().out.split("\n# ")
    assert "-p 2222 -- 198.51.100.1" in server
    assert "-- 198.51.100.2" in worker
    for text in (server, worker):
        assert {"BatchMode=yes", "ServerAliveInterval=5"} <= set(text.partition("\n")[0].split())
        assert "export DMLC_INTERFACE=lo\n" in text
        assert "export DMLC_PS_VAN_TYPE=p3\n" in text
        assert "export AWS_SECRET_ACCESS_KEY=...\n" in text
        # It would win over DMLC_INTERFACE.
        assert "unset DMLC_NODE_HOST" in text
        assert "export DMLC_NODE_HOST" not in text
        assert shlex.join(["python", "it's.py"]) in text
    assert "export DMLC_PS_ROOT_URI=127.0.0.1\n" in scheduler  # the address of lo
