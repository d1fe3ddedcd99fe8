"""Reducers of sparse gradients on the virtual device, on the calling thread and on DDP's hook's own."""

import device
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oases

ROWS, WIDTH = 2048, 4


@pytest.mark.long
def test_the_hook_averages_as_ddp_does(two_virtual):
    for hooked, plain in two_virtual.run(averages_by_the_hook):
        for a, b in zip(hooked, plain, strict=True):
            torch.testing.assert_close(a, b)


def model_on(place):
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)).to(place)


def averages_by_the_hook():
    module, place = device.take()
    ids = torch.randint(ROWS, (3, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    module.set_delays(1e-3, 5)
    found = []
    for hooked in (True, False):
        model = DistributedDataParallel(model_on(place), device_ids=None)
        if hooked:
            model.register_comm_hook(oases.S2Reducer(), oases.s2_hook)
        for batch in ids:
            model.zero_grad()
            model(batch.to(place)).square().sum().backward()
        found.append([parameter.grad.cpu() for parameter in model.parameters()])
    return found
