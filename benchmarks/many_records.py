"""Time and memory of starting on 70,000,000 records in 33 .rec files, and of checking 17,000,000 in one.

    python -m benchmarks.many_records FOLDER [--records 70000000] [--files 33] [--doctor 17091657]

The .rec files of the first are sparse: only what the first batches read is there; their indices are whole. The second
has tiny records. Each start is processes of its own, 1 and 4 at once, each of which loads four batches and keeps what
it has until the others have measured, too. Memory is the growth since the imports: what is the process's own, and the
mapped pages of the files, as a process by itself counts them, and its share of them. Needs 3 GB of disk and some
minutes.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np

from partial_fc.data.order import Keyed
from partial_fc.data.recordio import HEADER, MAGIC, pack

STRIDE = 7000 // 4 * 4  # bytes of a record
BATCH, BATCHES, SEED = 128, 4, 1
MOST = 4  # processes at once
CLASSES = 2_000_000


def make(folder: Path, num_records: int, num_files: int) -> None:
    """Writes sparse .rec files, whose .idx are links to one file."""
    folder.mkdir(parents=True, exist_ok=True)
    each = num_records // num_files
    write_index(folder / "00.idx", each, STRIDE)
    image = cv2.imencode(".jpg", np.zeros((112, 112, 3), np.uint8))[1].tobytes()
    record = pack(0.0, image)
    frame = np.array([MAGIC, len(record)], "<u4").tobytes() + record
    for number in range(num_files):
        if number:
            os.link(folder / "00.idx", folder / f"{number:02}.idx")
        with (folder / f"{number:02}.rec").open("wb") as file:
            file.write(frame)
            file.truncate(each * STRIDE)
    (folder / "property").write_text(f"{CLASSES},112,112")
    order = Keyed(each * num_files, SEED)
    for index in (order.select(BATCH * batch, BATCH, 0, 1).index_B for batch in range(MOST * 2 * BATCHES)):
        for file_number, row in (divmod(i, each) for i in index.tolist()):
            with (folder / f"{file_number:02}.rec").open("r+b") as file:
                file.seek(row * STRIDE)
                file.write(frame)


def write_index(path: Path, num_records: int, stride: int) -> None:
    with path.open("w", newline="\n") as file:
        for start in range(0, num_records, 2**20):
            rows = range(start, min(num_records, start + 2**20))
            file.write("".join(f"{row}\t{row * stride}\n" for row in rows))


def make_tiny(folder: Path, num_records: int) -> None:
    """Writes one .rec of records of 16 bytes, sorted by class."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["magic", "length", "flag:u4", "label:f4", "id:u8", "id2:u8", "content:S16"]
    kind = np.dtype([(name, f"<{form or 'u4'}") for name, _, form in (field.partition(":") for field in fields)])
    with (folder / "train.rec").open("wb") as file:
        for start in range(0, num_records, 2**20):
            rows = np.arange(start, min(num_records, start + 2**20))
            record = np.zeros(len(rows), kind)
            record["magic"], record["length"] = MAGIC, HEADER.size + 16
            record["label"], record["id"], record["content"] = rows // 48, rows, b"no image at all"
            record.tofile(file)
    write_index(folder / "train.idx", num_records, kind.itemsize)
    (folder / "property").write_text(f"{(num_records + 47) // 48},112,112")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def now_mb(folder: str) -> list[float]:
    """Returns this process's own memory, the pages of files in the folder that it maps, and its share of them: a page
    that four processes map counts a quarter."""
    own_kb = mapped_kb = share_kb = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the head of a mapping
            inside = folder in line
        elif name == "Anonymous:":
            own_kb += int(values[0])
        elif inside and name == "Rss:":
            mapped_kb += int(values[0])
        elif inside and name == "Pss:":
            share_kb += int(values[0])
    return [kb / 1024 for kb in (own_kb, mapped_kb, share_kb)]


def start(pattern: str, rank: str, num_processes: str) -> None:
    """Opens the sets and loads batches, in this process; waits for a line before it measures and before it ends."""
    from partial_fc.data.loader import Loader
    from partial_fc.data.sets.joined import open_sets
    from partial_fc.data.transform import SquareImage, mirror

    # What the first use of a library takes is no matter of the records.
    SquareImage(112, mirror)
    Keyed(1000, SEED).select(0, BATCH, 0, 1)
    folder = str(Path(pattern).parent)
    before, began = now_mb(folder), time.perf_counter()
    source = open_sets([Path(pattern)])
    opened = time.perf_counter() - began
    loader = Loader(source, SquareImage(112, mirror), batch_size=BATCH, rank=int(rank), world_size=int(num_processes),
                    seed=SEED, num_workers=2)  # fmt: skip
    with loader:
        next(loader)
        seconds = time.perf_counter() - began
        for _ in range(BATCHES - 1):
            next(loader)
    print("loaded", flush=True)
    input()
    own, mapped, share = (after - old for after, old in zip(now_mb(folder), before, strict=True))
    print(f"{len(source):,} records: opened in {opened:.2f} s, first batch after {seconds:.2f} s; {own:.0f} MB of its "
          f"own, {mapped:.0f} MB of mapped files, {share:.0f} MB as its share of them", flush=True)  # fmt: skip
    input()


def check(folder: str) -> None:
    """Checks index, headers and labels, in this process."""
    from partial_fc.verbs.doctor.data import DataOptions, doctor_data

    before, began = peak_mb(), time.process_time()
    doctor_data(DataOptions(Path(folder), images=False, bar=False))
    print(f"doctor data --no-images: {time.process_time() - began:.0f} s of CPU time, {peak_mb() - before:.0f} MB")


def measure_starts(pattern: str, num_processes: int) -> None:
    """Starts processes at once, and prints what each says once all have loaded."""
    command = [sys.executable, "-m", __spec__.name, "start", pattern]
    ends = [[str(rank), str(num_processes)] for rank in range(num_processes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command + end, **pipes) for end in ends]  # type: ignore[call-overload]
    print(f"{num_processes} at once:")
    for moment in range(3):
        said = [process.stdout.readline() for process in started]
        for process, line in zip(started, said, strict=True):
            if moment == 1:
                print("   ", line.strip())
            if moment < 2:
                print(file=process.stdin, flush=True)
    if any(process.wait() for process in started):
        raise SystemExit(1)


def main() -> None:
    if sys.argv[1] in ("start", "check"):
        globals()[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--records", type=int, default=70_000_000)
    parser.add_argument("--files", type=int, default=33)
    parser.add_argument("--doctor", type=int, default=17_091_657, help="0: no check")
    options = parser.parse_args()
    if options.records:
        make(options.folder / "many", options.records, options.files)
        for num_processes in (1, 1, 1, MOST):  # the first writes the copies of the indices
            measure_starts(f"{options.folder}/many/*.rec", num_processes)
    if options.doctor:
        make_tiny(options.folder / "one", options.doctor)
        command = [sys.executable, "-m", __spec__.name, "check", str(options.folder / "one")]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
