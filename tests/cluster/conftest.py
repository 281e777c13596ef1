"""Two hosts on this machine (benchmarks/hosts/two_hosts.py), reached over ssh, and a small job to start on them."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts, Unavailable, two_hosts
from tests.recipes.conftest import glyphs  # noqa: F401 (a fixture)
from tests.running import SMALL, environment

# Made-up images, since all that counts is who computes what with whom.
JOB = [*SMALL, *shlex.split("--dataset synthetic --num-classes 100 --image-size 32 --batch-size 8")]


@pytest.fixture(scope="session")
def hosts() -> Iterator[TwoHosts]:
    """Skips, with the reason, where this machine or this user cannot have them."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(two_hosts())
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield made


HOSTS = ",".join(f"{address}:1" for address in ADDRESSES)
_LOCAL = "--start-timeout 300 -np 2 -H localhost:2"
# --disable-cache: or it writes into the user's home that these addresses answer.
_NETWORK = "--network-interfaces eth0 --disable-cache"
_REMOTE = f"--start-timeout 300 -np 2 -H {HOSTS} {_NETWORK}"
_TORCHRUN = f"torchrun --nnodes=2 --nproc_per_node=1 --master_addr={ADDRESSES[0]} --master_port=8887"


def commands(folder: Path, recipe: str) -> dict[tuple[str, int], list[list[str]]]:
    """(launcher, hosts) -> what is typed on the first host, or on each; the job's own words follow. The environment has
    RECIPE and NETWORK_INTERFACE."""
    (folder / "hosts").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    train = f"train.py {recipe}"
    own = f"{sys.executable} {train}"
    typed = {
        ("--gpus, --nodes", 1): [f"{own} --gpus 2"],
        ("--gpus, --nodes", 2): [
            f"{own} --nodes 2 --master-addr {ADDRESSES[0]} --master-port 8888 --nr {host}" for host in (0, 1)
        ],
        ("torchrun", 1): [f"torchrun --standalone --nproc_per_node=2 {train}"],
        ("torchrun", 2): [f"{_TORCHRUN} --node_rank={host} {train}" for host in (0, 1)],
        ("horovodrun --gloo", 1): [f"horovodrun --gloo {_LOCAL} bash config.sh"],
        ("horovodrun --gloo", 2): [f"horovodrun --gloo {_REMOTE} bash config.sh"],
        ("run.sh", 1): ["bash run.sh"],
        ("run.sh", 2): [f"bash run.sh {folder}/hosts"],
    }
    return {key: [shlex.split(line) for line in lines] for key, lines in typed.items()}


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    """The environment of every process on the hosts."""
    return environment()
