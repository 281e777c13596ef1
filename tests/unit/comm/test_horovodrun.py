"""horovodrun as patches/horovod changes it: the words of the command are the command's, and it ends."""

import sys

import pytest

from partial_fc import comm
from partial_fc.errors import RefusedByAll

launch = pytest.importorskip("horovod.runner.launch")


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


@pytest.mark.parametrize("flags", ["--min-np 2", "--max-np 4", "--host-discovery-script hosts.sh"])
def test_the_elastic_mode_is_refused_in_one_line_that_names_torchrun(monkeypatch, capsys, flags):
    """Its store unpickles what anybody sends (CVE-2024-10190)."""
    with pytest.raises(SystemExit) as ended:
        parsed(f"-np 2 {flags} bash config.sh", monkeypatch)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torchrun --nnodes=1:2 --max-restarts=100" in line
    assert "docs/reliability.md" in line


def test_a_released_horovodrun_s_elastic_mode_is_refused_by_its_processes(monkeypatch):
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(f"HOROVOD_{name}", str(int("SIZE" in name)))
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(RefusedByAll, match=r"torchrun --nnodes=1:2 --max-restarts=100") as refused:
        comm.init()
    assert "\n" not in str(refused.value)


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
