"""Fuzzing, guided by coverage: `python -m tests.faults.fuzz bin --inputs 100000`.

Inputs are valid files, changed by `mutate` and by libFuzzer itself; those that reach code that no other has reached are
kept and changed further, and so are those that cost most of what a file of their size may cost (watching.py), of time
or memory. A fault does not end the run: each is told once, and the input that showed it kept under
FOLDER/READER/found. The exit status is 1 where there was any. A crash or a hang ends the process; libFuzzer keeps the
input. Needs atheris (pip install atheris).
"""

import argparse
import logging
import os
import random
import sys
import time
from pathlib import Path

import atheris

# What is imported in here counts which of its lines are reached.
with atheris.instrument_imports(
    include=[
        *("partial_fc.data", "partial_fc.checkpoint", "partial_fc.models", "partial_fc.foreign", "recipes"),
        *(
            "partial_fc.verbs.doctor",
            "partial_fc.verbs.launcher",
            "partial_fc.evaluate",
            "partial_fc.verbs.report",
            "partial_fc.embedding",
        ),
    ]
):
    from tests.faults.readers import READERS
    from tests.faults.trial import Trial

from tests.faults.mutations import mutate
from tests.faults.reader import Reader
from tests.faults.watching import Fault, Watched

_COSTLY, _WORTH_A_LOOK = 24, 0.02


class Session:
    """One reader's run: counts outcomes, tells each fault once."""

    def __init__(self, reader: Reader, folder: Path, num_inputs: int) -> None:
        self.reader = reader
        self.trial = Trial(reader, folder / "files")
        self.found = folder / "found"
        self.found.mkdir(parents=True, exist_ok=True)
        self.corpus = folder / "corpus"
        self.corpus.mkdir(exist_ok=True)
        self.start = time.monotonic()
        self.num_inputs = num_inputs
        self.count = 0
        self.outcomes: dict[str, int] = {}
        self.faults: dict[str, str] = {}
        self.costly: list[tuple[float, bytes]] = []  # the share of its budget that an input took; the costliest first

    def one(self, data: bytes) -> None:
        self.count += 1
        try:
            watched = self.trial.read(data)
            outcome = watched.outcome
            self._keep_costly(data, watched)
        except Fault as fault:
            outcome = "fault"
            kind = f"{str(fault).partition(':')[0]} {fault.where}"
            if kind not in self.faults:
                self.faults[kind] = str(fault)
                (self.found / f"{len(self.faults):03d}").write_bytes(data)
                print(f"FAULT {self.reader.name}: {fault}", flush=True)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if self.count == self.num_inputs:
            self.end()

    def _keep_costly(self, data: bytes, watched: Watched) -> None:
        cost = watched.cost(len(data))
        if len(self.costly) == _COSTLY and cost <= self.costly[-1][0]:
            return
        if cost > _WORTH_A_LOOK:  # other programs and the collector of garbage cost, too: what it costs again counts
            cost = min(cost, self.trial.read(data).cost(len(data)))
        self.costly = sorted([*self.costly, (cost, data)], key=lambda entry: -entry[0])[:_COSTLY]

    def end(self) -> None:
        outcomes = ", ".join(f"{n} {kind}" for kind, n in sorted(self.outcomes.items()))
        took = time.monotonic() - self.start
        print(
            f"{self.reader.name}: {self.count} inputs in {took:.0f} s: {outcomes}; {len(self.faults)} fault(s); "
            f"{len(list(self.corpus.iterdir()))} inputs that reach different code kept; the costliest took "
            f"{self.costly[0][0] if self.costly else 0:.0%} of its budget",
            flush=True,
        )
        os._exit(1 if self.faults else 0)

    def change(self, data: bytes, max_size: int, seed: int) -> bytes:
        """libFuzzer's custom mutator."""
        generator = random.Random(seed)
        if generator.random() < 0.3:
            return atheris.Mutate(data, max_size)
        if generator.random() < 0.05:
            data = generator.choice(self.trial.seeds)[self.reader.changed]
        elif self.costly and generator.random() < 0.3:
            _, data = generator.choice(self.costly)
        return mutate(data, generator, self.reader.words, self.reader.inside)[:max_size]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reader", choices=sorted(READERS))
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="what is found, and the corpus")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    folder = options.folder / options.reader
    session = Session(READERS[options.reader], folder, options.inputs)
    for number, files in enumerate(session.trial.seeds):
        (session.corpus / f"seed-{number}").write_bytes(files[session.reader.changed])
    # Processor time is watched (watching.py); this is for what waits for ever, on a machine however busy.
    libfuzzer = [f"-seed={options.seed}", "-max_len=65536", "-len_control=0", "-timeout=600", "-rss_limit_mb=8192"]
    libfuzzer += ["-verbosity=0", "-close_fd_mask=2", f"-artifact_prefix={session.found}/", str(session.corpus)]
    atheris.Setup([sys.argv[0], *libfuzzer], session.one, custom_mutator=session.change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
