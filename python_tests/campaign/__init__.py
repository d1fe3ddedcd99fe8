"""Fault campaign: runs that meet faults, compared with undisturbed runs. `python python_tests/campaign --help`."""
