"""Names of the compiled extension `oases_staged._C`, loaded only beside the torch that it was built against."""

from __future__ import annotations

import torch

from oases_staged.built import why_unfit

if _unfit := why_unfit("oases_staged._C", torch.__version__):
    raise ImportError(_unfit)

from oases_staged._C import nodes_backend, register_stream_words, staged_backend

__all__ = ["nodes_backend", "register_stream_words", "staged_backend"]
