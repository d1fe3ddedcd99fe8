"""Models that `parallelize` refuses, and its messages: never a wrong result."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from autotp.comparison import said
from autotp.plain_models import WIDTH, Block, Plain, apart, loss_of, made, spec, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import oases
from oases.core.execution.dtensors import local_of

pytestmark = pytest.mark.usefixtures("shared_traces")


class Sum(Block):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Odd(nn.Module):
    """Three heads."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OldNorm(Block):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.weight_norm(self.up)


def plain(**options):
    return made(Plain, **options)


def run(model, **options):
    oases.parallelize(model, spec=options.pop("spec", spec()), **options)
    return model(tokens())


def _with(action, model=None):
    model = model or plain()
    action(model)
    return run(model)


def _after(action):
    model = plain()
    oases.parallelize(model, spec=spec())
    model(tokens())
    action(model)
    return loss_of(model(tokens())).backward()


def _patched(model):
    old = model.layers[0].attn.forward
    model.layers[0].attn.forward = lambda *args: 2 * old(*args)


def _quantised(model):
    model.layers[0].up.weight = nn.Parameter(torch.zeros(4 * WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)


def _meta():
    with torch.device("meta"):
        return run(Plain().double())


def _checkpointed():
    model = plain()
    oases.parallelize(model, spec=spec())
    loss_of(checkpoint(model, tokens(), use_reentrant=False)).backward()


def _layer_checkpointed():
    class Checkpointed(Plain):
        def forward(self, tokens):
            x = self.table(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    loss_of(run(made(Checkpointed))).backward()


def _twice():
    model = plain()
    run(model)
    return run(model)


class Exit(Plain):
    """Runs some of its layers alone."""

    some = slice(None)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers[self.some]:
            x = layer(x)
        return self.head(x)


def _early(some):
    model = made(Exit, layers=3)
    oases.parallelize(model, spec=spec())
    model.some = some
    return model(tokens())


class Steps(Plain):
    """Tells its layers their number, in one tensor."""

    def forward(self, tokens):
        x, step = self.table(tokens), torch.zeros(1, 1, dtype=torch.float64)
        for layer in self.layers:
            x = layer(x, step)
            step += 1
        return self.head(x)


def _replaced(model):
    model.layers[0].attn.forward = lambda x, mask=None: x


def _class_changed():
    class Changed(Block):
        pass

    model = made(Plain, Changed)
    run(model)
    Changed.forward = lambda self, x, mask=None: x
    return model(tokens())


CASES = {
    "heads that do not divide": (
        lambda: run(made(Plain, Odd)),
        "UsageError: the tensor-parallel degree 2 does not divide .* 3 .* degrees that fit this model: 1, 3",
    ),
    "again": (_twice, "UsageError: Plain is parallelized already; build a new model"),
    "layer's data": (lambda: run(made(Plain, Sum)), "UsageError: .*data-dependent forward"),
    "integers": (lambda: _with(_quantised), "UsageError: layers.0.up.weight is of type torch.int8, a quantised"),
    "other seeds": (
        lambda: run(made(Plain, seed=dist.get_rank())),
        "UsageError: .*table.weight .* of rank 0 differs .* of rank 1; call torch.manual_seed",
    ),
    "patched": (lambda: _with(_patched), "UsageError: layers.0.attn: its forward was replaced on the object"),
    "compiled": (lambda: run(torch.compile(plain(), backend="eager")), "UsageError: .*torch.compile"),
    "compiled in place": (
        lambda: _with(lambda m: m.layers[0].compile(backend="eager")),
        "UsageError: layers.0: .*compiled",
    ),
    "old weight norm": (lambda: run(made(Plain, OldNorm)), "UsageError: .*torch.nn.utils.parametrizations"),
    "hooks of parameters": (
        lambda: _with(lambda m: m.layers[0].up.weight.register_hook(print)),
        "UsageError: layers.0.up.weight has hooks, .*add them afterwards",
    ),
    "no data": (_meta, "RuntimeError: table.weight has no data; call oases.load_weights"),
    "checkpoint": (_checkpointed, "RuntimeError: .*recomputed in a backward pass.*recompute='full'"),
    "checkpointed layers": (_layer_checkpointed, "Error: .*"),
    "hooks later": (
        lambda: _after(lambda m: m.layers[1].attn.register_forward_hook(print)),
        "RuntimeError: layers.1.attn got hooks, which would not be called: add them before parallelize",
    ),
    "forward later": (lambda: _after(_replaced), "RuntimeError: layers.0.attn got another forward"),
    "forward of a class later": (_class_changed, "RuntimeError: layers.0 got another forward: put it there before"),
    "forward of a layer later": (
        lambda: _after(lambda m: setattr(m.layers[1], "forward", lambda x: x)),
        "UsageError: layers.1 got another forward, which would read .* put it there before parallelize",
    ),
    "forward of the head later": (
        lambda: _after(lambda m: setattr(m.head, "forward", lambda x: F.linear(x, m.head.weight))),
        "UsageError: head got another forward, which would read .* put it there before parallelize",
    ),
    "method later": (
        lambda: _after(lambda m: setattr(m.layers[1], "mlp", lambda x: x)),
        "RuntimeError: layers.1 had mlp and has another function now: set it before parallelize",
    ),
    "second derivatives": (
        lambda: _after(lambda m: torch.autograd.grad(loss_of(m(tokens())), m.head.weight, create_graph=True)),
        "RuntimeError: second derivatives of Plain are not available: .* leave out create_graph=True",
    ),
    "module later": (
        lambda: _after(lambda m: setattr(m.layers[1], "up", nn.Linear(WIDTH, 4 * WIDTH))),
        "RuntimeError: layers.1 has another module up now: put it there before parallelize",
    ),
    "arguments in place": (
        lambda: run(made(Steps)),
        r"RuntimeError: layers.0 was called with a tensor that was changed in place .*\(step = step \+ 1\), or",
    ),
    "layer hooks": (
        lambda: _with(lambda m: m.layers[0].register_forward_hook(lambda *given: given[-1] * 2)),
        "RuntimeError: layers.0 has no result of its own.*schedule='layers'",
    ),
    "early exit": (lambda: _early(slice(0, 2)), "RuntimeError: layers.1 has no result of its own"),
    "skipped": (lambda: _early(slice(1, 3)), "RuntimeError: layers.1 was called with"),
    "no layers": (lambda: run(plain(), spec=spec(layers=("blocks",))), r"UsageError: spec.layers names \['blocks'\]"),
    "no parameter": (lambda: run(plain(), spec=spec(replicate=("*.gate",))), "UsageError: spec.replicate has"),
    "no table": (lambda: run(plain(), spec=spec(vocabulary="words")), "UsageError: spec names 'words'"),
    "no head": (
        lambda: run(plain(), spec=spec(vocabulary="table", heads=("out",))),
        "UsageError: spec names 'out', which is None",
    ),
    "head alone": (lambda: run(plain(), spec=spec(heads=("head",))), "UsageError: .*name the table"),
    "other head": (
        lambda: run(plain(), spec=spec(vocabulary="table", heads=("layers.0.up",))),
        "UsageError: .*'layers.0.up' gives 64 logits, and the vocabulary 'table' has 50 rows",
    ),
    "no inputs": (lambda: oases.parallelize(plain()), "UsageError: .*spec=ParallelSpec"),
    "replicas of another name": (
        lambda: run(plain(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tp"))),
        "UsageError: mesh has the dimension 'data', over which nothing would be averaged; replicas are those of 'dp'",
    ),
    "replicas alone": (
        lambda: run(plain(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))),
        r"UsageError: mesh has the dimensions \('dp',\); name the tensor-parallel one 'tp'",
    ),
    "inference": (torch.inference_mode()(lambda: run(plain())), r"UsageError: parallelize\(\) in inference_mode\(\)"),
    "recompute": (lambda: run(plain(), recompute=True), "ScheduleError: unknown recompute True; known are none"),
}  # fmt: skip


def message(name):
    return said(CASES[name][0])


@pytest.mark.few(6, 12)
@pytest.mark.parametrize("name", CASES)
def test_a_clear_error(two_ranks, name):
    for text in two_ranks.run(message, name):
        assert re.search(CASES[name][1], text), text


def test_several_ranks_without_a_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(oases.UsageError, match=r"WORLD_SIZE is 2: .*call torch.distributed.init_process_group\(\)"):
        run(plain())


def with_spec():
    found = {}
    for name, options in {
        "all": {},
        "replicate": {"replicate": ("*.up.weight",)},
        "layers": {"layers": ("layers",)},
        "vocabulary": {"vocabulary": "table", "heads": ("head",)},
        "no vocabulary": {"vocabulary": ""},
    }.items():
        model, parallel = plain(), plain()
        oases.parallelize(parallel, spec=spec(**options))
        report = parallel.oases_partition
        found[name] = apart(model, parallel, tokens()), report.layers[0].column, report.vocabulary
    return found


@pytest.mark.long
def test_what_a_spec_says(two_ranks):
    for found in two_ranks.run(with_spec):
        assert max(worst for worst, _, _ in found.values()) < 1e-12
        columns = {name: column for name, (_, column, _) in found.items()}
        assert columns.pop("replicate") == ["attn.qkv.weight"]
        assert all(column == ["attn.qkv.weight", "up.weight"] for column in columns.values())
        assert {name for name, (_, _, vocabulary) in found.items() if not vocabulary} == {"no vocabulary"}


class Separate(nn.Module):
    """Queries of twelve heads, keys and values of as many as asked."""

    def __init__(self, keys):
        super().__init__()
        self.keys = keys
        self.q, self.out = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 4 * keys), nn.Linear(WIDTH, 4 * keys)

    def forward(self, x):
        q, k, v = (each(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(12 // self.keys, 1) for each in (k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def of_degree(ranks, keys):
    """The loss and the norm of all gradients, which need no other rank's part; the columns."""
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return None
    found, model = [], None
    for parallel in (False, True):
        model = made(Plain, Separate, keys=keys)
        if parallel:
            oases.parallelize(model, mesh=group, spec=spec())
        loss = loss_of(model(tokens()))
        loss.backward()
        found.append((float(loss.detach()), *(local_of(each.out.bias.grad) for each in model.layers)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    return model.oases_partition.layers[0].column


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("ranks", "keys"), [(1, 12), (3, 12), pytest.param(4, 12, marks=pytest.mark.slow), (4, 2), (3, 1), (4, 4)]
)
def test_degrees_and_fewer_heads_of_keys_than_ranks(four_ranks, ranks, keys):
    for column in four_ranks.run(of_degree, ranks, keys)[:ranks]:
        assert column == (["q.weight"] if keys % ranks else ["q.weight", "k.weight", "v.weight"])
