"""`partial-fc doctor env` over two hosts: ssh, versions, names; and a host that is not there."""

from benchmarks.hosts.two_hosts import ADDRESSES
from tests.cluster.conftest import HOSTS


def test_two_hosts_are_looked_at_from_the_first(hosts, env, tmp_path):
    command = ["partial-fc", "doctor", "env", "-H", f"{HOSTS},10.77.0.9:1", "--models-root", str(tmp_path)]
    status, printed = hosts.run(0, command, timeout_s=120, env=env)
    assert status == 1, printed  # the third is not there
    faults = [line.split(maxsplit=1)[1] for line in printed.splitlines() if line.startswith("fault")]
    assert [line.split(": ")[:2] for line in faults] == [["10.77.0.9", "ssh"]]
    for address in ADDRESSES:  # a host's own name is the address that the others use
        (name,) = [line for line in printed.splitlines() if line.startswith(f"{'ok':10}{address}: name: ")]
        assert name.endswith(f" is {address}")
