"""Fault campaign: runs that meet faults, compared with undisturbed runs. `python -m reliability.campaign --help`."""
