"""Simulator of schedules and plans, and timelines as text, pictures and traces. Imports no torch."""

from oases.simulator.cost import StackCosts
from oases.simulator.simulate import simulate
from oases.simulator.timeline import Span, Timeline

__all__ = ["Span", "StackCosts", "Timeline", "simulate"]
