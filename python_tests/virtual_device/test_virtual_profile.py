"""Profiles on an accelerator whose host is slower than it: times of ops are the device's."""

import time
from dataclasses import asdict

import device
import pytest
import torch
import torch.distributed as dist

from oases.distributed.clock import Clock
from oases.profile.compute import BlockBench
from oases.profile.config import ProfileConfig

LONG = 1e5
"""Seconds of the virtual clock, in which any host has queued a pass."""


@pytest.mark.long
@device.virtual_only
def test_ops_do_not_take_as_long_as_their_host(two_virtual):
    for fast, held, starved in two_virtual.run(profiles):
        assert held == pytest.approx(fast, rel=1e-6)
        assert all(starved[name] > 2 * fast[name] for name in ("forward", "backward", "weight_gradient"))


def profiles():
    """Times of an attention block with a fast host, and with a slow one: held back until it has queued, and not."""
    module, place = device.take()
    config = ProfileConfig(hidden=16, heads=4, sequence=8, layers=1, batch=2, iterations=1)
    object.__setattr__(config, "device", str(place))  # of which `oases profile` knows none but "cpu" and "cuda"
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.virtual, "_sleep", lambda cycles: module.sleep(LONG if cycles else 0), raising=False)
        bench = BlockBench(config, dist.group.WORLD)
        for host_seconds in (0.0, 3.0):
            module.set_costs(op_seconds=1.0, host_seconds=host_seconds)
            found.append(asdict(bench.blocks(1)[0].times))
        patch.delattr(torch.virtual, "_sleep")
        found.append(asdict(bench.blocks(1)[0].times))
    torch.accelerator.synchronize()
    module.set_costs()
    return found


@device.virtual_only
def test_work_that_waits_for_the_device_is_not_held_ever_longer(two_virtual):
    for held in two_virtual.run(holds_what_waits):
        assert len(held) == 5
        assert held == sorted(held, reverse=True)


def holds_what_waits():
    """Cycles that the device was held before each run of work whose host waits for it."""
    module, place = device.take()
    clock, held = Clock(place), []

    def sleep(cycles):
        held.append(cycles)
        module.sleep(1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.virtual, "_sleep", sleep, raising=False)
        for _ in range(6):
            clock.hold("work")
            torch.accelerator.synchronize()
            if held:
                time.sleep(0.01)  # as long as the device is held, which the virtual one's host need not wait for
            clock.queued("work")
    return held
