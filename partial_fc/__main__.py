"""`python -m partial_fc`, for launchers that start modules: the command `partial-fc`."""

from partial_fc.cli import main

main()
