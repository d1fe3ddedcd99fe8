"""Loops of users over the parameters of a parallelized model, beside the same loop in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from autotp.comparison import said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import oases

SHAPES = {
    "dp": ({"dp": 2, "tp": 1}, {}),
    "zero": ({"dp": 2, "tp": 1}, {"zero": True}),
    "fsdp": ({"dp": 2, "tp": 1}, {"fsdp": True}),
    "tp": ({"dp": 1, "tp": 2}, {}),
    "pp": ({"pp": 2, "dp": 1, "tp": 1}, {"micro_batches": 2}),
    "dp tp": ({"dp": 2, "tp": 2}, {}),
    "pp fsdp": ({"pp": 2, "dp": 2, "tp": 1}, {"micro_batches": 2, "fsdp": True}),
}


class Layer(nn.Module):
    def __init__(self, width=8, scale=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.scale = nn.Parameter(torch.tensor(0.5)) if scale is None else nn.Parameter(torch.full(scale, 0.5))

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model with scalars, tied embeddings, layers that share weights, and a part that some passes leave out."""

    def __init__(self, shared=False, width=8):
        super().__init__()
        self.table, self.layers = nn.Embedding(32, width), nn.ModuleList([Layer(), Layer(scale=(1,))])
        self.temperature, self.extra = nn.Parameter(torch.tensor(1.5)), nn.Linear(width, width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.table.weight
        if shared:
            self.layers[1].up, self.layers[1].norm = self.layers[0].up, self.layers[0].norm

    def forward(self, tokens, labels=None, extra=False):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        if extra:
            x = self.extra(x)
        return F.cross_entropy(self.head(x).flatten(0, 1) * self.temperature, labels.flatten())


def tokens(step):
    return torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(step))


def made(shape=None, **options):
    torch.manual_seed(0)
    model = Net(**options).double()
    if shape is None:
        return model
    sizes, given = SHAPES[shape]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    spec = oases.ParallelSpec(inputs=((tokens(0),), {"labels": tokens(1)}))
    return oases.parallelize(model, mesh=mesh, spec=spec, **given)


def backward(model, step, **options):
    given = [tokens(step), tokens(step + 9)]
    if hasattr(model, "oases_mesh") and model.oases_mesh["dp"].size() > 1:
        given = [each.chunk(2)[model.oases_mesh.get_local_rank("dp")] for each in given]
    if "pp" in getattr(getattr(model, "oases_mesh", None), "mesh_dim_names", ()):
        return model.train_step(given[0], labels=given[1])
    loss = model(given[0], labels=given[1], **options)
    loss.backward()
    return loss


def steps_in_hooks(model):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    tools = {
        each: oases.make_optimizer(model, torch.optim.AdamW, params=[each], lr=0.01) for each in model.parameters()
    }

    def step(parameter):
        tools[parameter].step()
        tools[parameter].zero_grad()

    for each in tools:
        each.register_post_accumulate_grad_hook(step)
    for number in range(3):
        backward(model, number)


def clamps_in_hooks(model):
    """Gradients that hooks clamp, of which one is removed again, accumulated over two steps."""
    for each in model.parameters():
        each.register_hook(lambda gradient: gradient.clamp(-1e-3, 2e-3))
        each.register_hook(torch.zeros_like).remove()
    optimizer = oases.make_optimizer(model, torch.optim.SGD, lr=0.5)
    for number in range(4):
        backward(model, number)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def decays(model, used=lambda number: False):
    """AdamW with weight decay over a part that no pass uses, or only some."""
    backward(model, 7)
    optimizer = oases.make_optimizer(model, torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    for number in range(3):
        optimizer.zero_grad()
        backward(model, number, extra=used(number))
        optimizer.step()


def closures(model):
    optimizer = oases.make_optimizer(model, torch.optim.LBFGS, lr=0.5, max_iter=3)

    def closure():
        optimizer.zero_grad()
        return backward(model, 0)

    optimizer.step(closure)


LOOPS = {
    "steps in hooks": steps_in_hooks,
    "clamps in hooks": clamps_in_hooks,
    "never used": decays,
    "sometimes used": lambda model: decays(model, lambda number: number == 1),
    "closures": closures,
}


def apart(shape, loop, options):
    """The largest relative difference of a weight after a loop, on the first rank."""
    model, plain = made(shape, **options), made(**options)
    for each in (model, plain):
        LOOPS[loop](each)
    found = oases.full_state_dict(model)
    pairs = [(found[name], value) for name, value in plain.state_dict().items() if found]
    return max([float(((one - other).abs().max() / other.abs().max()).detach()) for one, other in pairs], default=0.0)


TWO = [
    ("dp", "steps in hooks", False), ("zero", "steps in hooks", False), ("fsdp", "steps in hooks", False),
    ("pp", "steps in hooks", False), ("dp", "clamps in hooks", False), ("fsdp", "clamps in hooks", True),
    ("dp", "never used", False), ("zero", "sometimes used", False), ("fsdp", "never used", True),
    ("fsdp", "sometimes used", True),
]  # fmt: skip


@pytest.mark.few(4, 10)
@pytest.mark.parametrize(("shape", "loop", "shared"), TWO)
def test_two_ranks_train_as_one_process(two_ranks, shape, loop, shared):
    assert max(two_ranks.run(apart, shape, loop, {"shared": shared})) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "loop"), [("dp tp", "steps in hooks"), ("dp tp", "never used"), ("pp fsdp", "steps in hooks")]
)
def test_four_ranks_train_as_one_process(four_ranks, shape, loop):
    assert max(four_ranks.run(apart, shape, loop, {})) < 1e-9


def refusals():
    zero, sharded = made("zero"), made("fsdp")
    return [said(lambda: closures(zero)), said(lambda: sharded.__deepcopy__({}))]


def test_what_shares_cannot_do_is_refused(two_ranks):
    for lbfgs, copied in two_ranks.run(refusals):
        assert "UsageError: LBFGS computes with all parameters, and zero gives each rank a share" in lbfgs
        assert "UsageError: a copy of a model in stages, or with sharded weights" in copied


def overflows():
    """Scale, and whether weights stay, after a step with an infinity that one rank sets in its part of a gradient."""
    model = made("tp")
    scaler, before = torch.amp.GradScaler("cpu", init_scale=1024.0), copy.deepcopy(oases.full_state_dict(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(tokens(0), labels=tokens(1))).backward()
    if dist.get_rank() == 1:
        model.layers[0].up.weight.grad[-1, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    after = oases.full_state_dict(model)
    return scaler.get_scale(), all(torch.equal(after[name], value) for name, value in before.items())


def test_an_infinity_in_one_shard_leaves_out_the_step_on_all_ranks(two_ranks):
    assert two_ranks.run(overflows) == [(512.0, True)] * 2


def loads_full_tensors():
    model, plain = made("fsdp"), made()
    with torch.no_grad():
        for each in plain.parameters():
            each.add_(1.0)
    model.load_state_dict(plain.state_dict())
    found = oases.full_state_dict(model)
    return all(torch.equal(found[name], value) for name, value in plain.state_dict().items() if found)


def test_shards_load_full_tensors(two_ranks):
    assert all(two_ranks.run(loads_full_tensors))
