"""Wire: layout and type of what is sent and of what comes back."""

import pytest
import torch

from oases.core.execution.communication import Wire

RANKS, RANK = 2, 1


class Doubling:
    """Scheduler of rank 1 of two ranks with equal tensors, so that a sum doubles. sent: type of each collective."""

    def __init__(self):
        self.sent, self.waited = [], []

    def all_reduce(self, tensor, label=""):
        self.sent.append(tensor.dtype)
        tensor.mul_(RANKS)
        return label

    def reduce_scatter(self, output, input, label=""):
        self.sent.append(input.dtype)
        output.copy_(RANKS * input[RANK])
        return label

    def all_gather(self, output, input, label=""):
        self.sent.append(input.dtype)
        for rank, part in enumerate(output):
            part.copy_(input + rank)
        return label

    def wait(self, ticket):
        self.waited.append(ticket)


@pytest.mark.parametrize("wire_dtype", [None, torch.float32, torch.bfloat16])
def test_results_are_in_rank_order_and_of_the_type_that_was_given(wire_dtype):
    scheduler = Doubling()
    wire = Wire(scheduler, RANKS, wire_dtype)
    x = torch.arange(8.0).view(1, 4, 2)  # [batch, sequence, features]; exact in bfloat16
    expected = {
        "all_reduce": 2 * x,
        "reduce_scatter": 2 * x[:, 2:],
        "all_gather": torch.cat([x, x + 1], dim=1),
    }
    for name, result in expected.items():
        found = wire.wait(getattr(wire, name)(x.clone(), name))
        assert found.dtype == x.dtype
        assert torch.equal(found, result), name
    assert scheduler.sent == [wire_dtype or x.dtype] * 3
    assert scheduler.waited == list(expected)
