"""Sparse gradients over slow links: a DistributedDataParallel communication hook that sends non-zero rows.

`S2Reducer` averages gradients with few non-zero rows, such as those of embeddings; `s2_hook` has DDP use one.
"""

from oases_sparse.hook import s2_hook
from oases_sparse.reducer import S2Reducer

__all__ = ["S2Reducer", "s2_hook"]
