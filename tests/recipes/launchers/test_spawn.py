"""`partial-fc train RECIPE --gpus N`: starts the processes of a host, passes their lines on, and leaves none behind."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from partial_fc.comm import Launch, StartError
from partial_fc.comm.launch import meet_ranks, spawn, start
from partial_fc.flags import LaunchFlags
from tests.recipes.launchers import rendezvous_job
from tests.waiting import free_port, until

ROOT = Path(__file__).parents[3]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pids: list[int]) -> None:
    until(lambda: not any(map(is_running, pids)))


def run(command: list[str], gpus: int = 2) -> int:
    return spawn.run(command, gpus=gpus)


def test_two_processes_of_one_host_which_partial_fc_launch_calls_one_worker(capfd, monkeypatch):
    worker = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    worker |= {"MASTER_PORT": free_port(), "PARTIAL_FC_LAUNCHER": "partial-fc launch"}
    for name, value in (worker | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "partial_fc", "train", rendezvous_job.__file__])
    assert start.start(LaunchFlags(gpus=2)) == 0
    lines = ["rank 0 of 2, 0 of 2 here: 3", "rank 1 of 2, 1 of 2 here: 3"]
    if not torch.cuda.is_available():
        lines.insert(0, "no GPU here: 2 processes on the CPU, over gloo")
    assert sorted(capfd.readouterr().out.splitlines()) == lines


# ---- what the ranks print, and how they end: shell scripts are quicker than Python


def shell(script: str, gpus: int = 2) -> int:
    return run(["bash", "-c", script], gpus)


def test_lines_of_two_ranks_do_not_tear_each_other_apart(capfd):
    script = "for i in 1 2 3 4 5 6 7 8; do printf $RANK$RANK; sleep 0.0$RANK; printf $RANK; printf '%s\\n' $RANK; done"
    assert shell(script + "; printf 'half a line'; printf 'to stderr' >&2", gpus=3) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["0000"] * 8 + ["1111"] * 8 + ["2222"] * 8 + ["half a line"] * 3
    assert err.splitlines() == ["to stderr"] * 3


def test_each_process_is_told_who_it_is(capfd):
    script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $PARTIAL_FC_PARENT"
    command = ["bash", "-c", script]
    assert spawn.run(command, nodes=3, gpus=2, nr=1, master_addr="10.0.0.1", master_port=8888) == 0
    told = sorted(capfd.readouterr().out.splitlines())
    assert told == [f"{2 + local} 6 {local} 2 10.0.0.1 8888 {os.getpid()}" for local in (0, 1)]


@pytest.fixture
def once_all_listen(tmp_path) -> str:
    """A shell function: the ranks that are to say `listens`, and then the command of the one that waits for them."""
    return f"""
        listens() {{ touch {tmp_path}/$RANK; }}
        once() {{ for r in $1; do while [ ! -e {tmp_path}/$r ]; do sleep 0.02; done; done; shift; "$@"; }}
    """


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [("exit 3", 3, "exit status 3"), ("kill -KILL $$", 137, "signal 9 "), ("kill -TERM $$", 143, "signal 15 ")],
)
def test_a_rank_that_fails_ends_the_others(capfd, once_all_listen, end, status, words):
    others = "echo $$; sleep 300 & echo $!; listens; wait"  # with a process of their own each
    script = f"{once_all_listen} if [ $RANK = 1 ]; then once '0 2' {end}; fi; {others}"
    started = time.monotonic()
    assert shell(script, gpus=3) == status
    assert time.monotonic() - started < 60
    out, err = capfd.readouterr()
    assert len(out.split()) == 4
    wait_for_end([int(pid) for pid in out.split()])
    assert f"rank 1 on {socket.gethostname()} ended with {words}" in err + " "
    assert "ending rank 0, rank 2" in err


def test_a_rank_that_does_not_listen_is_killed(capfd, monkeypatch, once_all_listen):
    monkeypatch.setattr(spawn, "_FAILURE_GRACE_S", 0.3)
    stubborn = "trap '' TERM; echo $$; listens; while true; do sleep 0.1; done"
    assert shell(f"{once_all_listen} if [ $RANK = 1 ]; then once 0 exit 7; fi; {stubborn}") == 7
    wait_for_end([int(capfd.readouterr().out)])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_ranks(capfd, once_all_listen, number, request):
    before = signal.SIG_DFL  # not what a shell that runs the tests in the background makes of SIGINT: ignored
    request.addfinalizer(partial(signal.signal, number, signal.signal(number, before)))
    name = signal.Signals(number).name.removeprefix("SIG")
    # Bash runs a trap once `wait` returns.
    listen = f"trap 'echo $RANK got it; exit 0' {name}; listens; sleep 300 & wait"
    send = f"(once '0 1' kill -{name} $PARTIAL_FC_PARENT) &"
    # Ranks that are asked for a checkpoint and end with 0 were through with everything.
    status = 130 if number == signal.SIGINT else 0
    assert shell(f"{once_all_listen} [ $RANK = 0 ] && {send} {listen}") == status
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 got it", "1 got it"]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(("last", "status"), [("exit 75", 75), ("exit 0", 75), ("exit 4", 4), ("kill -KILL $$", 137)])
def test_ranks_that_were_pre_empted_end_in_peace(capfd, once_all_listen, last, status):
    """The first one that is through does not end the others, and what they started gets no signal of its own."""
    helper = "(trap 'echo helper hit' USR1; sleep 1) & trap 'asked=1' USR1; listens; wait"
    leave = f'[ "$asked" ] || exit 9; if [ $RANK = 1 ]; then sleep 0.5; echo late; {last}; fi; exit 75'
    send = "(once '0 1' kill -USR1 $PARTIAL_FC_PARENT) &"
    assert shell(f"{once_all_listen} [ $RANK = 0 ] && {send} {helper}; {leave}") == status
    assert capfd.readouterr().out.splitlines() == ["late"]


# ---- how the ranks meet


def test_a_signal_that_comes_twice_at_once_is_one(once_all_listen):
    """timeout(1) sends one to the command, and one to its process group."""
    leave = "trap 'sleep 0.4; exit 75' TERM USR1; listens; sleep 300 & wait"
    send = "(once '0 1' kill -TERM $PARTIAL_FC_PARENT; kill -USR1 $PARTIAL_FC_PARENT) &"
    assert shell(f"{once_all_listen} [ $RANK = 0 ] && {send} {leave}") == 75


def test_a_master_address_without_a_port_is_where_rank_0_is_reached(monkeypatch):
    with spawn._listen("127.0.0.2") as listening:
        port = listening.getsockname()[1]
        monkeypatch.setenv(meet_ranks.LISTENING_SOCKET, str(os.dup(listening.fileno())))
        met = meet_ranks.meet(launch(0, 1, port, "127.0.0.2"), 20)
    assert met.keys.get("outcome") == b"all here"


@pytest.mark.parametrize("address", ["192.0.2.77", "no-such-host.invalid"])
def test_a_master_address_that_is_not_of_the_only_host_is_refused(address):
    with pytest.raises(ValueError, match=rf"--master-addr {address}: .* cannot listen there \(.*leave it away"):
        spawn.run(["true"], gpus=2, master_addr=address)


@pytest.fixture(autouse=True)
def _no_stores(monkeypatch):
    monkeypatch.setattr(meet_ranks, "_stores", {})
    monkeypatch.setattr(meet_ranks, "_LINGER_S", 0.5)
    monkeypatch.setattr(meet_ranks, "_LATER_S", 1.0)


def launch(rank: int, size: int, port: int, address: str = "127.0.0.1") -> Launch:
    return Launch("torch", rank, size, 0, 1, "torchrun", address, port)


def outcomes(launches: list[Launch], timeout_s: float, on_gpu: tuple[int, ...] = ()) -> list[str]:
    """What each rank, a process of its own, hears; "" where all is well. They start in the order given."""
    context = multiprocessing.get_context("fork")  # torch is there already

    def meet(one: Launch, to_us) -> None:
        try:
            meet_ranks.meet(one, timeout_s, "cuda" if one.rank in on_gpu else "cpu")
            to_us.send("")
        except StartError as error:
            to_us.send(str(error))
        time.sleep(2)  # rank 0 keeps the store while others still ask

    pipes, processes = [], []
    for one in launches:
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=meet, args=(one, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    heard = [pipe.recv() if pipe.poll(30) else "nothing" for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    return heard


@pytest.mark.parametrize(
    ("given", "on_gpu", "words"),  # given: (rank, how many it thinks there are)
    [
        ([(2, 3), (0, 3), (1, 3)], (), []),
        ([(0, 2), (1, 2)], (0, 1), []),
        ([(0, 3), (1, 3), (2, 3)], (0,), ["ranks 1-2 of 3 would compute on the CPU", "give --device cpu to all"]),
        (
            [(0, 4), (2, 4)],
            (),
            ["rank 1, rank 3 did not join", "There are: rank 0: ", "127.0.0.1 means every host itself"],
        ),
        ([(0, 2), (1, 4)], (), ["disagree on how many", "2 processes, says rank 0", "4 processes, says rank 1"]),
        ([(0, 3), (1, 3), (1, 3)], (), ["rank 1 is there twice"]),
    ],
)
def test_ranks_meet_or_all_hear_why_not(given, on_gpu, words):
    port = free_port()
    for heard in outcomes([launch(*one, port) for one in given], 20 if len(given) >= given[0][1] else 3, on_gpu):
        assert bool(heard) == bool(words)
        assert all(each in heard for each in words), heard


@pytest.mark.parametrize(
    ("rank", "is_taken", "address", "says"),
    [
        (1, False, "127.0.0.1", r"nobody listens at 127\.0\.0\.1:PORT after 0.5 s: Connection refused"),
        (1, False, "no-such-host.invalid", "does not know the name"),
        (1, True, "127.0.0.1", "it is not the store of a rank 0"),
        (0, True, "127.0.0.1", "cannot listen at port PORT.*another job"),
        (0, False, "192.0.2.77", r"rank 1 did not join.*192\.0\.2\.77 is no address of"),
    ],
)
def test_what_is_wrong_with_the_master_is_an_error_in_time(rank, is_taken, address, says):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        if not is_taken:
            other.close()
        with pytest.raises(StartError, match=says.replace("PORT", str(port))):
            meet_ranks.meet(launch(rank, 2, port, address), 0.5)


def test_a_job_that_runs_is_left_alone_by_a_second_one_on_its_port(monkeypatch):
    port = free_port()
    running = meet_ranks.meet(launch(0, 1, port), 20)
    monkeypatch.setattr(meet_ranks, "_stores", {})
    with pytest.raises(StartError, match=r"have met without this one; rank 1 there is none\. .*a port of its own"):
        meet_ranks.meet(launch(1, 2, port), 0.5)
    monkeypatch.setattr(meet_ranks, "_stores", {})
    (heard,) = outcomes([launch(0, 1, port)], 20)
    assert "cannot listen" in heard
    assert running.keys.get("outcome") == b"all here"


def test_ranks_meet_again_at_a_store_that_still_has_what_they_wrote(monkeypatch):
    """torchrun's agent keeps its store when it restarts failed processes, rank 0's last. Each agent counts its restarts
    alone."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for ranks in ((0, 1, 2), (2, 1, 0), (1, 0)):
        assert outcomes([launch(rank, len(ranks), port) for rank in ranks], 20) == [""] * len(ranks)
    assert agent.num_keys() > 3


def test_a_rank_that_was_killed_before_all_were_there_is_replaced(monkeypatch):
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    killed = subprocess.Popen(["true"])
    killed.wait()
    agent.set(meet_ranks.ATTEMPT, "first")
    dist.PrefixStore("first", agent).set("rank 1", f"{socket.gethostname()} (process {killed.pid})")
    monkeypatch.setattr(meet_ranks.secrets, "token_hex", lambda _: "first")
    assert outcomes([launch(1, 2, port), launch(0, 2, port)], 20) == ["", ""]


def test_what_others_write_into_the_store_reaches_no_terminal(monkeypatch):
    """It is anybody's."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(meet_ranks.secrets, "token_hex", lambda _: "first")
    dist.PrefixStore("first", agent).set("outcome", "\x1b[31mred\nline")
    for rank in (0, 1):
        with pytest.raises(StartError) as error:
            meet_ranks.meet(launch(rank, 2, port), 0.5)
        assert str(error.value).isprintable()
        assert r"\x1b[31mred\nline" in str(error.value)
