"""The command of GluonCV's tutorial for several machines, with our programs in place of launch.py and
train_recognizer.py: two hosts whose disks are their own."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts
from tests.recipes.kinetics import videos

R50 = "slowfast_4x16_resnet50_kinetics400"
# The tutorial's words in its order; behind them what makes everything small.
LAUNCH = "partial-fc launch -n 2 -H {disk}/host.txt --launcher ssh python ./train.py kinetics"
TUTORIAL = (
    "--dataset kinetics400 --data-dir {disk}/train --val-data-dir {disk}/val --train-list {disk}/train.txt "
    "--val-list {disk}/val.txt --dtype float32 --mode hybrid --prefetch-ratio 1.0 --kvstore dist_sync_device "
    f"--model {R50} --slowfast --slow-temporal-stride 16 --fast-temporal-stride 2 --video-loader --use-decord "
    "--num-classes 2 --batch-size 1 --num-gpus 1 --num-data-workers 1 --input-size 32 --new-height 32 --new-width 40 "
    "--new-length 64 --new-step 1 --lr-mode cosine --lr 0.02 --momentum 0.9 --wd 0.0001 --num-epochs 2 "
    "--warmup-epochs 1 --warmup-lr 0.01 --scale-ratios 1.0,0.8 --save-frequency 1 --log-interval 1 "
    "--logging-file slowfast_4x16.log --save-dir {disk}/checkpoints --width 8"
)


@pytest.fixture
def disk(hosts: TwoHosts, tmp_path) -> Path:
    """A folder at the same path on both hosts, of each its own, with equal videos and lists in it."""
    source, disk = tmp_path / "source", tmp_path / "disk"
    disk.mkdir()
    for part, count in (("train", 4), ("val", 2)):
        for i in range(count):
            videos.write(source / f"{part}/class_{i % 2}/{i}.mp4", 66)
        (source / f"{part}.txt").write_text("".join(f"class_{i % 2}/{i} 66 {i % 2}\n" for i in range(count)))
    (source / "host.txt").write_text("".join(f"{address}\n" for address in ADDRESSES))
    for host in (0, 1):
        assert hosts.run(host, ["mount", "-t", "tmpfs", "tmpfs", str(disk)], timeout_s=10) == (0, "")
        assert hosts.run(host, ["cp", "-r", f"{source}/.", str(disk)], timeout_s=10) == (0, "")
    return disk


def read(hosts: TwoHosts, host: int, path: Path) -> bytes:
    return Path(f"/proc/{hosts.pids[host]}/root{path}").read_bytes()


def said(printed: str, host: int) -> list[str]:
    """What the worker of that host wrote to the launching terminal."""
    prefix = f"worker {host}: "
    return [line.removeprefix(prefix) for line in printed.splitlines() if line.startswith(prefix)]


@pytest.mark.long
def test_the_command_of_the_tutorial(hosts, env, disk):
    before = [hosts.sent_bytes(host) for host in (0, 1)]
    words = shlex.split(f"{LAUNCH} {TUTORIAL}".format(disk=disk))
    status, printed = hosts.run(0, words, timeout_s=100, env=env)
    assert status == 0, printed[-6000:]

    # Each worker tells here what it does: accuracy and loss of its own clips, of all where an epoch ends.
    by_worker = [said(printed, host) for host in (0, 1)]
    for lines in by_worker:
        assert any(line.startswith("note: --kvstore dist_sync_device: there are no servers") for line in lines)
        assert "Total batch size is set to 2 on 2 processes" in lines
        batches = [match[1] for line in lines if (match := re.match(r"Epoch\[(\d+)\] Batch \[\d+\]/\[0002\]\t", line))]
        assert batches == ["000", "000", "001", "001"]
    of_all = [[line for line in lines if re.match(r"\[Epoch \d+\] (training|validation)", line)] for lines in by_worker]
    assert len(of_all[0]) == 4
    assert of_all[0] == of_all[1]
    own = [[line.split("\t")[3] for line in lines if line.startswith("Epoch[")] for lines in by_worker]
    assert own[0] != own[1]

    # What they learn together went through the cable: 533,235 values of 4 bytes in each of 4 updates.
    for host in (0, 1):
        assert hosts.sent_bytes(host) - before[host] > 4 * 4 * 533_235

    # Files are on each machine: its own rank's of a checkpoint, its own log, the same weights.
    for host in (0, 1):
        log = read(hosts, host, disk / "checkpoints/slowfast_4x16.log").decode().splitlines()
        assert [line for line in log if line not in by_worker[host]] == []
        assert log[0].startswith("Namespace(")
        _, found = hosts.run(host, ["find", str(disk / "checkpoints/checkpoints/step-00000004")], timeout_s=10)
        assert [int(rank) for rank in re.findall(r"rank-(\d+)-of-00002.safetensors", found)] == [host]
        assert "step-00000004/COMPLETE" in found
    last = disk / f"checkpoints/kinetics400-{R50}-001.params"
    assert read(hosts, 0, last) == read(hosts, 1, last)
