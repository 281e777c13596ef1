"""`partial-fc doctor env` over two hosts: ssh, versions, names; and a host that is not there."""

import json

from benchmarks.hosts.two_hosts import ADDRESSES
from tests.cluster.conftest import HOSTS


def test_two_hosts_are_looked_at_from_the_first(hosts, env, tmp_path):
    report = tmp_path / "report.json"
    words = ["--models-root", str(tmp_path), "--report", str(report)]
    command = ["partial-fc", "doctor", "env", "-H", f"{HOSTS},10.77.0.9:1", *words]
    status, printed = hosts.run(0, command, timeout_s=120, env=env)
    assert status == 1, printed  # the third is not there
    written = json.loads(report.read_text())
    faults = [(line["host"], line["subject"]) for line in written["lines"] if line["status"] == "fault"]
    assert faults == [("10.77.0.9", "ssh")]
    assert set(written["hosts"]) == set(ADDRESSES)
    assert all(facts["own_address"] == address for address, facts in written["hosts"].items())
    same = {line["subject"] for line in written["lines"] if line["host"] == "all" and line["status"] == "ok"}
    assert same == {"checkout", "packages"}
