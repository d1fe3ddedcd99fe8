"""Profiler of this machine for the simulator and planner: blocks, links, contention, memory, overlap."""
