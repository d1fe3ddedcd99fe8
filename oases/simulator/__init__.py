"""Timelines: what ran when, measured or predicted, as text, pictures and traces. Imports no torch."""

from oases.simulator.timeline import Span, Timeline

__all__ = ["Span", "Timeline"]
