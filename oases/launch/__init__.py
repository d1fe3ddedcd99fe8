"""Launcher of a run's ranks: elastic agents, the fork server, rank start-up."""
