"""horovodrun as scripts/build_horovod.sh builds it: the words of the command are the command's."""

import sys

import pytest

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
