"""Measures on this machine what the simulator and the planner need to know of it: blocks, links, contention."""
