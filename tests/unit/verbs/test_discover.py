"""hosts/discover.sh, which horovodrun's elastic mode asks for hosts once a second. (tests/cluster has it at work.)"""

import os
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def discover(tmp_path):
    """(status, hosts, what it complained of) for what stands in the host file."""

    def discover(content: str, ssh_port: int = 22) -> tuple[int, list[str], str]:
        (tmp_path / "hosts").write_text(content)
        env = {**os.environ, "HOST_FILE": str(tmp_path / "hosts"), "SSH_PORT": str(ssh_port)}
        command = ["bash", ROOT / "hosts/discover.sh"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, sorted(done.stdout.split()), done.stderr

    return discover


def test_the_last_host_of_a_file_counts_also_without_a_line_end(discover):
    assert discover("# ours\nlocalhost slots=2\n\n127.0.0.1 slots=3") == (0, ["127.0.0.1:3", "localhost:2"], "")


def test_hosts_that_do_not_answer_are_left_out(discover):
    with socket.create_server(("127.0.0.2", 0)) as sshd:
        port = sshd.getsockname()[1]
        assert discover("127.0.0.2 slots=4\n127.0.0.3 slots=4\nlocalhost\n", port)[1] == ["127.0.0.2:4", "localhost:1"]
    assert discover("127.0.0.2 slots=4\n", port) == (0, [], "")


@pytest.mark.parametrize(
    "name",
    [
        "$(touch${IFS}FILE)",
        "`touch${IFS}FILE`",
        "a;touch${IFS}FILE",
        "-oProxyCommand=touch${IFS}FILE",
        "localhost:2",
        "ü",
    ],
)
def test_what_is_no_name_is_refused_and_not_executed(discover, tmp_path, name):
    name = name.replace("FILE", str(tmp_path / "executed"))
    status, hosts, complaint = discover(f"localhost slots=2\n{name} slots=2\n")
    assert (status, hosts) == (1, [])
    assert f"{tmp_path}/hosts" in complaint
    assert "no name of a host" in complaint
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", ["", "# none yet\n\n"])
def test_a_file_without_hosts_is_an_error_not_the_loss_of_all(discover, content):
    status, hosts, complaint = discover(content)
    assert (status, hosts) == (1, [])
    assert "names no host" in complaint
