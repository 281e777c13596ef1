"""`python -m tests.faults.torture`: repeats a training with processes killed, and compares the losses."""

import sys

from tests.faults.torture.command import torture

if __name__ == "__main__":
    sys.exit(torture(sys.argv[1:]))
