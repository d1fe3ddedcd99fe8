"""Quantised collectives on the virtual device: the bits of the CPU, on a stream that nobody waits for too early."""

import warnings

import device
import pytest
import torch
import torch.distributed as dist
from virtual_stacks import BATCH, HIDDEN, TOKENS, make_stack, on, step

from oases.core.execution.communication import add_wire
from oases.core.execution.group import scheduler_of
from oases.core.schedule import generate_pipeline
from oases.distributed.mesh import Mesh
from oases.distributed.messages import StageMessages
from oases.distributed.pipeline import StageRunner

SIZES = (1, 300, 40000, (1 << 20) + 5)
"""Numbers: the last is sent in two pieces."""


def numbers(n, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(n + dist.get_rank())).to(dtype)


def all_reduced(x):
    scheduler, y = scheduler_of(dist.group.WORLD), x.clone()
    scheduler.wait(scheduler.all_reduce(y, "sum", wire="int8"))
    return y


def reduce_scattered(x):
    scheduler, size = scheduler_of(dist.group.WORLD), dist.get_world_size()
    y, whole = torch.empty_like(x), torch.stack([x * (1 + each) for each in range(size)])
    scheduler.wait(scheduler.reduce_scatter(y, whole, "parts", "int8"))
    return y


def all_gathered(x):
    scheduler = scheduler_of(dist.group.WORLD)
    y = x.new_empty(dist.get_world_size(), len(x))
    scheduler.wait(scheduler.all_gather(y, x, "whole", "int8"))
    return y


def exchanged(x):
    """Rank r sends itself and each other its number plus r rows of 3."""
    scheduler, size, rank = scheduler_of(dist.group.WORLD), dist.get_world_size(), dist.get_rank()
    counts = [1 + rank + other for other in range(size)]
    rows = x[:1].expand(sum(counts), 3) * torch.arange(sum(counts), device=x.device)[:, None].to(x.dtype)
    y = x.new_empty(sum(counts), 3)
    scheduler.wait(scheduler.all_to_all(y, rows.contiguous(), counts, counts, "rows", "int8"))
    return y


def with_feedback(x):
    """Three sums of the same numbers, and what they leave in the residual."""
    scheduler, residual, found = scheduler_of(dist.group.WORLD), torch.zeros_like(x), []
    for _ in range(3):
        found.append(x.clone())
        scheduler.wait(scheduler.all_reduce(found[-1], "averages", wire="int8", residual=residual))
    return torch.stack([*found, residual])


def compare(delays):
    module, place = device.take()
    add_wire(dist.group.WORLD)
    cases = [(run, numbers(n)) for n in SIZES for run in (all_reduced, reduce_scattered, all_gathered)]
    cases += [(exchanged, numbers(5)), (with_feedback, numbers(700))]
    cases += [(run, numbers(300, dtype)) for dtype in (torch.bfloat16, torch.float16)
              for run in (all_reduced, reduce_scattered, all_gathered, exchanged)]  # fmt: skip
    bad = numbers(1000)
    bad[150], bad[400] = torch.nan, torch.inf
    cases.append((all_reduced, bad))
    for run, x in cases:
        expected = run(x)
        there = x.to(place)
        module.set_delays(delays, len(x))
        found = run(there)
        module.set_delays(0.0)
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu().nan_to_num(1e6), expected.nan_to_num(1e6)), (run.__name__, len(x))
        assert torch.equal(there.cpu().nan_to_num(1e6), x.nan_to_num(1e6)), "the input"


@pytest.mark.long
def test_sums_are_those_of_the_cpu(two_virtual):
    two_virtual.run(compare, 1e-3)


def test_three_ranks(three_virtual):
    three_virtual.run(compare, 0.0)


def measured():
    """Errors known of sums whose outliers cancel, last results and warnings, of the CPU and of the device."""
    _, place = device.take()
    group = dist.new_group(backend=dist.get_backend_config(), timeout=device.TIMEOUT)
    add_wire(group)
    scheduler, x = scheduler_of(group), torch.full((2, 640), 0.49)
    x.view(-1)[::128] = 127.0 * (-1) ** dist.get_rank()
    found = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for where, label in ((x, "here"), (x.to(place), "there")):
            for _ in range(3 * 61 + 2):
                y = where.clone()
                scheduler.wait(scheduler.all_reduce(y, label, wire="int8"))
                torch.accelerator.synchronize()
            found.append(y.cpu())
    texts = [str(each.message) for each in said if "there" in str(each.message)]
    return scheduler.errors(), scheduler.exempted(), found, texts


def test_sums_with_large_errors_are_in_bfloat16_on_all_ranks(two_virtual):
    """A sample is read when the next one is due, which is the same sum on all ranks."""
    (errors, exempted, sums, texts), (others, too, _, none) = two_virtual.run(measured)
    assert errors["there"] == others["there"]
    assert exempted == too
    assert set(exempted) == {"here", "there"}
    assert errors["there"][0] >= 3
    for x in sums:
        assert float((x.view(-1)[1:128] - 0.98).abs().max()) < 0.98 * 2**-8
    (text,) = texts
    assert text.startswith("the relative error of there stayed above 0.25: ")
    assert "; it is sent in bfloat16 from now on" in text
    assert none == []


def count_waits():
    """Waits of the host in a sum, and the devices' time at which its result and what ran beside it were there."""
    module, place = device.take()
    add_wire(dist.group.WORLD)
    scheduler, x = scheduler_of(dist.group.WORLD), numbers(40000).to(place)
    all_reduced(x)
    module.set_costs(link_seconds=1.0)
    torch.accelerator.synchronize()
    before = module.counts()["host_waits"]
    ticket = scheduler.all_reduce(x, "sum", wire="int8")
    begun = torch.Event(place, enable_timing=True)
    begun.record()
    y = torch.ones(8, device=place) * 2  # compute under the sum
    computed = torch.Event(place, enable_timing=True)
    computed.record()
    scheduler.wait(ticket)
    summed = torch.Event(place, enable_timing=True)
    summed.record()
    waits = module.counts()["host_waits"] - before
    torch.accelerator.synchronize()
    module.set_costs()
    assert y.cpu().tolist() == [2.0] * 8
    return waits, begun.elapsed_time(computed), begun.elapsed_time(summed)


@device.virtual_only
def test_neither_the_host_nor_compute_waits(two_virtual):
    """Two shots of a second each: the caller's stream comes to them in its wait, and no earlier."""
    for waits, compute, whole in two_virtual.run(count_waits):
        assert waits == 0
        # Bounds that a busy machine, which makes both longer, does not break.
        assert whole > 1990
        assert compute < whole - 1000


def passed_between_stages(place):
    """Activations that the second stage was sent, or gradients that the first one was."""
    pipeline, mesh = generate_pipeline("one_f_one_b", 2, 3), Mesh.of_stages([[1]] * 2)
    messages = StageMessages(pipeline, mesh, [1], device=place, wire="int8")
    leaves = [(numbers(300) * (1 + m)).to(place).requires_grad_() for m in range(3)]
    weights = numbers(300).to(place)
    received = []

    def forward(part, m, inputs, context):
        if part == 0:
            return [2 * leaves[m]]
        received.append(inputs[0].detach().clone())
        return [(inputs[0] * weights * (3 + m)).sum()]

    StageRunner(pipeline, mesh.stage, messages).run(forward)
    found = [each.cpu() for each in (received if mesh.stage else [leaf.grad for leaf in leaves])]
    messages.close()
    mesh.destroy()
    return found


def compare_messages():
    module, place = device.take()
    expected = passed_between_stages(torch.device("cpu"))
    module.set_delays(1e-3, 11)
    found = passed_between_stages(place)
    module.set_delays(0.0)
    assert len(found) == 3
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_messages_between_stages_are_those_of_the_cpu(two_virtual):
    two_virtual.run(compare_messages)


def run_stacks():
    """A step of a stack whose sums are int8, on the CPU and on the device."""
    module, place = device.take()
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(BATCH, TOKENS, HIDDEN, generator=generator) for _ in range(2)]
    exact = step(make_stack("cpu").float(), *given)
    expected = step(make_stack("cpu", wire_dtype="int8").float(), *given)
    there = make_stack(place, wire_dtype="int8").float()
    module.set_delays(1e-3, 3)
    found = [each.cpu() for each in step(there, *on(place, given))]
    module.set_delays(0.0)
    assert not torch.equal(exact[0], expected[0])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_stack_with_quantised_sums(two_virtual):
    two_virtual.run(run_stacks)


def sums_over_staged():
    """A sum of int8 on the device and on the CPU, of a group with `staged` for both."""
    _, place = device.take()
    device.staged_group()  # lets it wait for words on this device
    group = dist.new_group(backend=f"cpu:staged,{place.type}:staged", timeout=device.TIMEOUT)
    add_wire(group)
    scheduler, x = scheduler_of(group), numbers(700)
    there = x.to(place)
    for each in (x, there):
        scheduler.wait(scheduler.all_reduce(each, "sum", wire="int8"))
    return torch.equal(there.cpu(), x)


def test_one_backend_for_both_kinds_of_tensors_carries_both(two_virtual):
    assert two_virtual.run(sums_over_staged) == [True, True]
