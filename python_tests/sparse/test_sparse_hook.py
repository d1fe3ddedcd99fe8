"""DDP with `s2_hook` beside DDP without a hook."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oases
from oases_sparse import hook


class Tables(nn.Module):
    """Two tables of which a step uses few rows, and layers between them."""

    def __init__(self, sparse):
        super().__init__()
        self.first = nn.Embedding(3000, 8, sparse=sparse)
        self.layer = nn.Linear(8, 8)
        self.tall = nn.Linear(8, 1500)
        self.unused = nn.Embedding(2000, 4)
        self.last = nn.Embedding(3000, 8, sparse=sparse)

    def forward(self, ids, others):
        hidden = self.layer(self.first(ids))
        return (hidden @ self.last(others).T).logsumexp(1).mean() + self.tall(hidden).square().mean()


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, ids, others):
        return super().forward((ids[:8, None] == torch.arange(8)).float()).square().mean()


def beside_ddp(make, mode, dtype=torch.float32, unused=True, **options):
    """The largest difference to DDP's own gradients in 5 steps, and what was sent how."""
    torch.manual_seed(0)
    ours = make().to(dtype)
    theirs = copy.deepcopy(ours)
    wrapped = [
        DistributedDataParallel(model, bucket_cap_mb=0.1, find_unused_parameters=unused) for model in (ours, theirs)
    ]
    reducer = oases.S2Reducer(mode=mode, **options)
    reducer.name_parameters(ours)
    wrapped[0].register_comm_hook(reducer, oases.s2_hook)
    torch.manual_seed(1 + dist.get_rank())
    apart = 0.0
    for step in range(5):
        ids, others = torch.randint(3000, (4 + 10 * step,)), torch.randint(3000, (20 + 10 * step,))
        for model in wrapped:
            model.zero_grad()
            model(ids, others).backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                assert mine.grad.is_sparse == other.grad.is_sparse
                expected = other.grad.to_dense().double()
                scale = float(expected.abs().max()) + 1e-9
                apart = max(apart, float((mine.grad.to_dense() - expected).abs().max()) / scale)
    return apart, {row["name"]: (row["modes"], row["fallbacks"]) for row in reducer.report().json()["tensors"]}


def tables_dense():
    return Tables(False)


def tables_sparse():
    return Tables(True)


@pytest.mark.parametrize("make", [tables_dense, tables_sparse])
@pytest.mark.parametrize("mode", ["dense", "packed", "gather", "auto"])
def test_gradients_are_those_of_ddp(two_ranks_of_gloo, make, mode):
    results = two_ranks_of_gloo.run(beside_ddp, make, mode)
    assert all(apart < 3e-6 for apart, _ in results)
    assert results[0][1] == results[1][1]
    sent = results[0][1]
    if mode == "packed":
        assert sent["first.weight"] == ({"packed": 5}, {})
        assert sent["last.weight"] == ({"packed": 5}, {})
        # A layer whose rows are all used is looked at in ever fewer steps.
        assert sent["tall.weight"][0]["dense"] < 5
        assert list(sent["tall.weight"][1]) == ["more than half of the rows are not zero"]
    assert "all other gradients" in sent


@pytest.mark.parametrize("mode", ["packed", "auto", "sketch"])
def test_a_model_without_sparse_parameters(two_ranks_of_gloo, mode):
    apart, sent = two_ranks_of_gloo.run(beside_ddp, Plain, mode)[0]
    assert apart < 1e-6
    assert list(sent) == ["all other gradients"]


def test_four_ranks(four_ranks):
    assert max(apart for apart, _ in four_ranks.run(beside_ddp, tables_dense, "packed")) < 3e-6


def test_float16(two_ranks_of_gloo):
    apart, sent = two_ranks_of_gloo.run(beside_ddp, tables_dense, "packed", torch.float16)[0]
    assert apart < 2e-3
    assert sent["first.weight"][0] == {"packed": 5}


def sketched():
    torch.manual_seed(0)
    model = Tables(True)
    reducer = oases.S2Reducer(mode="sketch", rows=1)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(reducer, oases.s2_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = torch.arange(200) * 7 + dist.get_rank()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = wrapped(ids, ids + 3)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(everyone, weights)
    assert torch.equal(*everyone)
    return losses


def test_a_sketched_model_learns_and_stays_the_same_on_all_ranks(two_ranks_of_gloo):
    losses = two_ranks_of_gloo.run(sketched)[0]
    assert losses[-1] < 0.9 * losses[0]


def a_rank_without():
    """One rank uses no row of the first table at all."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(2000, 4), "layer": nn.Linear(4, 1)})

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x, use):
            return self.parts["layer"](self.parts["table"](x) if use else torch.ones(3, 4)).sum()

    wrapped = DistributedDataParallel(Part(), find_unused_parameters=True)
    wrapped.register_comm_hook(oases.S2Reducer(mode="packed"), oases.s2_hook)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.tensor([4, 9, 4]), dist.get_rank() == 0).backward()
    return model["table"].weight.grad


def test_a_rank_without_a_gradient(two_ranks_of_gloo):
    first, second = two_ranks_of_gloo.run(a_rank_without)
    assert torch.equal(first, second)
    assert first.any(1).nonzero().flatten().tolist() == [4, 9]


def an_empty_list(mode):
    """DDP wants a sparse gradient of every rank: one looks up no row."""
    torch.manual_seed(0)
    table = nn.Embedding(2000, 4, sparse=True)
    wrapped = DistributedDataParallel(table)
    wrapped.register_comm_hook(oases.S2Reducer(mode=mode, rows=1, seed=1), oases.s2_hook)
    found = []
    for step in range(3):
        wrapped.zero_grad()
        ids = torch.arange(5 + step) if dist.get_rank() and step < 2 else torch.arange(0)
        wrapped(ids).sum().backward()
        found.append(table.weight.grad.coalesce())
    return [gradient.to_dense().sum(1)[:8].tolist() for gradient in found]


@pytest.mark.parametrize("mode", ["dense", "packed", "gather", "auto"])
def test_a_rank_that_looks_up_no_row(two_ranks_of_gloo, mode):
    for found in two_ranks_of_gloo.run(an_empty_list, mode):
        assert found == [[2.0] * 5 + [0.0] * 3, [2.0] * 6 + [0.0] * 2, [0.0] * 8]


def broken():
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, oases.s2_hook)
    with pytest.raises(Exception, match=r"must be an oases\.S2Reducer, got NoneType"):
        model(torch.ones(1, 2)).sum().backward()


def test_a_state_that_is_no_reducer_is_named(two_ranks_of_gloo):
    two_ranks_of_gloo.run(broken)


def refused():
    model = nn.Embedding(1200, 2)
    wrapped = DistributedDataParallel(model)
    reducer = oases.S2Reducer(mode="packed")
    wrapped.register_comm_hook(reducer, oases.s2_hook)

    def fail(*_):
        raise ArithmeticError("bits are broken")

    reducer.wire.unite = fail
    with pytest.raises(Exception, match="bits are broken"):
        wrapped(torch.tensor([1])).sum().backward()


def test_what_fails_on_the_thread_is_raised_by_the_backward_pass(two_ranks_of_gloo):
    two_ranks_of_gloo.run(refused)


def test_a_bucket_is_encoded_while_the_one_before_is_on_the_wire():
    log = []
    jobs = hook.queue.SimpleQueue()
    for number in range(3):
        jobs.put(
            SimpleNamespace(
                event=None, is_last=number == 2, start=lambda n=number: log.append(f"start {n}"),
                finish=lambda n=number: log.append(f"finish {n}"),
            )
        )  # fmt: skip
    jobs.put(None)
    hook._serve(jobs)
    assert log == ["start 0", "start 1", "finish 0", "start 2", "finish 1", "finish 2"]


def test_buckets_after_one_that_failed_send_nothing():
    """Until the backward pass is over: they would pair with other ranks' collectives of the bucket that failed."""
    log, futures = [], [torch.futures.Future() for _ in range(6)]
    jobs = hook.queue.SimpleQueue()

    def start(number):
        log.append(number)
        if number == 1:
            raise ArithmeticError("bits are broken")

    for number, future in enumerate(futures):
        jobs.put(
            SimpleNamespace(
                event=None, is_last=number in (3, 5), start=lambda n=number: start(n), future=future,
                finish=lambda f=future: f.set_result(None),
            )
        )  # fmt: skip
    jobs.put(None)
    hook._serve(jobs)
    assert log == [0, 1, 4, 5]
    for future in futures[:4]:
        with pytest.raises(Exception, match="bits are broken"):
            future.wait()
    assert [future.wait() for future in futures[4:]] == [None, None]


class Shared(nn.Module):
    """One table that is looked up twice, and beside it one that odd steps do not use."""

    def __init__(self, sparse):
        super().__init__()
        self.table, self.same = nn.Embedding(2000, 4, sparse=sparse), nn.Embedding(2000, 4, sparse=sparse)
        self.same.weight = self.table.weight
        self.layer, self.other = nn.Linear(4, 3), nn.Embedding(2000, 4)

    def forward(self, ids, other):
        loss = self.layer(self.table(ids)).sum() + self.same(ids * 2).square().sum()
        return loss + self.other(ids).sum() if other else loss


def ways_of_ddp(sparse, options, accumulated, skipping):
    """The largest difference to DDP's own gradients."""
    torch.manual_seed(0)
    ours = Shared(sparse)
    theirs = copy.deepcopy(ours)
    wrapped = [DistributedDataParallel(model, **options) for model in (ours, theirs)]
    wrapped[0].register_comm_hook(oases.S2Reducer(), oases.s2_hook)
    torch.manual_seed(1 + dist.get_rank())
    apart = 0.0
    for step in range(4):
        batches, other = torch.randint(1000, (1 + accumulated, 5)), not (skipping and step % 2)
        for model in wrapped:
            model.zero_grad()
            for ids in batches[1:]:
                with model.no_sync():
                    model(ids, other).backward()
            model(batches[0], other).backward()
        for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (mine.grad is None) == (expected.grad is None)
            if mine.grad is not None:
                apart = max(apart, float((mine.grad.to_dense() - expected.grad.to_dense()).abs().max()))
    return apart


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("options", "accumulated", "skipping"),
    [
        ({}, 2, False),
        ({"static_graph": True, "bucket_cap_mb": 0.01}, 0, False),
        ({"gradient_as_bucket_view": True}, 1, False),
        ({"find_unused_parameters": True}, 1, True),
    ],
)
def test_shared_parameters_and_ways_of_ddp(two_ranks_of_gloo, sparse, options, accumulated, skipping):
    assert max(two_ranks_of_gloo.run(ways_of_ddp, sparse, options, accumulated, skipping)) < 1e-5


def two_models():
    torch.manual_seed(0)
    models = [Shared(sparse) for sparse in (False, True)]
    plain = copy.deepcopy(models)
    ours, theirs = ([DistributedDataParallel(model) for model in every] for every in (models, plain))
    for model in ours:
        model.register_comm_hook(oases.S2Reducer(), oases.s2_hook)
    for step in range(3):
        ids = torch.arange(5) + 10 * step + dist.get_rank()
        for every in (ours, theirs):
            for model in every:
                model.zero_grad()
            sum(model(ids, True) for model in every).backward()
        for model, other in zip(models, plain, strict=True):
            for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.to_dense(), expected.grad.to_dense())


def test_two_hooks_in_one_backward_pass(two_ranks_of_gloo):
    two_ranks_of_gloo.run(two_models)
