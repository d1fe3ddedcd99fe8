"""A word-level LSTM language model whose embedding and softmax both get gradients of few rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def log_uniform(count: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """`count` words drawn with the chances of `log_chances`, int64 [count]; a word may come more than once."""
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return ((drawn * math.log(vocabulary + 1)).exp().long() - 1).clamp(0, vocabulary - 1)


def log_chances(words: Tensor, vocabulary: int) -> Tensor:
    """The logarithm of each word's chance under Zipf's law, words in descending order of frequency."""
    return torch.log(torch.log1p(1 / (words + 1.0)) / math.log(vocabulary + 1))


class WordLSTM(nn.Module):
    """An LSTM between an embedding and a sampled softmax (Jean et al., arXiv 1412.2007, as TensorFlow has it).

    vocabulary: words, numbered in descending order of frequency. width: of embedding, LSTM and softmax. sparse: the
    two tables' gradients are sparse tensors, of the rows that a step used; else they are stored dense, the other rows
    zero. The softmax's weight is an nn.Embedding, which is how DDP knows such a gradient.
    """

    def __init__(self, vocabulary: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width, sparse=sparse)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.softmax = nn.Embedding(vocabulary, width, sparse=sparse)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.softmax.weight, std=width**-0.5)

    def forward(self, inputs: Tensor, targets: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The mean cross-entropy in nats. inputs, targets: int64 [batch, time].

        negatives: int64 [count] of `log_uniform`: which word among a target and these was the target is what is
        learnt, each logit less the logarithm of its word's chance to be among them, so that logits become those of
        the whole softmax. None: the softmax over the whole vocabulary, whose gradient has all rows.
        """
        hidden = self.lstm(self.embedding(inputs))[0].flatten(0, 1)
        wanted = targets.flatten()
        if negatives is None:
            return F.cross_entropy(hidden @ self.softmax.weight.T, wanted)
        rows = self.softmax(torch.cat([wanted, negatives]))
        right, others = rows.split([wanted.shape[0], negatives.shape[0]])
        logits = hidden @ others.T - log_chances(negatives, self.vocabulary)
        logits = logits.masked_fill(wanted[:, None] == negatives, -math.inf)
        right_logits = (hidden * right).sum(1) - log_chances(wanted, self.vocabulary)
        return F.cross_entropy(torch.cat([right_logits[:, None], logits], 1), torch.zeros_like(wanted))
