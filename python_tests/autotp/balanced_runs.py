"""Training of models with balanced experts on every rank, beside the model in one process."""

import sys
from contextlib import nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from autotp.comparison import FLOOR, said
from autotp.staged import mesh_of as stage_mesh
from autotp.staged import shares, trained_in_stages
from autotp.zoo import batch, build
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.autotp.balanced import BalancedExperts
from oases.core.blocks.sharding import cuts, holders
from oases.core.execution.dtensors import local_of as local
from oases.core.execution.group import group_of, scheduler_of
from oases.moe.placement import Placement, owner_only


class Wide:
    """The module torch for an author's code that computes norms and routers in float32: in float64 instead."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def widen(model):
    for module in model.modules():
        code = sys.modules[type(module).__module__]
        if code.__name__.startswith("transformers.models."):
            code.torch = Wide()


def mesh_of(dims):
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def pair(name, dtype=torch.float64, **changed):
    """Twice the same model, of which the first one is to stay whole."""
    model, parallel = (build(name, **changed).to(dtype) for _ in range(2))
    if dtype == torch.float64:
        in_float64(model)
    return model, parallel


def loss_of(result, data):
    """Mean over all tokens but the first: replicas have equally many."""
    return F.cross_entropy(result.logits[:, :-1].flatten(0, 1), data["input_ids"][:, 1:].flatten())


def copied_everywhere(experts, devices):
    """Placement with a copy of every expert on every rank."""
    routes, _ = owner_only(torch.zeros((experts, devices), dtype=torch.int64).numpy())
    homes = routes[:, 0].tolist()
    routes[:] = range(devices)
    copies = tuple(tuple(device for device in range(devices) if device != home) for home in homes)
    return Placement("given", copies, routes, routes.sum(0), 0.0)


def whole_gradients(parallel):
    """Full gradients by name, of a model whose parameters have groups of their own."""
    known, held, found = cuts(parallel), holders(parallel), {}
    for name, parameter in parallel.named_parameters():
        gradient = local(parameter.grad)
        if id(parameter) in known:
            group = group_of(held[id(parameter)]._group_name)
            if group is not None:
                parts = [None] * group.size()
                dist.all_gather_object(parts, gradient, group=group)
                gradient = known[id(parameter)].join(parts)
        found[name] = gradient
    return found


def apart(model, parallel):
    """The largest difference of a gradient, relative to its largest entry (see FLOOR); and whose."""
    ours = whole_gradients(parallel)
    assert set(ours) <= {name for name, _ in model.named_parameters()}
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    worst = (0.0, "")
    for name, gradient in ours.items():
        whole = model.get_parameter(name).grad
        scale = max(float(whole.abs().max()), FLOOR * largest)
        worst = max(worst, (float((gradient - whole).abs().max()) / scale, name))
    return worst


def trained(name, dims, options, steps=10, placed=False, dtype=torch.float64):
    """Largest relative differences of losses, gradients and norms in steps of AdamW; report and held elements."""
    model, parallel = pair(name, dtype)
    oases.parallelize(parallel, mesh=mesh_of(dims), experts="balanced", **options)
    replicas = dims.get("dp", 1)
    mine = parallel.oases_mesh.get_local_rank("dp") if replicas > 1 else 0
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ours = oases.make_optimizer(parallel, torch.optim.AdamW, lr=1e-3)
    worst = {"logits": 0.0, "gradients": (0.0, ""), "norm": 0.0}
    for step in range(steps):
        if placed and step == 1:
            placed_everywhere(parallel)
        data = batch(name, seed=step)
        part = {key: value.chunk(replicas)[mine] for key, value in data.items()}
        expected, got = model(**data), parallel(**part)
        whole = expected.logits.detach()
        differs = (got.logits.detach() - whole.chunk(replicas)[mine]).abs().max() / whole.abs().max()
        worst["logits"] = max(worst["logits"], float(differs))
        loss_of(expected, data).backward()
        loss_of(got, part).backward()
        worst["gradients"] = max(worst["gradients"], apart(model, parallel))
        clips = (oases.clip_grad_norm, lambda each, most: torch.nn.utils.clip_grad_norm_(each.parameters(), most))
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        worst["norm"] = max(worst["norm"], abs(float(clips[step % 2](parallel, 0.5)) / norm - 1))
        for each in (model, parallel):
            torch.nn.utils.clip_grad_value_(each.parameters(), 1e-3)
        worst["gradients"] = max(worst["gradients"], apart(model, parallel))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    experts = [(n, p) for n, p in parallel.named_parameters() if ".experts." in n]
    worst["states"] = sum(ours.state[p]["exp_avg"].numel() for _, p in experts if p in ours.state)
    worst["whole"] = sum(model.get_parameter(name).numel() for name, _ in experts)
    held = {state.name: state.module.get_parameter(state.mlp.up).shape[0] for state in states_of(parallel)}
    runner = parallel.oases_partition.layers[0].runner
    worst |= {
        "in_pieces": len(runner.stack.schedule.dispatched),
        "sub_batches": runner.stack.schedule.num_sub_batches,
    }
    return worst | {"held": held, "report": parallel.oases_partition.json()["layers"][0]}


def refused(name, dims, options, changed):
    model = build(name, **changed)
    return said(lambda: oases.parallelize(model, mesh=mesh_of(dims), experts="balanced", **options))


def states_of(model):
    """States of the balanced expert modules of a model."""
    return [each for module in model.modules() for each in vars(module).values() if isinstance(each, BalancedExperts)]


def placed_everywhere(model):
    for state in states_of(model):
        state.placing.fix(copied_everywhere(state.number, state.groups.degree))


def in_float64(model):
    widen(model)
    model.set_experts_implementation("eager")  # grouped matmuls have no float64


def staged(name, shape, options):
    """`trained_in_stages` in ten steps; transformers' loss, a call of Tensor.float, in float64, too."""

    def place(model, step):
        if step == 1:
            placed_everywhere(model)

    options = {"experts": "balanced", **options}
    with patch.object(torch.Tensor, "float", lambda x, **options: x.to(torch.float64, **options)):
        return trained_in_stages(name, shape, options, 2, 10, prepare=in_float64, before=place)


def sharded_session(name, shape, options, dtype=torch.float64, seed=0, **changed):
    """A model in a stage, and its AdamW, in one parameter group as users make it."""
    model = build(name, seed, **changed).to(dtype)
    in_float64(model)
    oases.parallelize(model, mesh=stage_mesh(*shape), micro_batches=2, experts="balanced", **options)
    return model, oases.make_optimizer(model, torch.optim.AdamW, lr=1e-3, foreach=True)


def stepped(name, shape, model, optimizer, steps):
    """Losses and gradient norms of steps."""
    found = []
    for step in steps:
        data = shares(batch(name, samples=8, seed=step), shape, model)
        optimizer.zero_grad()
        found.append(float(model.train_step(**data).detach()))
        found.append(float(oases.clip_grad_norm(model, 0.5)))
        optimizer.step()
    return found


def states_shared(name, changed, shape, options, other_shape, other, folder):
    """Share of AdamW's state on this rank, of experts and of all else; steps here and from a checkpoint; weights."""
    with patch.object(torch.Tensor, "float", lambda x, **options: x.to(torch.float64, **options)):
        whole = {name: 2 * 8 * each.numel() for name, each in build(name, **changed).named_parameters()}
        model, optimizer = sharded_session(name, shape, options, **changed)
        stepped(name, shape, model, optimizer, range(2))
        share = {}
        for of_experts in (True, False):
            named = [(n, p) for n, p in model.named_parameters() if (".experts." in n) == of_experts]
            states = (optimizer.state[p][kind] for _, p in named for kind in ("exp_avg", "exp_avg_sq"))
            share[of_experts] = sum(local(each).nbytes for each in states) / sum(whole[n] for n, _ in named)
        oases.save_checkpoint(folder, model, optimizer, step=2)
        model.save_pretrained(folder / "pretrained")
        full = oases.full_state_dict(model)
        expected = stepped(name, shape, model, optimizer, range(2, 5))
        again, anew = sharded_session(name, other_shape, other, seed=1, **changed)
        oases.load_checkpoint(folder, again, anew)
        found = stepped(name, other_shape, again, anew, range(2, 5))
    return share[True], share[False], expected, found, full


def losses_in_bfloat16(name, shape, ways):
    """Losses and norms of each way to shard; weights are computed in bfloat16, and shards are their masters."""
    found = []
    for options in ways:
        model, optimizer = sharded_session(name, shape, {"dtype": torch.bfloat16, **options}, torch.float32)
        found.append(stepped(name, shape, model, optimizer, range(2)))
    return found


def on_wires(name, dims, wires):
    """Loss of a step with each wire_dtype, and bytes of its all-to-alls."""
    losses, sent = [], []
    for wire in wires:
        model = build(name)
        oases.parallelize(model, mesh=mesh_of(dims), experts="balanced", placement="none", wire_dtype=wire)
        scheduler = scheduler_of(group_of(states_of(model)[0].groups.expert))
        scheduler.reset_totals()
        data = batch(name)
        loss = loss_of(model(**data), data)
        loss.backward()
        losses.append(float(loss.detach()))
        totals = scheduler.totals()
        sent.append(sum(row.bytes for label, row in totals.items() if label.split()[0] in ("D", "E", "BF", "BE")))
    return losses, sent


def dropping(kind):
    """A small model whose routers drop tokens over a capacity."""
    sizes = dict(vocab_size=90, d_model=32, num_experts=4)
    if kind.startswith("Nllb"):
        sizes |= dict(encoder_layers=2, decoder_layers=2, encoder_sparse_step=1, decoder_sparse_step=1)
        sizes |= dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    else:
        sizes |= dict(d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = getattr(transformers, kind)
    return model(model.config_class(**sizes))


def unevenly_split(name, samples):
    """Call the model in eval mode with another number of samples on each replica; return the error."""
    model = build(name).eval()
    oases.parallelize(model, mesh=mesh_of({"dp": 2, "tp": 1}), experts="balanced", placement="none")
    data = {key: value[: samples[dist.get_rank()]] for key, value in batch(name).items()}
    with torch.no_grad():
        return said(lambda: model(**data))


def saved_and_loaded(name, dims, options, folder):
    """Train a step, save in two ways, load into new models, one of another degree; losses and the whole state."""
    parallel = build(name)
    oases.parallelize(parallel, mesh=mesh_of(dims), experts="balanced", **options)
    data = batch(name)
    optimizer = oases.make_optimizer(parallel, torch.optim.AdamW, lr=1e-2)
    loss_of(parallel(**data), data).backward()
    optimizer.step()
    oases.save_checkpoint(folder / "checkpoint", parallel, optimizer, step=1)
    parallel.save_pretrained(folder / "pretrained")
    again = build(name, seed=1)
    oases.parallelize(again, mesh=mesh_of(dims), experts="balanced", expert_parallel=1)
    oases.load_checkpoint(folder / "checkpoint", again, oases.make_optimizer(again, torch.optim.AdamW, lr=1e-2))
    with torch.device("meta"):
        empty = build(name)
    oases.parallelize(empty, mesh=mesh_of(dims), experts="balanced", weights=folder / "pretrained", **options)
    losses = [float(loss_of(each(**data), data).detach()) for each in (parallel, again, empty)]
    return losses, oases.full_state_dict(parallel)


def out_of_memory(name, dims, function):
    """Errors of a step in which rank 1 alone ran out of memory at a function, and of the next one."""
    model, data = build(name), batch(name)
    oases.parallelize(model, mesh=mesh_of(dims), experts="balanced")

    def step():
        model.zero_grad()
        loss = loss_of(model(**data), data)
        loss.backward()
        return float(loss.detach())

    step()
    broken = patch(function, side_effect=MemoryError("out of memory"))
    with broken if dist.get_rank() == 1 else nullcontext():
        first = said(step)
    return first, said(step)


def generated(name, dims):
    """Words that each replica generates, three more than the one before, and those of the model in one process."""
    model, parallel = (build(name).eval() for _ in range(2))
    oases.parallelize(parallel, mesh=mesh_of(dims), experts="balanced")
    rank = parallel.oases_mesh.get_local_rank("dp")
    options = {"max_new_tokens": 3 + 3 * rank, "do_sample": False, "pad_token_id": 0}
    start = batch(name)["input_ids"][rank : rank + 1, :5]
    return parallel.generate(start, synced_gpus=True, **options), model.generate(start, **options)
