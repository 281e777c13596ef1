"""Commands that are typed on several hosts find each other through Redis or a folder, and train. (The hosts are this
one; tests/cluster has two. What may go wrong as they meet: tests/recipes/imagenet/test_stores.py.)"""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from partial_fc.comm import StartError
from recipes.imagenet.rendezvous import stores
from tests.recipes.launchers import rendezvous_job
from tests.redis_server import redis_server, skip_without
from tests.running import ROOT, Given, environment, losses, several
from tests.waiting import free_port, until

JOB = [sys.executable, "-m", "partial_fc", "train", str(ROOT / "tests/recipes/launchers/rendezvous_job.py")]
TRAIN = ["--batch-size", "6", "--lr", "0.05", "--precision", "fp32", "--max-steps", "5"]


@pytest.fixture
def started():
    """Starts commands; whatever is left of them is ended with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*flags: str, **environ: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = {**environment(), "PYTHONPATH": str(ROOT), **environ}
        # A shell that runs the tests in the background ignores SIGINT, and what is ignored stays so.
        listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        processes.append(subprocess.Popen([*JOB, *flags], cwd=ROOT, env=env, text=True, preexec_fn=listens, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def shards(num_shards: int, *flags: str) -> list[list[str]]:
    return [["--num_shards", str(num_shards), "--shard_id", str(shard), *flags] for shard in range(num_shards)]


def ended(*processes: subprocess.Popen[str], timeout: int | None = 150) -> list[tuple[int, str]]:
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    return [(process.returncode, printed) for process, printed in zip(processes, outputs, strict=True)]


def documented() -> tuple[str, list[list[str]]]:
    """The docs' command for a server, and those for hosts, from --num_shards on."""
    lines = (ROOT / "docs/recipes/imagenet.md").read_text().splitlines()
    (server,) = (line.partition("#")[0] for line in lines if "| redis-server -" in line)
    return server, [line.partition("--num_gpus 8")[2].split() for line in lines if "--num_gpus 8" in line]


@pytest.mark.long
def test_trains_what_as_many_ranks_train(started, digits, tmp_path):
    """In a folder, as the docs have it. (Several ranks on a host: test_spawn.py.)"""
    (tmp_path / "meet").mkdir()
    words = ["--data-dir", str(digits), *TRAIN, "--models-root"]
    train = [*words, str(tmp_path / "run")]
    _, commands = documented()
    pair = [[word.replace("/nfs/me", str(tmp_path / "meet")) for word in words] + train for words in commands[2:]]
    for status, printed in ended(*(started(*words) for words in pair)):
        assert status == 0, printed
    assert os.listdir(tmp_path / "meet") == []
    several([Given("recipes.mnist.main", [*words, str(tmp_path / "same")])], 2)
    assert losses(tmp_path / "run") == losses(tmp_path / "same")


@pytest.mark.long
def test_a_run_goes_on_without_the_server_it_met_in(started, tmp_path):
    """All as the docs have it."""
    skip_without()
    import redis

    port, password, go_on = free_port(), "a b'c", tmp_path / "go on"
    server, commands = documented()
    server = server.replace("10.0.0.1", "127.0.0.1").replace("6379", str(port))
    with subprocess.Popen(["bash", "-c", server], env={**os.environ, "REDIS_PASSWORD": password}) as running:
        more = ["--redis_port", str(port), "--until", str(go_on)]
        pair = [[word.replace("10.0.0.1", "127.0.0.1") for word in words] + more for words in commands[:2]]
        hosts = [started(*words, REDIS_PASSWORD=password) for words in pair]
        for host in hosts:
            assert password not in Path(f"/proc/{host.pid}/cmdline").read_text()
            assert any("of 2, 0 of 1 here: 3" in line for line in host.stdout)
        client = redis.Redis("127.0.0.1", port, password=password)
        assert client.keys() == [b"partial-fc:resnet-1"]
        assert 0 < client.ttl("partial-fc:resnet-1") <= 60
        client.shutdown(nosave=True)
        running.wait(30)
    go_on.touch()
    for host, (status, printed) in enumerate(ended(*hosts)):
        assert status == 0, printed
        assert password not in printed
        assert ("cannot be removed" in printed) == (host == 0)


@pytest.mark.long
def test_over_tls(started, tmp_path, monkeypatch):
    """With certificates on both sides, as Debian's server asks for."""
    new = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -addext subjectAltName=DNS:localhost -days 2"
    if subprocess.run([*new.split(), "-keyout", "key", "-out", "crt"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no openssl here to make a certificate with")
    key, crt = str(tmp_path / "key"), str(tmp_path / "crt")
    port = str(free_port())
    server = ["--tls-port", port, "--tls-cert-file", crt, "--tls-key-file", key, "--tls-ca-cert-file", crt]
    with redis_server(*server) as plain:
        tls = f"rediss://localhost?ssl_ca_certs={crt}&ssl_certfile={crt}&ssl_keyfile={key}"
        flags = ["--run_id", "tls", "--redis_port"]
        for status, printed in ended(*(started(*words, *flags, port, "--redis_host", tls) for words in shards(2))):
            assert status == 0, printed
        monkeypatch.setattr(stores, "_ANSWER_S", 1.0)
        wrong = ((port, "localhost"), (str(plain), tls), (port, "rediss://localhost"))
        for p, host in wrong:
            with pytest.raises(StartError, match=r"Redis at localhost:\d+ does not answer after 1 s: .*rediss://HOST"):
                rendezvous_job.main([*shards(2)[0], *flags, p, "--redis_host", host, "--start-timeout", "1"])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_command_that_is_ended_while_it_waits_leaves_nothing(started, tmp_path, number):
    flags = ["--run_id", "ended", "--file_store_path", str(tmp_path)]
    waiting = started(*shards(2, *flags)[0])
    children = Path(f"/proc/{waiting.pid}/task/{waiting.pid}/children")
    until(lambda: os.listdir(tmp_path) == ["partial-fc-ended"] and children.read_text(), job=waiting)
    waiting.send_signal(number)
    assert ended(waiting)[0][0] == 128 + number
    assert os.listdir(tmp_path) == []
