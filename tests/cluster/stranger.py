"""Whoever listens of a job."""

import contextlib
import os
import socket
import struct
from pathlib import Path

import psutil


def listeners(host: int, of: str) -> set[tuple[str, str, int]]:
    """Who of a job listens on a host: what the process is, address, port. host: a process that is there, seen from
    outside of it, as root; of: a word in the command line of the job's processes."""
    network = os.readlink(f"/proc/{host}/ns/net")
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            # orted's own words do not name its job; those of its processes do.
            family = process.children(recursive=True) if "orted" in " ".join(words[:1]) else [process]
            is_ours = any(of in " ".join(one.cmdline()) for one in family)
            if is_ours and os.readlink(f"/proc/{process.pid}/ns/net") == network:
                found |= {(_what(words, process.environ()), *at) for at in _listening(process.pid)}
    return found


def _listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of a process, in its own network (psutil takes its reader's); see proc_net_tcp(5)."""
    numbers = os.listdir(f"/proc/{pid}/fd")
    own = {os.readlink(f"/proc/{pid}/fd/{number}") for number in numbers if os.path.exists(f"/proc/{pid}/fd/{number}")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                address, _, port = local.partition(":")
                # Words of 32 bits, each in this machine's own order.
                words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)))
    return found


def _what(words: list[str], environ: dict[str, str]) -> str:
    programs = [Path(word).name for word in words[:3]]
    for launcher in ("horovodrun", "torchrun", "mpirun", "orted"):
        if launcher in programs:
            return launcher
    for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"):
        if name in environ:
            return "rank 0" if environ[name] == "0" else "other ranks"
    return " ".join(words)[:80]
