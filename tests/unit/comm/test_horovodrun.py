"""horovodrun as patches/horovod changes it: the words of the command are the command's, and it ends."""

import subprocess
import sys
import threading

import pytest

launch = pytest.importorskip("horovod.runner.launch")
from horovod.runner.elastic.driver import ElasticDriver  # noqa: E402
from horovod.runner.elastic.registration import WorkerStateRegistry  # noqa: E402


def parsed(words: str, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["horovodrun", *words.split()])
    return launch.parse_args()


def test_flags_of_the_command_are_its_own(monkeypatch):
    command = "bash config.sh --network r50 --num 3 --verbose --start-timeout 7 -nr 1"
    found = parsed(f"-np 2 -H localhost:2 --gloo {command}", monkeypatch)
    assert found.command == command.split()
    assert (found.num_proc, found.hosts, found.use_gloo) == (2, "localhost:2", True)
    assert (found.verbose, found.start_timeout) == (False, None)


def test_horovodruns_own_flags_are_not_shortened(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed("-np 2 --hos localhost:2 --verb bash config.sh", monkeypatch)
    assert "--hos" in capsys.readouterr().err


def test_the_two_words_that_everybody_types_first(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed("--check", monkeypatch)
    assert not ended.value.code
    assert "[X] PyTorch" in capsys.readouterr().out


def test_an_elastic_job_on_one_host_says_what_it_waits_for(tmp_path):
    (tmp_path / "discover").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "discover").chmod(0o755)
    words = f"-np 2 --min-np 2 --elastic-timeout 1 --host-discovery-script {tmp_path}/discover true"
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", *words.split()]
    done = subprocess.run(horovodrun, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("horovodrun waits for a second host")
    assert "--network-interfaces NAME" in done.stderr


@pytest.mark.parametrize("home", ["usable", "missing", "refused"])
def test_checks_are_kept_only_where_there_is_a_home(tmp_path, monkeypatch, home):
    class Reached(Exception):
        pass

    def look(_, __, ___, cache):
        assert (cache is not None) == (home == "usable")
        raise Reached

    (tmp_path / "usable").mkdir()
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused/.horovod").touch()  # as /proc/1 for root: it may write there, and no folder can be made
    monkeypatch.setenv("HOME", f"{tmp_path}/{home}")
    monkeypatch.setattr(launch, "CACHE_FOLDER", f"{tmp_path}/{home}/.horovod")
    monkeypatch.setattr(launch.driver_service, "get_common_interfaces", look)
    with pytest.raises(Reached):
        launch._run(parsed("-np 1 -H localhost:1 true", monkeypatch))


class NoHosts:
    """Stands for the elastic driver and its list of hosts: none are left."""

    def __init__(self):
        self.waits, self.gives_up, self._stopped = threading.Event(), threading.Event(), threading.Event()

    def finished(self):
        return self._stopped.is_set()

    def resume(self):
        self.waits.set()
        self.gives_up.wait()
        raise RuntimeError("no hosts from the previous set remain")

    def stop(self):
        self._stopped.set()

    def is_blacklisted(self, host):
        return False


def test_a_process_that_ends_while_the_driver_waits_in_vain_does_not_hold_it_up():
    driver = NoHosts()
    registry = WorkerStateRegistry(driver, driver)
    registry.reset(2)
    told = [threading.Thread(target=registry.record_ready, args=(host, 0), daemon=True) for host in "ab"]
    told.append(threading.Thread(target=registry.record_failure, args=("b", 0), daemon=True))
    for thread in told[:2]:
        thread.start()
    assert driver.waits.wait(60)
    told[2].start()
    driver.gives_up.set()
    for thread in told:
        thread.join(30)
    assert not any(thread.is_alive() for thread in told)


class TwoHosts:
    """Stands for the host file, and for the store."""

    def find_available_hosts_and_slots(self):
        return {"a": 1, "b": 1}

    def init(self, plan):
        pass

    def stop(self):
        pass


def test_a_host_whose_process_failed_gets_a_new_one_where_no_world_is_formed_without_it():
    """As many processes are wanted as there are: the driver waits for the host to be listed again."""
    hosts = TwoHosts()
    driver = ElasticDriver(hosts, hosts, 2, 2, timeout=60, cooldown_range=(1, 2))
    started, ends = [], threading.Event()

    def worker(slot, events):
        started.append(slot.hostname)
        ends.wait(60)
        return 0, 0.0

    try:
        driver.start(2, worker)
        told = [
            threading.Thread(target=driver.record_ready, args=("b", 0), daemon=True),
            threading.Thread(target=driver._worker_registry.record_failure, args=("a", 0), daemon=True),
        ]
        for thread in told:
            thread.start()
        for thread in told:
            thread.join(30)
        assert sorted(started) == ["a", "a", "b"]
    finally:
        ends.set()
        driver.stop()
