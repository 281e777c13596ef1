"""The stores in which hosts without a launcher meet: a real Redis server and real folders."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from partial_fc.comm import StartError
from partial_fc.comm.launch import stores
from partial_fc.comm.launch.stores import FileStore, RedisStore
from tests.redis_server import free_port, redis_server, skip_without


@pytest.fixture(scope="module")
def port():
    with redis_server() as port:
        yield port


@pytest.fixture(scope="module")
def connect(port):
    import redis

    return lambda **more: redis.Redis("127.0.0.1", port, protocol=2, **more)


@pytest.fixture(params=["redis", "folder"])
def opened(request, tmp_path):
    """Opens the store of a run, as a process of it does."""
    if request.param == "folder":
        return lambda: FileStore(tmp_path, "run 1")
    connect = request.getfixturevalue("connect")
    connect().flushall()
    return lambda: RedisStore(connect(), "run 1")


def test_one_of_many_announces_and_removes(opened):
    made = [opened() for _ in range(16)]
    assert made[0].read() is None
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda n: made[n].announce(str(n)), range(16)))
    number = found.index(None)
    assert found.count(None) == 1
    assert set(found) - {None} == {str(number).encode()}
    for n, store in enumerate(made):
        assert bool(store.mine) == (n == number)
        if n != number:
            store.close()
    late = opened()
    assert late.read() == str(number).encode()
    made[number].close()
    assert late.read() is None
    late.close()


def test_the_announcement_of_a_run_that_took_the_place_stays(opened):
    first, second = opened(), opened()
    first.announce("first")
    first.remove()  # as by hand, with `leftover`
    second.announce("second")
    first.close()
    assert second.read() == b"second"
    second.close()


# ---- Redis


def test_runs_do_not_see_each_other_and_keys_carry_the_run_id(connect):
    client = connect()
    client.flushall()
    one, other = RedisStore(connect(), "run-1"), RedisStore(connect(), "run-2")
    one.announce("1")
    assert other.read() is None
    assert client.keys() == [b"partial-fc:run-1"]
    one.close()
    assert client.keys() == []
    other.close()


def test_a_key_expires_unless_it_is_refreshed(connect):
    client = connect()
    store = RedisStore(connect(), "expires", expire_s=2)
    store.announce("1")
    assert 0 < client.pttl(store.key) <= 2000
    time.sleep(2.3)
    assert store.read() == b"1"  # refreshed
    store.mine = b""  # as if killed
    store.close()
    time.sleep(2.1)
    assert not client.exists(store.key)


def test_a_server_that_goes_away_is_noted_once(connect, capsys):
    import redis

    with redis_server() as port:
        store = RedisStore(redis.Redis("127.0.0.1", port, protocol=2, retry=None), "lonely", expire_s=1)
        store.announce("1")
    deadline = time.monotonic() + 20
    noted = ""
    while "cannot be refreshed" not in noted:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        noted += capsys.readouterr().err
    time.sleep(1)
    store.close()
    noted += capsys.readouterr().err
    assert noted.count("cannot be refreshed") == noted.count("cannot be removed") == 1


def open_at(port: int, timeout_s: float = 0.5, **more) -> RedisStore:
    return stores.open_redis("127.0.0.1", port, "r", timeout_s, **more)


def test_a_server_that_is_not_there_is_an_error_in_time():
    skip_without()
    port, started = free_port(), time.monotonic()
    with pytest.raises(StartError, match=rf"Redis at 127.0.0.1:{port} does not answer after 0.5 s: .*--redis-host"):
        open_at(port)
    assert time.monotonic() - started < 20


def test_a_wrong_password_is_an_error_at_once():
    with redis_server("--requirepass", "right") as port:
        open_at(port, password="right").close()
        for wrong in ({}, {"password": "wrong"}, {"username": "nobody", "password": "right"}):
            with pytest.raises(StartError, match=r"refuses this process.*REDIS_PASSWORD"):
                open_at(port, 20, **wrong)


def test_a_key_of_another_kind_is_an_error(connect, port):
    import redis

    connect().hset("partial-fc:r", "somebody's", "1")
    store = open_at(port)
    with pytest.raises(redis.RedisError, match="WRONGTYPE"):
        store.read()
    store.close()
    connect().flushall()


# ---- folders


def test_a_file_is_for_its_owner_alone(tmp_path):
    store = FileStore(tmp_path, "a/../b é")
    store.announce("1")
    (path,) = tmp_path.iterdir()
    assert path.name == "partial-fc-a%2F..%2Fb%20%C3%A9"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_others_may_write_is_refused(tmp_path):
    path = tmp_path / "partial-fc-r"
    path.write_text("1")
    path.chmod(0o666)
    with pytest.raises(StartError, match="another user's"):
        FileStore(tmp_path, "r").read()
    if os.geteuid() == 0:  # only root may give files away
        path.chmod(0o600)
        os.chown(path, 12345, 12345)
        with pytest.raises(StartError, match="another user's"):
            FileStore(tmp_path, "r").announce("2")


@pytest.mark.parametrize("shared", ["/sys", "/no/such/folder", "/etc/passwd"])
def test_a_folder_that_cannot_be_written_to_is_an_error(shared):
    with pytest.raises(StartError, match=rf"--file-store-path {shared}: .*the same one on all hosts"):
        FileStore(stores.Path(shared), "r")


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "partial-fc-a", 0o600)
    with pytest.raises(StartError, match="partial-fc-a"):
        FileStore(tmp_path, "a").read()
    (tmp_path / "partial-fc-b").symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        FileStore(tmp_path, "b").read()
