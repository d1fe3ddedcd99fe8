"""Mixture of experts that stays balanced: placements of experts by their loads. Source: arXiv 2411.10003."""
