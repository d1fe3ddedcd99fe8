"""Weights of a parallelized model that code outside of its layers reads and writes, beside one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from autotp.comparison import said
from autotp.zoo import build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import oases


class FusedHead(torch.autograd.Function):
    """Sum of a head's losses, with its gradients computed in the forward pass, as fused kernels do."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        logits = hidden @ weight.t()
        chances = logits.softmax(-1)
        chances[torch.arange(len(targets)), targets] -= 1
        ctx.save_for_backward(chances @ weight, chances.t() @ hidden)
        return F.cross_entropy(logits, targets, reduction="sum")

    @staticmethod
    def backward(ctx, gradient):
        of_hidden, of_weight = ctx.saved_tensors
        return gradient * of_hidden, gradient * of_weight, None


def plain():
    torch.manual_seed(0)
    return build("llama").double()


def tokens(model, dp):
    found = torch.randint(90, (4, 12), generator=torch.Generator().manual_seed(1))
    return (
        found.chunk(dp)[model.oases_mesh.get_local_rank("dp")] if dp > 1 and hasattr(model, "oases_mesh") else found
    )


def own_loss(model, given):
    logits = model(input_ids=given).logits[:, :-1]  # the model's own loss is of float32
    return F.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())


def hidden_and_targets(model, given):
    found = model(input_ids=given, output_hidden_states=False, logits_to_keep=1)
    return found, model.model(input_ids=given).last_hidden_state[:, :-1].flatten(0, 1), given[:, 1:].flatten()


def in_chunks(model, given):
    _, hidden, targets = hidden_and_targets(model, given)
    weight = model.lm_head.weight
    parts = zip(hidden.chunk(3), targets.chunk(3), strict=True)
    return sum(F.cross_entropy(F.linear(h, weight), t, reduction="sum") for h, t in parts) / len(targets)


def fused(model, given):
    _, hidden, targets = hidden_and_targets(model, given)
    return FusedHead.apply(hidden, model.lm_head.weight, targets) / len(targets)


def tied_by_hand(model, given):
    _, hidden, targets = hidden_and_targets(model, given)
    return F.cross_entropy(hidden @ model.model.embed_tokens.weight.T, targets)


def rows(model, given):
    table = model.model.embed_tokens.weight
    chosen = table[torch.tensor([1, 60])].pow(2).sum() + table[40:50].sum() + table[3].norm()
    return own_loss(model, given) + 0.1 * chosen


def norms(model, given):
    return own_loss(model, given) + 0.01 * sum(each.norm() for each in model.parameters())


def orthogonal(model, given):
    weights = [model.model.layers[0].mlp.down_proj.weight, model.model.layers[1].self_attn.q_proj.weight]
    return own_loss(model, given) + sum((w @ w.T - torch.eye(len(w))).pow(2).mean() for w in weights)


def as_vector(model, given):
    start = torch.linspace(0, 1, sum(each.numel() for each in model.parameters()))
    return own_loss(model, given) + (nn.utils.parameters_to_vector(model.parameters()) - start).pow(2).mean()


READS = (in_chunks, fused, tied_by_hand, rows, norms, orthogonal, as_vector)


def zero_rows(model):
    table = model.model.embed_tokens.weight
    table.data[3].zero_()
    table.data[40:50].fill_(0.5)
    table.data[0].view(4, 8)[1].copy_(torch.ones(8))


def set_items(model):
    with torch.no_grad():
        for each in (model.lm_head.weight, model.model.layers[0].mlp.down_proj.weight):
            each[5] = 0.25
            each[:, 3:20] *= 2
            each[torch.tensor([1, 30])] = torch.arange(float(each.shape[1])).double()


def numbers(like):
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).view(like.shape).sin() * 0.2


def copied(model):
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(numbers(each))
            each.mul_((torch.arange(each.shape[0]) % 2).view(-1, *[1] * (each.ndim - 1)))
            each.add_(numbers(each), alpha=0.5).clamp_(max=torch.full(each.shape, 0.125))


def drawn_again(model):
    torch.manual_seed(7)
    for each in model.modules():
        if isinstance(each, nn.Linear | nn.Embedding):
            each.reset_parameters()


def initialised(model):
    torch.manual_seed(7)
    for each in model.parameters():
        if each.ndim == 2 and len(each) >= each.shape[1]:
            nn.init.orthogonal_(each)
    nn.init.trunc_normal_(model.lm_head.weight, std=0.02)
    nn.init.eye_(model.model.layers[0].self_attn.q_proj.weight)


def data_set(model):
    for each in model.parameters():
        each.data = numbers(each)


def averaged_by_hand(model):
    means = [torch.zeros(each.shape, dtype=each.dtype) for each in model.parameters()]
    with torch.no_grad():
        for mean, each in zip(means, model.parameters(), strict=True):
            mean.mul_(0.9).add_(each, alpha=0.1)
            each.copy_(mean)


WRITES = (zero_rows, set_items, copied, drawn_again, initialised, data_set, averaged_by_hand)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def apart(one, model):
    """Largest difference of gradients and weights from those of one process, and whose."""
    theirs, worst = dict(model.named_parameters()), (0.0, "")
    for name, each in one.named_parameters():
        pairs = [(each.detach(), theirs[name].detach()), (each.grad, theirs[name].grad)]
        for mine, its in pairs:
            if mine is not None:
                scale = float(mine.abs().max()) + 1e-9
                worst = max(worst, (float((whole(its) - mine).abs().max()) / scale, name))
    return worst


def parallelized(dp):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
    return oases.parallelize(plain(), mesh=mesh, schedule="oases")


def read(dp):
    found, one, model = {}, plain(), parallelized(dp)
    for loss_of in READS:
        losses = [loss_of(each, tokens(each, dp)) for each in (one, model)]
        for each, loss in zip((one, model), losses, strict=True):
            each.zero_grad()
            loss.backward()
        found[loss_of.__name__] = apart(one, model)
        if dp == 1:
            found[f"loss {loss_of.__name__}"] = abs(float(losses[0]) - float(losses[1])), ""
    return found


def written():
    found, one, model = {}, plain(), parallelized(1)
    for write in WRITES:
        for each in (one, model):
            each.zero_grad()
            write(each)
            own_loss(each, tokens(each, 1)).backward()
        found[write.__name__] = apart(one, model)
    return found


def test_weights_read_outside_of_their_modules(two_ranks):
    for found in two_ranks.run(read, 1):
        assert not {name: each for name, each in found.items() if each[0] > 1e-5}


@pytest.mark.long
def test_weights_read_by_replicas(four_ranks):
    for found in four_ranks.run(read, 2):
        assert not {name: each for name, each in found.items() if each[0] > 1e-5}


def test_weights_written_from_outside(two_ranks):
    for found in two_ranks.run(written):
        assert not {name: each for name, each in found.items() if each[0] > 1e-5}


class Untied(nn.Module):
    """A head whose weight becomes the table's after parallelize(), which has not sharded it."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(90, 32), nn.Linear(32, 90, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, given):
        x = self.table(given)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def tied_later():
    models, given = [], torch.arange(48).view(4, 12)
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Untied().double())
    oases.parallelize(models[1], spec=oases.ParallelSpec(inputs=((given,), {}), vocabulary="table"))
    for each in models:
        each.out.weight = each.table.weight
        F.cross_entropy(each(given).flatten(0, 1), given.flatten() + 40).backward()
    return apart(*models)


def test_a_module_that_gets_a_sharded_weight_later_reads_all_of_it(two_ranks):
    for worst, name in two_ranks.run(tied_later):
        assert worst < 1e-10, name


def refusals():
    model = parallelized(1)
    own_loss(model, tokens(model, 1)).backward()
    weight = model.lm_head.weight
    return [
        said(lambda: dist.all_reduce(weight.grad)),
        said(lambda: dist.broadcast(weight.data, 0)),
        said(lambda: weight @ torch.ones(5, 5, dtype=torch.double)),
        said(weight.detach().t_),
    ]


def test_what_has_no_meaning_is_refused(two_ranks):
    for reduced, sent, wrong, turned in two_ranks.run(refusals):
        for text in (reduced, sent):
            assert "UsageError: c10d." in text, text
            assert "tensor.to_local(), or all of it, tensor.full_tensor()" in text, text
        assert "mat1 and mat2 shapes cannot be multiplied" in wrong, wrong
        assert "UsageError: aten.t_.default would give a DTensor of shape (90, 32) another one" in turned, turned
