"""Time and memory of starting on 70,000,000 records in 33 .rec files, and of checking 17,000,000 in one.

    python -m benchmarks.many_records FOLDER [--records 70000000] [--files 33] [--doctor 17091657]

The .rec files of the first are sparse: only what the first batch reads is there; their indices are whole. The second
has tiny records. Each measurement is a process of its own; memory is the growth of its peak beyond what the imports
take. Needs 3 GB of disk and some minutes.
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
BATCH, SEED = 128, 1
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
    for index in (order.select(BATCH * batch, BATCH, 0, 1).index_B for batch in range(8)):
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


def now_mb() -> tuple[int, int]:
    """Returns what this process has of its own, and pages of files, which all processes share."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) // 1024, int(lines["RssFile"].split()[0]) // 1024


def start(pattern: str) -> None:
    """Opens the sets and loads a batch, in this process."""
    from partial_fc.data.loader import Loader
    from partial_fc.data.sets.joined import open_sets
    from partial_fc.data.transform import SquareImage, mirror

    # What the first use of a library takes is no matter of the records.
    SquareImage(112, mirror)
    Keyed(1000, SEED).select(0, BATCH, 0, 1)
    before, began = now_mb(), time.perf_counter()
    source = open_sets([Path(pattern)])
    opened = time.perf_counter() - began
    with Loader(source, SquareImage(112, mirror), batch_size=BATCH, seed=SEED, num_workers=2) as loader:
        next(loader)
    seconds = time.perf_counter() - began
    own, mapped = (after - old for after, old in zip(now_mb(), before, strict=True))
    print(f"{len(source):,} records: opened in {opened:.2f} s, first batch after {seconds:.2f} s; {own} MB of its own, "
          f"{mapped} MB of pages that processes share")  # fmt: skip


def check(folder: str) -> None:
    """Checks index, headers and labels, in this process."""
    from partial_fc.verbs.doctor.data import DataOptions, doctor_data

    before, began = peak_mb(), time.process_time()
    doctor_data(DataOptions(Path(folder), images=False, bar=False))
    print(f"doctor data --no-images: {time.process_time() - began:.0f} s of CPU time, {peak_mb() - before:.0f} MB")


def measure(function: str, argument: str) -> None:
    subprocess.run([sys.executable, "-m", __spec__.name, function, argument], check=True)


def main() -> None:
    if sys.argv[1] in ("start", "check"):
        globals()[sys.argv[1]](sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--records", type=int, default=70_000_000)
    parser.add_argument("--files", type=int, default=33)
    parser.add_argument("--doctor", type=int, default=17_091_657, help="0: no check")
    options = parser.parse_args()
    if options.records:
        make(options.folder / "many", options.records, options.files)
        for _ in range(3):  # the first writes the copies of the indices
            measure("start", f"{options.folder}/many/*.rec")
    if options.doctor:
        make_tiny(options.folder / "one", options.doctor)
        measure("check", str(options.folder / "one"))


if __name__ == "__main__":
    main()
