"""The stores in which hosts without a launcher meet: a real Redis server and real folders."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from partial_fc.comm import StartError
from partial_fc.comm.launch import stores
from partial_fc.comm.launch.stores import FolderStore, RedisStore
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
def pair(request, tmp_path):
    """Two stores, as two processes have them, of one run."""
    if request.param == "redis":
        connect = request.getfixturevalue("connect")
        connect().flushall()
        made = [RedisStore(connect(), "run 1") for _ in range(2)]
    else:
        made = [FolderStore(tmp_path, "run 1") for _ in range(2)]
    yield made
    for store in made:
        store.close()


def test_what_one_sets_the_other_gets(pair):
    one, other = pair
    one.set("a", "text")
    one.set("b", b"\x00\xff\n")
    assert other.read("a") == b"text"
    assert other.read("b") == b"\x00\xff\n"
    one.set("a", "more")
    assert other.read("a") == b"more"
    assert other.check(["a", "b"])
    assert not other.check(["a", "c"])
    assert one.delete_key("a")
    assert not other.delete_key("a")
    assert not other.check(["a"])


def test_of_many_that_claim_a_key_one_has_it(pair):
    with ThreadPoolExecutor(16) as threads:
        for key in "abc":
            found = list(threads.map(lambda n, k=key: pair[n % 2].compare_set(k, "", str(n)), range(16)))
            assert len(set(found)) == 1
            assert pair[0].read(key) == found[0]


# ---- Redis


def test_runs_do_not_see_each_other_and_keys_carry_the_run_id(connect):
    client = connect()
    client.flushall()
    one, other = RedisStore(connect(), "run-1"), RedisStore(connect(), "run-2")
    one.set("a", "1")
    assert not other.check(["a"])
    assert client.keys() == [b"partial-fc:run-1"]
    one.delete_key("a")
    assert client.keys() == []
    one.close()
    other.close()


def test_a_key_expires_unless_it_is_refreshed(connect):
    """Whatever has written it."""
    client = connect()
    verbs = {"set": ("a", "1"), "compare_set": ("a", "", "1")}
    made = [RedisStore(connect(), verb, expire_s=2) for verb in verbs]
    for store, (verb, arguments) in zip(made, verbs.items(), strict=True):
        getattr(store, verb)(*arguments)
        assert 0 < client.pttl(store.key) <= 2000
    time.sleep(2.3)
    for store in made:
        assert store.check(["a"])  # refreshed
        store.close()
    time.sleep(2.1)
    assert not client.exists(*(store.key for store in made))


def test_a_server_that_goes_away_is_noted_once(connect, capsys):
    import redis

    with redis_server() as port:
        store = RedisStore(redis.Redis("127.0.0.1", port, protocol=2, retry=None), "lonely", expire_s=1)
        store.set("a", "1")
    deadline = time.monotonic() + 20
    noted = ""
    while "cannot be refreshed" not in noted:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        noted += capsys.readouterr().err
    time.sleep(1)
    store.close()
    assert (noted + capsys.readouterr().err).count("cannot be refreshed") == 1


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

    connect().set("partial-fc:r", "somebody's")
    store = open_at(port)
    with pytest.raises(redis.RedisError, match="WRONGTYPE"):
        store.read("a")
    store.close()
    connect().flushall()


# ---- folders


def test_a_folder_is_for_its_owner_alone_and_goes_with_its_last_file(tmp_path):
    store = FolderStore(tmp_path, "a/../b é")
    assert [path.name for path in tmp_path.iterdir()] == ["partial-fc-a%2F..%2Fb%20%C3%A9"]
    assert store.folder.stat().st_mode & 0o777 == 0o700
    store.set("x", "1")
    store.set("y/z", "2")
    assert sorted(os.listdir(store.folder)) == ["x", "y%2Fz"]
    store.delete_key("x")
    assert store.folder.exists()
    store.delete_key("y/z")
    assert not store.folder.exists()
    store.compare_set("x", "", "1")  # a run that starts as another one ends
    assert store.read("x") == b"1"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "partial-fc-r").mkdir()
    (tmp_path / "partial-fc-r").chmod(0o777)
    with pytest.raises(StartError, match="others could write into it"):
        stores.open_folder(tmp_path, "r")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "partial-fc-s").symlink_to("elsewhere")
    with pytest.raises(StartError, match="others could write into it"):
        stores.open_folder(tmp_path, "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "partial-fc-r").mkdir(mode=0o755)
    os.chown(tmp_path / "partial-fc-r", 12345, 12345)
    with pytest.raises(StartError, match="another user's"):
        stores.open_folder(tmp_path, "r")


@pytest.mark.parametrize("shared", ["/sys", "/no/such/folder", "/etc/passwd"])
def test_a_folder_that_cannot_be_written_to_is_an_error(shared):
    with pytest.raises(StartError, match=rf"--file-store-path {shared}: .*the same one on all hosts"):
        stores.open_folder(stores.Path(shared), "r")


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    store = FolderStore(tmp_path, "r")
    os.mkfifo(store.folder / "a")
    assert store.read("a") == b""
    (store.folder / "b").symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        store.read("b")
