"""Optimizers of parallelized models: state over the data-parallel ranks, float32 masters, the same steps as alone."""

import copy

import pytest
import torch
import torch.distributed as dist
from autotp.comparison import said
from autotp.zoo import batch, build
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.autotp.tools.optimizer_state import accept_full_state, full_optimizer_state
from oases.distributed.optimizer import ShardedOptimizer, state_of, weight_of
from oases.distributed.precision import set_needs
from oases.errors import UsageError

pytestmark = pytest.mark.usefixtures("shared_traces")

DATA = batch("llama", samples=8)
DATA["labels"] = DATA["input_ids"]  # as many of every sample, so that the mean over replicas is that of all
CLASSES = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
}


def groups_of(model):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [
        {"params": matrices},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() < 2], "lr": 3e-3},
    ]


def trained(model, optimizer, data, steps=3):
    """Losses and gradient norms of steps with a learning rate schedule."""
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**data).loss
        loss.backward()
        norm = oases.clip_grad_norm(model, 0.5)
        optimizer.step()
        rates.step()
        found += [float(loss.detach()), float(norm)]
    return found


def in_replicas(name, options, dtype):
    """Losses and norms of (dp, tp) = (2, 2), beside the bytes of state and masters here and elements here."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data_group = mesh.get_group("dp")
    model = oases.parallelize(build("llama").to(dtype), mesh=mesh)
    kind, given = CLASSES[name]
    optimizer = oases.make_optimizer(
        model, kind, params=groups_of(model), data_parallel=data_group, **options, **given
    )
    half = {key: value[mesh.get_local_rank("dp") :: 2] for key, value in DATA.items()}
    found = trained(model, optimizer, half)
    held = {id(t): t for p in model.parameters() for t in (state_of(optimizer, p) or {}).values() if t.dim() > 0}
    masters = [weight_of(optimizer, p) for p in model.parameters()]
    held |= {id(m): m for m, p in zip(masters, model.parameters(), strict=True) if m is not None and m is not p}
    types = {parameter.grad.dtype for parameter in model.parameters()}
    size = sum(parameter.numel() for parameter in model.parameters())
    mine = torch.tensor([sum(tensor.nbytes for tensor in held.values())])
    dist.all_reduce(mine, group=data_group)
    return found, sum(tensor.nbytes for tensor in held.values()), int(mine), size, types


def alone(name, dtype=torch.float32):
    model = build("llama").to(dtype)
    kind, given = CLASSES[name]
    return trained(model, kind(groups_of(model), **given), DATA)


def mean_of_replicas(results):
    """Losses and norms, averaged over the two replicas; norms are equal on all ranks."""
    one, other = results[0][0], results[2][0]
    assert results[1][0] == pytest.approx(one, rel=1e-6)
    assert other[1::2] == pytest.approx(one[1::2], rel=1e-6)
    return [(x + y) / 2 for x, y in zip(one, other, strict=True)]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("name", CLASSES)
def test_sharded_state_takes_the_steps_of_one_process(four_ranks, name):
    results = four_ranks.run(in_replicas, name, {"zero": True}, torch.float32)
    assert mean_of_replicas(results) == pytest.approx(alone(name), rel=1e-4)
    kinds = {"adamw": 2, "sgd": 1}[name]
    for _, mine, both, size, _ in results:
        assert both == 4 * kinds * size  # each state once among the replicas
        assert mine == pytest.approx(both / 2, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False])
def test_masters_keep_bfloat16_near_float32(four_ranks, zero):
    results = four_ranks.run(in_replicas, "adamw", {"zero": zero, "master_weights": True}, torch.bfloat16)
    assert mean_of_replicas(results) == pytest.approx(alone("adamw"), rel=2e-2)
    for _, mine, both, size, types in results:
        assert both == 12 * size * (1 if zero else 2)  # master and two moments
        assert mine == pytest.approx(both / 2, rel=0.1)
        assert types == {torch.float32}


def test_state_of_a_rank_goes_on_equal_to_the_bit():
    def started():
        model = build("llama").bfloat16()
        return model, oases.make_optimizer(model, torch.optim.AdamW, lr=1e-2, master_weights=True)

    model, optimizer = started()
    trained(model, optimizer, DATA)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = trained(model, optimizer, DATA)
    model, optimizer = started()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert trained(model, optimizer, DATA) == expected


class Scheduled(torch.optim.SGD):
    """An optimizer that keeps a count in its groups, as schedule-free ones do, and steps by it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


def test_what_an_optimizer_keeps_in_its_groups_goes_on():
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = oases.make_optimizer(model, Scheduled, lr=1.0, master_weights=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    assert [(group["steps"], group["lr"]) for group in optimizer.param_groups] == [(3, 0.1 / 3)]


def with_needs(zero, dtype):
    """Losses and norms of a model that tells its optimizer what it needs, over (dp, tp) = (2, 2)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = oases.parallelize(build("llama"), mesh=mesh, zero=zero, dtype=dtype)
    half = {key: value[mesh.get_local_rank("dp") :: 2] for key, value in DATA.items()}
    kind, given = CLASSES["adamw"]
    with pytest.raises(UsageError, match=r"does not know of .*make it by oases\.make_optimizer\(model"):
        trained(model, kind(model.parameters(), **given), half, 1)
    optimizer = oases.make_optimizer(model, kind, params=groups_of(model), **given)
    found = trained(model, optimizer, half)
    masters = [weight_of(optimizer, parameter) for parameter in model.parameters()]
    return found, sum(master is not None for master in masters) / len(masters), {p.dtype for p in model.parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "dtype"), [(True, None), (True, torch.bfloat16), (False, torch.bfloat16)])
def test_the_model_tells_its_optimizer(four_ranks, zero, dtype):
    results = four_ranks.run(with_needs, zero, dtype)
    assert mean_of_replicas(results) == pytest.approx(alone("adamw"), rel=1e-4 if dtype is None else 2e-2)
    for _, share, types in results:
        assert (share < 1) == zero
        assert types == {dtype or torch.float32}


@pytest.mark.long
def test_masters_follow_weights_that_are_loaded():
    """Masters begin with the float32 weights, and again with weights that are loaded; rounded ones lose nothing."""
    model, other = build("llama"), build("llama", 1).bfloat16()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    oases.parallelize(model, dtype=torch.bfloat16)
    optimizer = oases.make_optimizer(model, torch.optim.AdamW, lr=1e-4)
    for parameter, weight in zip(model.parameters(), before, strict=True):
        assert torch.equal(weight_of(optimizer, parameter), weight)
    model.load_state_dict(model.state_dict())  # the same again
    assert torch.equal(weight_of(optimizer, next(model.parameters())), before[0])
    model.load_state_dict(other.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    for parameter, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
        assert torch.equal(weight_of(optimizer, parameter).bfloat16(), wanted)


def small(dtype):
    """A model of two parts that tells its optimizer what it needs."""
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 3)})
    set_needs(model, zero=False, dtype=dtype)
    return model


def as_torch_takes_them(model):
    """Parameters of a model in all ways, and the learning rate of each group."""
    body, head = model["body"], model["head"]
    rates = [0.1, 0.2, 0.3]
    groups = zip(rates, (body.parameters(), head.weight, [head.bias]), strict=True)
    names = zip(rates, ([pair] for pair in body.named_parameters(prefix="body")), strict=False)
    return {
        "parameters": (model.parameters(), [1.0]),
        "names": (model.named_parameters(), [1.0]),
        "groups": (({"params": params, "lr": rate} for rate, params in groups), rates),
        "named groups": (
            [*({"params": pair, "lr": rate} for rate, pair in names),
             {"params": head.named_parameters(prefix="head"), "lr": 0.3}], rates,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["parameters", "names", "groups", "named groups"])
def test_parameters_are_given_as_to_torch(way, dtype):
    model = small(dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    params, rates = as_torch_takes_them(model)[way]
    optimizer = oases.make_optimizer(model, torch.optim.SGD, params=params, lr=1.0)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_masters_of_two_optimizers_begin_with_the_float32_weights():
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 3)})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    set_needs(model, zero=False, dtype=torch.bfloat16)
    for part in ("body", "head"):
        optimizer = oases.make_optimizer(model, torch.optim.SGD, params=model[part].parameters(), lr=1.0)
        for name, parameter in model[part].named_parameters(prefix=part):
            assert torch.equal(weight_of(optimizer, parameter), before[name]), name


def loads_the_state_of_another_rank(dtype):
    """Error of loading the first rank's state on all ranks, as a loop for replicas of equal state does."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    spec = oases.ParallelSpec(inputs=((torch.ones(2, 4),), {}))
    oases.parallelize(model, mesh=mesh, spec=spec, zero=True, dtype=dtype)
    optimizer = oases.make_optimizer(model, torch.optim.AdamW, lr=1e-2)
    model(torch.ones(2, 4, dtype=dtype)).float().sum().backward()
    optimizer.step()
    states = [optimizer.state_dict()]
    optimizer.load_state_dict(states[0])
    dist.broadcast_object_list(states)
    return said(lambda: optimizer.load_state_dict(states[0]))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_state_of_another_rank_is_refused(two_ranks, dtype):
    first, second = two_ranks.run(loads_the_state_of_another_rank, dtype)
    assert first == "nothing was raised"
    assert "load_state_dict: it is the state of another rank" in second


def resumed_by_a_tool(dtype):
    """Whether weights and masters of a model with a state that a tool saved are those of the model before."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    models = [oases.parallelize(build("llama"), mesh=mesh, dtype=dtype) for _ in range(2)]
    ours, others = [oases.make_optimizer(model, torch.optim.AdamW, lr=1e-2) for model in models]
    trained(models[0], ours, DATA, 1)
    states = [full_optimizer_state(ours, models[:1])]
    dist.broadcast_object_list(states)
    models[1].load_state_dict(models[0].state_dict())
    accept_full_state(others, models[1:])
    others.load_state_dict(copy.deepcopy(states[0]))
    for model, optimizer in zip(models, (ours, others), strict=True):
        trained(model, optimizer, DATA, 1)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return all(torch.equal(weight_of(ours, one), weight_of(others, other)) for one, other in pairs)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_tools_save_and_load_state_and_masters_whole(two_ranks, dtype):
    assert two_ranks.run(resumed_by_a_tool, dtype) == [True, True]


def test_bad_uses_are_refused():
    model, other = build("llama"), build("llama")
    with pytest.raises(UsageError, match=r"1 parameters of the optimizer are not among .* make the optimizer after"):
        oases.make_optimizer(model, torch.optim.SGD, params=[next(other.parameters())], lr=1)
    with pytest.raises(UsageError, match=r"zero: the data-parallel ranks are unknown; .*mesh\.get_group\('dp'\)"):
        oases.make_optimizer(model, torch.optim.SGD, zero=True, lr=1)
    with pytest.raises(UsageError, match="all parameters are float32 already"):
        oases.make_optimizer(model, torch.optim.SGD, master_weights=True, lr=1)
    with pytest.raises(UsageError, match="float16 would need its loss scaled"):
        oases.parallelize(build("llama"), dtype=torch.float16)
    plain = oases.make_optimizer(model, torch.optim.SGD, lr=1)
    assert type(plain) is torch.optim.SGD
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1)
    with pytest.raises(UsageError, match="make the optimizer with all groups"):
        sharded.add_param_group({"params": [next(other.parameters())]})
    state = sharded.state_dict()
    del state["param_groups"][0]["params"][0]
    with pytest.raises(UsageError, match="the parameter groups are of other sizes"):
        sharded.load_state_dict(state)
