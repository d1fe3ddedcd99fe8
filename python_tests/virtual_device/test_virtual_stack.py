"""Stacks on the virtual device: results of the CPU, true statistics, nothing that grows, and failures."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import device
import pytest
import torch
import torch.distributed as dist
from resident_memory import resident
from torch import nn
from virtual_stacks import HIDDEN, given, make_stack, on, step

import oases
from oases import OverlappedStack
from oases.core.execution.executor import AT_ONCE
from oases.core.execution.group import scheduler_of
from oases_train.meter import Meter


@pytest.mark.few(3)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "sequence_parallel"), [("sync", False), ("oases", False), ("cross_pass", False), ("oases", True)]
)
def test_gradients_are_those_of_the_cpu(two_virtual, schedule, sequence_parallel, recompute):
    options = {"schedule": schedule, "sequence_parallel": sequence_parallel, "recompute": recompute}
    two_virtual.run(compare_with_the_cpu, options, 3)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_under_two_hundred_random_delays(two_virtual, sequence_parallel):
    options = {"schedule": "oases", "sequence_parallel": sequence_parallel, "recompute": "full"}
    two_virtual.run(compare_with_the_cpu, options, 200)


def compare_with_the_cpu(options, seeds):
    module, place = device.take()
    expected = step(make_stack("cpu", **options), *given())
    stack, (x, grad) = make_stack(place, **options), on(place, given())
    for seed in range(seeds):
        module.set_delays(1e-3, 1 + seed)
        found = step(stack, x, grad)
        for a, b in zip(on("cpu", found), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@device.virtual_only
def test_a_wait_that_is_left_out_is_found(two_virtual):
    worst, _ = two_virtual.run(leaves_waits_out)
    assert not worst < 1e-3, "NaN, or wrong"


def leaves_waits_out():
    _, place = device.take()
    store = dist.distributed_c10d._get_default_store()
    expected = step(make_stack("cpu"), *given())
    stack, (x, grad) = make_stack(place), on(place, given())
    for _ in range(2):  # the third call is the first in which ranks exchange nothing else
        step(stack, x, grad)
    if dist.get_rank() == 1:
        store.wait(["left out"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(scheduler_of(dist.group.WORLD)), "wait", lambda self, ticket: None)
        found = on("cpu", step(stack, x, grad))
    if dist.get_rank() == 0:
        store.set("left out", "1")
    torch.accelerator.synchronize()
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@device.virtual_only
def test_statistics_are_true(two_virtual):
    for schedule in ("sync", "oases"):
        for op_seconds, link_seconds in ((0.01, 0.5), (0.01, 0.05), (0.5, 0.5)):
            for truth, said in two_virtual.run(measures, schedule, op_seconds, link_seconds):
                assert said["collectives"] == truth["collectives"]
                assert said["link"] == pytest.approx(truth["link"], rel=1e-3)
                assert said["exposed"] == pytest.approx(truth["exposed"], rel=0.02, abs=0.02 * truth["link"])
                # What runs under a collective that the schedule waits for at once is not counted as overlap: the
                # accumulation of gradients, a residual add.
                true = 1 - truth["exposed"] / truth["link"]
                assert said["hidden"] == pytest.approx(true - said["not counted"] / truth["link"], abs=0.01)
                assert said["in stacks"] == 0 or schedule != "sync"


def measures(schedule, op_seconds, link_seconds):
    """Time of a step's link and waits by the device's clock, and what was said of it."""
    module, place = device.take()
    stack, (x, grad) = make_stack(place, schedule=schedule), on(place, given())
    scheduler = scheduler_of(dist.group.WORLD)
    for _ in range(4):  # in calls 1, 2 and 4 ranks compare samples of their inputs, too
        step(stack, x, grad)
    seconds = {}
    for cost in (0.0, link_seconds):
        dist.all_reduce(torch.ones(1, device=place))  # the ranks' clocks are equal after it
        torch.accelerator.synchronize()
        scheduler.reset_totals()
        module.set_costs(op_seconds, cost)
        start, end = (torch.Event(place, enable_timing=True) for _ in range(2))
        start.record()
        step(stack, x, grad)
        end.record()
        torch.accelerator.synchronize()
        module.set_costs()
        seconds[cost] = start.elapsed_time(end) / 1e3
    totals = scheduler.totals().values()
    said = {
        "link": sum(each.link_seconds for each in totals),
        "exposed": sum(each.blocked_seconds for each in totals),
    }
    count = sum(each.count for each in totals)
    report = oases.report(dist.group.WORLD)
    at_once = [each for label, each in scheduler.totals().items() if label.endswith(f"{AT_ONCE})")]
    not_counted = sum(each.link_seconds - each.blocked_seconds for each in at_once)
    said |= {"collectives": count, "not counted": not_counted}
    said |= {"hidden": report.hidden, "in stacks": report.stacks[-1].hidden}
    truth = {"link": count * link_seconds, "exposed": seconds[link_seconds] - seconds[0.0], "collectives": count}
    return truth, said


def test_what_the_stream_waits_for_is_known(two_virtual):
    """The host has passed its wait, and then waits for the device."""
    first, second = two_virtual.run(waits_for_another)
    assert first.startswith("all_reduce of a late sum (24 bytes")
    assert second == ""


def waits_for_another():
    _, place = device.take()
    store, scheduler = dist.distributed_c10d._get_default_store(), scheduler_of(dist.group.WORLD)
    x = torch.ones(3, dtype=torch.float64, device=place)
    if dist.get_rank() == 1:
        store.wait(["told what is waited for"])
    scheduler.wait(scheduler.all_reduce(x, "a late sum"))
    said = ""
    if dist.get_rank() == 0:
        while not said:  # until the stream has come to its wait
            said = scheduler.waiting_for()
        store.set("told what is waited for", "1")
    torch.accelerator.synchronize()
    assert x.tolist() == [2, 2, 2]
    return said or scheduler.waiting_for()


def test_totals_that_wait_for_a_late_rank_hold_up_nobody_else(two_virtual):
    said, count = two_virtual.run(asks_while_totals_wait)[0]
    assert said.startswith("all_reduce of a late sum (24 bytes"), "the interpreter stood still until the peer came"
    assert count == 1


def asks_while_totals_wait():
    """Answer to rank 0's main thread while a thread waits in totals() for rank 1, which comes when it was given."""
    _, place = device.take()
    store, scheduler = dist.distributed_c10d._get_default_store(), scheduler_of(dist.group.WORLD)
    torch.accelerator.synchronize()
    scheduler.reset_totals()
    x = torch.ones(3, dtype=torch.float64, device=place)
    if dist.get_rank() == 1:
        try:
            store.wait(["told while totals wait"], timedelta(seconds=60))
        except dist.DistStoreError:
            store.set("came untold", "1")
        scheduler.wait(scheduler.all_reduce(x, "a late sum"))
        torch.accelerator.synchronize()
        return "", 1
    scheduler.wait(scheduler.all_reduce(x, "a late sum"))
    with ThreadPoolExecutor(1) as threads:
        totals = threads.submit(scheduler.totals)
        for _ in range(50):  # the other thread is in totals() by then
            said = scheduler.waiting_for()
            time.sleep(0.01)
        said = "" if totals.done() or store.check(["came untold"]) else said
        store.set("told while totals wait", "1")
        return said, totals.result()["a late sum"].count


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_waits_that_block_the_host_are_refused(two_virtual, name):
    for said in two_virtual.run(starts_with_blocking_waits, name):
        assert (
            said == f"{name}=1 makes the host wait for every collective, and nothing would overlap with one; unset it"
        )


def starts_with_blocking_waits(name):
    _, place = device.take()
    scheduler = scheduler_of(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, "1")
        scheduler.wait(scheduler.all_reduce(torch.ones(3)))  # gloo has no such waits
        with pytest.raises(ValueError, match="BLOCKING_WAIT") as caught:
            scheduler.all_reduce(torch.ones(3, device=place))
        patch.setenv(name, "0")
        scheduler.wait(scheduler.all_reduce(torch.ones(3, device=place)))
    torch.accelerator.synchronize()
    return str(caught.value).splitlines()[0]


def test_recomputed_random_numbers_are_the_devices(two_virtual):
    for kept, recomputed, other_call, after in two_virtual.run(draws_masks):
        for a, b in zip(kept, recomputed, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert any(not torch.allclose(a, b) for a, b in zip(kept, other_call, strict=True))
        assert after, "the caller's generator is as it was"


class Dropping(nn.Module):
    """A block that draws from the device's generator."""

    token_wise = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(HIDDEN))

    def partial(self, x):
        return nn.functional.dropout(x, 0.5) @ self.weight

    def combine(self, x, y):
        return x + nn.functional.dropout(y, 0.5)


def draws_masks():
    _, place = device.take()
    x, grad = on(place, given())
    found = []
    before = torch.get_device_module(place).get_rng_state()
    for recompute, call in (("none", 0), ("full", 0), ("full", 1)):
        blocks = [Dropping() for _ in range(4)]
        stack = OverlappedStack(blocks, process_group=dist.group.WORLD, recompute=recompute).double().to(place)
        stack.at_call(call, seed=5)
        found.append(on("cpu", step(stack, x, grad)))
    return *found, torch.equal(before, torch.get_device_module(place).get_rng_state())


def test_a_meter_gathers_by_the_hosts_group(two_virtual):
    assert two_virtual.run(group_of_a_meter) == ["cpu", "cpu"]


def group_of_a_meter():
    _, place = device.take()
    meter = Meter.__new__(Meter)
    meter.process_group, meter.device = dist.group.WORLD, place
    group, where = meter._host_group()
    assert group is dist.group.WORLD
    return where.type


@pytest.mark.long
@device.virtual_only
def test_events_and_memory_do_not_grow(two_virtual):
    for few, many, per_step in two_virtual.run(counts_after_steps, 2, 20):
        assert many["events"] - few["events"] <= 4 * per_step, "those of one step may not have been read yet"
        assert many["bytes"] == few["bytes"]


def counts_after_steps(few, many):
    module, place = device.take()
    stack, (x, grad) = make_stack(place), on(place, given())
    found = []
    gc.collect()  # what earlier tests have left in cycles is not freed between the two counts
    for number in range(1, many + 1):
        step(stack, x, grad)
        torch.accelerator.synchronize()
        if number in (few, many):
            found.append(module.counts())
    totals = scheduler_of(dist.group.WORLD).totals()
    return *found, sum(each.count for each in totals.values()) // many


@pytest.mark.slow
@device.virtual_only
def test_ten_thousand_collectives_leave_nothing_behind(two_virtual):
    for few, many in two_virtual.run(starts_collectives, 1000, 10000):
        assert many["events"] - few["events"] <= 4 * 100, "those since the host last waited"
        assert many["bytes"] == few["bytes"]
        assert many["resident"] - few["resident"] < 16 << 20


def starts_collectives(few, many):
    module, place = device.take()
    scheduler, x, found = scheduler_of(dist.group.WORLD), torch.zeros(8, device=place), []
    for number in range(1, many + 1):
        scheduler.wait(scheduler.all_reduce(x, "F 0.0"))
        if number % 100 == 0:
            torch.accelerator.synchronize()
        if number in (few, many):
            found.append(module.counts() | {"resident": resident()})
    return found
