"""Sparse gradients over slow links: a communication hook for DistributedDataParallel that sends what is needed.

`S2Reducer` averages gradients of which few rows are not zero, those of embeddings; `s2_hook` has DDP use one.
"""

from oases.sparse.hook import s2_hook
from oases.sparse.reducer import S2Reducer

__all__ = ["S2Reducer", "s2_hook"]
