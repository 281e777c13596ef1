"""Whose a folder is: one run at a time, and none that is gone."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from partial_fc.checkpoint import lock
from partial_fc.checkpoint.lock import InUse, LostLock, Record, acquire
from tests.waiting import until


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_S", 0.02)
    monkeypatch.setattr(lock, "_STALE_S", 0.6)
    monkeypatch.setattr(lock, "_POLL_S", 0.02)


def write(folder, number: int = 1, **facts: object) -> Record:
    """The record of a run that nobody keeps alive."""
    record = Record(**{**vars(Record.here("other", folder.stat().st_ino)), **facts})
    (folder / f"owner-{number}.json").write_bytes(lock._text(record, 0))
    return record


def records(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_that_is_in_use_is_refused_with_all_that_there_is_to_know(tmp_path):
    holder, note = acquire(tmp_path, "one")
    assert not note
    with pytest.raises(InUse) as refused:
        acquire(tmp_path, "two")
    mine, told = Record.here("one", 0), str(refused.value)
    for word in (str(tmp_path), mine.host, f"process {mine.process}", "since 20", f"kill {mine.process}"):
        assert word in told
    assert "--models-root" in told
    holder.check()
    holder.release()
    assert records(tmp_path) == []
    acquire(tmp_path, "two")[0].release()


def test_a_run_whose_process_is_gone_loses_its_folder_at_once(tmp_path, monkeypatch):
    """Also where its number is another process's now, and where it has ended and nobody has asked how."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(lock, "_STALE_S", 1e9)
    for process, start in ((gone.pid, 5), (os.getpid(), 5), (zombie.pid, 5)):
        record = write(tmp_path, process=process, start=start)
        holder, note = acquire(tmp_path, "new")
        assert f"{record}, which has ended" in note
        assert records(tmp_path) == ["owner-2.json"]
        holder.release()
    zombie.wait()


def test_a_run_of_another_host_is_known_by_what_it_does(tmp_path):
    """No process of another host can be seen: a record that is rewritten is alive, one that stands still is not."""
    record = write(tmp_path, host="far", machine="another boot")
    ended = threading.Event()

    def live() -> None:
        count = 0
        while not ended.wait(0.05):
            count += 1
            lock._put(tmp_path / "owner-1.json", record, count)

    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(InUse, match=f"process {record.process} on far"):
        acquire(tmp_path, "new")
    ended.set()
    thread.join()
    holder, note = acquire(tmp_path, "new")
    assert "on far" in note
    assert records(tmp_path) == ["owner-2.json"]
    holder.release()


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 5000, json.dumps({"run": 1}).encode(), b"\xff" * 3000])
def test_what_is_no_record_keeps_nobody_out_for_long(tmp_path, content):
    (tmp_path / "owner-7.json").write_bytes(content)
    acquire(tmp_path, "new")[0].check()
    assert records(tmp_path) == ["owner-8.json"]


def test_what_is_no_file_is_an_error(tmp_path):
    """A FIFO would not be opened before somebody writes to it."""
    os.mkfifo(tmp_path / "owner-3.json")
    with pytest.raises(OSError, match="no regular file") as refused:
        acquire(tmp_path, "new")
    assert refused.value.filename == str(tmp_path / "owner-3.json")


def test_a_process_that_was_stopped_finds_out_that_it_has_lost_its_folder(tmp_path):
    stopped, _ = acquire(tmp_path, "stopped")
    stopped._ended.set()
    text = (tmp_path / "owner-1.json").read_text().replace('"machine": "', '"machine": "elsewhere ')
    (tmp_path / "owner-1.json").write_text(text)
    holder, _ = acquire(tmp_path, "new")
    with pytest.raises(LostLock, match=f"is held by process {os.getpid()}"):
        stopped.check()
    stopped.release()
    holder.check()
    holder.release()


def test_a_record_that_was_removed_is_made_anew(tmp_path, caplog):
    """`rm -r` in the folder, to make room: by who looks next, and for all ranks of the run."""
    holder, _ = acquire(tmp_path, "run")
    other_rank = lock.Fence(tmp_path, holder.record)
    (tmp_path / "owner-1.json").unlink()
    holder.check()
    other_rank.check()
    assert "is created again" in caplog.text
    (tmp_path / "owner-1.json").unlink()
    until(lambda: records(tmp_path))  # its thread does it, too
    with pytest.raises(InUse):
        acquire(tmp_path, "second")
    holder.release()
    assert records(tmp_path) == []


def test_a_rank_that_does_not_keep_the_record_waits_for_it(tmp_path):
    holder, _ = acquire(tmp_path, "run")
    other_rank = lock.Fence(tmp_path, holder.record)
    holder._ended.set()
    (tmp_path / "owner-1.json").unlink()
    with pytest.raises(FileNotFoundError, match="record of this run was removed"):
        other_rank.check()


def test_a_disk_that_is_away_is_no_lost_folder(tmp_path):
    holder, _ = acquire(tmp_path, "run")
    tmp_path.rename(tmp_path.with_name("away"))
    with pytest.raises(FileNotFoundError):
        holder.check()
    tmp_path.with_name("away").rename(tmp_path)
    holder.check()
    holder.release()


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_start_at_once_one_gets_the_folder(tmp_path, stale):
    if stale:
        write(tmp_path, host="far", machine="another boot")
    barrier = threading.Barrier(8)

    def start(number: int) -> object:
        barrier.wait()
        try:
            return acquire(tmp_path, f"run {number}")[0]
        except InUse as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        got = [found for found in pool.map(start, range(8)) if not isinstance(found, InUse)]
    assert len(got) == 1
    assert len(records(tmp_path)) == 1
    got[0].check()
    got[0].release()


@pytest.mark.parametrize("stale", [False, True])
def test_who_comes_when_the_folder_has_just_been_taken_is_left_to_find_out(tmp_path, monkeypatch, stale):
    """Its record stands there for a moment: until it sees that it was too late."""
    if stale:
        write(tmp_path, process=1 << 30)
    listed, late = lock._records, tmp_path / "owner-9.json"

    def list_and_come_late(root):
        found = listed(root)
        if any((record := lock._read(path)) and record.run == "first" for path in found) and not late.exists():
            write(tmp_path, number=9, run="late")
        return found

    monkeypatch.setattr(lock, "_records", list_and_come_late)
    holder, note = acquire(tmp_path, "first")
    assert ("lock taken over" in note) == stale
    assert late.exists()
    holder.check()
    holder.release()


def test_a_record_that_is_new_under_the_number_of_a_stale_one_is_judged_anew(tmp_path, monkeypatch):
    write(tmp_path, process=1 << 30)
    create = lock._create

    def create_late(root, record):
        monkeypatch.setattr(lock, "_create", create)
        (tmp_path / "owner-1.json").unlink()  # it is taken over, that run ends, and another begins
        write(tmp_path, run="alive")
        return create(root, record)

    monkeypatch.setattr(lock, "_create", create_late)
    with pytest.raises(InUse):
        acquire(tmp_path, "slow")
    assert records(tmp_path) == ["owner-1.json"]


def test_a_refresh_that_has_begun_does_not_overwrite_the_next_runs_record(tmp_path, monkeypatch):
    begun, put = threading.Event(), lock._put

    def slow(*given):
        if not begun.is_set():
            begun.set()
            late.wait(0.3)
        put(*given)

    late = threading.Event()
    first, _ = acquire(tmp_path, "first")
    monkeypatch.setattr(lock, "_put", slow)
    assert begun.wait(10)
    first.release()
    second, _ = acquire(tmp_path, "second")
    late.wait(0.4)
    second.check()
    second.release()
    assert records(tmp_path) == []
