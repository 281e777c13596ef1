"""How we were launched, read from the environment."""

from types import SimpleNamespace

import pytest

from partial_fc.comm import Launch, detect

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CONTROLLER": "gloo",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


def test_without_a_launcher_there_is_one_process():
    assert detect({"HOME": "/root", "MASTER_ADDR": "left over"}) == Launch("single")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, Launch("torch", 1, 2, 1, 2)),
        (HOROVODRUN, Launch("horovod", 3, 4, 1, 2)),
        (MPIRUN, Launch("horovod", 0, 2, 0, 1)),
        ({**MPIRUN, **HOROVODRUN}, Launch("horovod", 3, 4, 1, 2)),
    ],
)
def test_each_launcher_is_recognised(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize("environ", [TORCHRUN, HOROVODRUN, MPIRUN])
def test_a_half_set_launcher_is_an_error_that_names_what_is_missing(environ):
    who = list(environ)[:2]
    for missing in environ:
        half = {name: value for name, value in environ.items() if name != missing}
        with pytest.raises(ValueError, match=missing) as error:
            detect(half)
        assert "unset these variables" in str(error.value)
        assert any(name in half for name in who)


def test_rank_alone_is_half_set():
    with pytest.raises(ValueError, match=r"RANK=0.*WORLD_SIZE, LOCAL_RANK"):
        detect({"RANK": "0"})


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "2"), ("RANK", "-1"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "1")]
)
def test_numbers_that_contradict_each_other(name, value):
    with pytest.raises(ValueError, match="expected 0 <= rank < size"):
        detect({**TORCHRUN, name: value})


def test_a_rank_that_is_no_number():
    with pytest.raises(ValueError, match=r"RANK='one' is not a whole number"):
        detect({**TORCHRUN, "RANK": "one"})


@pytest.mark.parametrize(("given", "local_size", "expected"), [(None, 2, [4]), (None, 16, [1]), ("3", 2, [])])
def test_processes_of_a_host_share_its_cores_unless_told_otherwise(monkeypatch, given, local_size, expected):
    from recipes import face

    asked: list[int] = []
    monkeypatch.setattr(face.torch, "set_num_threads", asked.append)
    monkeypatch.setattr(face.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    face._share_cores(SimpleNamespace(local_size=local_size))
    assert asked == expected
