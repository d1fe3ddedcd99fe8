"""`python -m oases` is the command `oases`."""

from oases.cli import main

main()
