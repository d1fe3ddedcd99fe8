"""A small GPT's stack on the virtual device or the CPU, and one step of it."""

import torch
import torch.distributed as dist

from oases import OverlappedStack
from oases.models.gpt import GPTConfig, transformer_blocks

LAYERS, BATCH, TOKENS, HIDDEN = 2, 4, 8, 16
CONFIG = GPTConfig(vocabulary=32, hidden=HIDDEN, layers=LAYERS, heads=4, sequence=TOKENS)


def make_stack(place, group=None, **options):
    """A stack of GPT blocks in float64, equal on all devices. group: by default all ranks."""
    torch.manual_seed(3)
    group = dist.group.WORLD if group is None else group
    stack = OverlappedStack(transformer_blocks(CONFIG, group), process_group=group, sub_batches=2, **options)
    return stack.double().to(place)


def given():
    numbers = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, generator=numbers) for _ in range(2)]


def step(stack, x, grad):
    """One step: output, gradients of input and parameters."""
    stack.zero_grad()
    x = x.detach().requires_grad_()
    y = stack(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(parameter.grad for parameter in stack.parameters())]


def on(place, tensors):
    return [x.to(place) for x in tensors]
