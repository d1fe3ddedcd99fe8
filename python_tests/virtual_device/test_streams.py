"""The virtual device itself: it finds what it is for, and its clocks and memory are as documented.

Where a result depends on an order of two ranks, one waits for a key that the other sets: nothing depends on speed.
"""

import threading

import device
import pytest
import torch
import torch.distributed as dist

pytestmark = device.virtual_only


def key(name):
    """The key of a test in the default store, which ranks set and wait for."""
    return f"virtual/{name}"


def test_ops_agree_with_the_cpu(two_virtual):
    assert two_virtual.run(difference_to_the_cpu) == [0, 0]


def difference_to_the_cpu():
    _, place = device.take()
    x, weight = torch.randn(8, 16), torch.randn(16, 16)

    def gradients(x, weight):
        x.requires_grad_(), weight.requires_grad_()
        y = torch.tanh(x @ weight).softmax(1).split(4)
        torch.autograd.backward([y[0].square().sum(), y[1].cumsum(0)[2].sum()])
        return [y[0].detach(), x.grad, weight.grad]

    there = gradients(x.to(place), weight.to(place))
    return max((a - b.cpu()).abs().max().item() for a, b in zip(gradients(x, weight), there, strict=True))


def test_a_sum_that_is_not_waited_for_is_not_there(two_virtual):
    assert two_virtual.run(reads_early) == [(1.0, 2.0), (2.0, 2.0)]


def reads_early():
    _, place = device.take()
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(3, device=place)
    if dist.get_rank() == 1:
        store.wait([key("read early")])
    work = dist.all_reduce(x, async_op=True)
    if dist.get_rank() == 0:
        early = x[0].item()
        store.set(key("read early"), "1")
        work.wait()
    else:
        work.wait()
        early = x[0].item()
    return early, x[0].item()


def test_the_first_launch_of_an_operator_waits_for_a_posted_receive(two_virtual):
    """CUDA's lazy loading: a rank whose peer waits for a kernel that it launches later would stop for ever."""
    assert two_virtual.run(launches_beside_a_receive)[0] == [True, False]


def launches_beside_a_receive():
    module, place = device.take()
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(3, device=place)
    dist.recv(x, 1) if dist.get_rank() == 0 else dist.send(x, 0)  # connected
    torch.accelerator.synchronize()
    module.set_lazy(True)
    arrived = []
    for number in range(2):
        asked = key(f"launch {number}")
        if dist.get_rank() == 1:
            store.wait([asked])
            dist.send(x, 0)
            continue
        work = dist.irecv(x, 1)
        later = threading.Timer(0.2, store.set, (asked, "1"))
        if number == 0:
            later.start()
        torch.digamma(torch.empty(3, device=place))
        arrived.append(work.is_completed())
        if number == 1:
            later.start()
        later.join()
        work.wait()
    torch.accelerator.synchronize()
    return arrived


def test_memory_that_is_freed_before_a_stream_has_read_it_is_poisoned(two_virtual):
    assert two_virtual.run(frees_early) == [None, [True, True, True]]


def frees_early():
    _, place = device.take()
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(3, device=place)
    if dist.get_rank() == 1:
        store.wait([key("freed early")])
        dist.all_reduce(x)
        return x.isnan().tolist()
    work = dist.all_reduce(x, async_op=True)
    with torch.Stream(place):
        work.wait()  # the work keeps its tensors until then
    del x
    torch.accelerator.current_stream().synchronize()  # with what overwrites the memory
    store.set(key("freed early"), "1")
    torch.accelerator.synchronize()
    return None


def test_memory_of_record_stream_is_kept(two_virtual):
    assert two_virtual.run(frees_recorded) == [None, [False, False, False]]


def frees_recorded():
    _, place = device.take()
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(3, device=place)
    if dist.get_rank() == 1:
        store.wait([key("freed recorded")])
        dist.all_reduce(x)
        return x.isnan().tolist()
    work = dist.all_reduce(x, async_op=True)
    aside = torch.Stream(place)
    with aside:
        work.wait()
    x.record_stream(aside)
    del x
    torch.accelerator.current_stream().synchronize()
    store.set(key("freed recorded"), "1")
    torch.accelerator.synchronize()
    return None


def test_clocks_are_those_of_the_costs(two_virtual):
    assert two_virtual.run(times) == [(3000.0, 7000.0, 4000.0)] * 2


def times():
    module, place = device.take()
    x, y = torch.ones(3, device=place), torch.ones(3, device=place)
    torch.accelerator.synchronize()
    dist.barrier()
    module.set_costs(op_seconds=1.0, link_seconds=5.0)

    def mark():
        event = torch.Event(place, enable_timing=True)
        event.record()
        return event

    marks = [mark()]
    y.add_(1).add_(1)
    work = dist.all_reduce(x, async_op=True)  # begins after the two
    y.add_(1)
    marks.append(mark())
    work.wait()
    marks.append(mark())
    torch.accelerator.synchronize()
    start, computed, arrived = marks
    return start.elapsed_time(computed), start.elapsed_time(arrived), computed.elapsed_time(arrived)


def test_a_work_is_as_nccls_is(two_virtual):
    for said, completed in two_virtual.run(asks_a_work):
        assert "isSuccess() is deprecated" in said
        assert completed


def asks_a_work():
    _, place = device.take()
    x = torch.ones(3, device=place)
    work = dist.all_reduce(x, async_op=True)
    try:
        work.is_success()
        said = ""
    except RuntimeError as error:
        said = str(error)
    work.wait()
    torch.accelerator.synchronize()
    return said, work.is_completed()


def test_collectives_that_differ_are_refused(two_virtual):
    with pytest.raises(RuntimeError, match="ranks of a communicator have started different collectives"):
        two_virtual.run(starts_another)


def starts_another():
    _, place = device.take()
    work = dist.all_reduce(torch.ones(3 + dist.get_rank(), device=place), async_op=True)
    torch.accelerator.synchronize()
    work.wait()
