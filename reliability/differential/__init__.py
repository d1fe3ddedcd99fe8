"""Differential fuzzing: random training programs in one process and over ranks of `oases.parallelize`."""
