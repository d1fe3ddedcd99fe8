"""Plain torch tools on parallelized models, whose parameters are DTensors, beside the same tools in one process."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from autotp.comparison import said
from autotp.zoo import build
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

import oases

pytestmark = [pytest.mark.usefixtures("shared_traces"), pytest.mark.filterwarnings("ignore:Muon multiplies")]

DIMENSIONS = ("pp", "dp", "tp")


class Lamb(torch.optim.Optimizer):
    """Steps as long as the weight: right only with the norms of whole matrices."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(one.grad * (one.norm() / one.grad.norm()), alpha=-group["lr"])


def matrices(model):
    return [each for name, each in model.named_parameters() if each.ndim == 2 and "layers" in name]


OPTIMIZERS = {
    "clipping": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 1e-2),
    "a largest gradient": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), (1e-3, float("inf"))),
    "foreach": (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=True), None),
    "LAMB": (lambda model: Lamb(model.parameters(), lr=1e-2), None),
    # Rounded to bfloat16 inside: on steps of another order of sums.
    "Muon": (lambda model: torch.optim.Muon(matrices(model), lr=1e-4), None),
}


def data(step, model=None, shape=(1, 1, 1)):
    """Samples of a step; those of this rank's replica for a parallelized model."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(90, (8, 12), generator=generator)
    if model is not None:
        tokens = tokens.chunk(shape[1])[model.oases_mesh.get_local_rank("dp")]
    return {"input_ids": tokens, "labels": tokens}


def trained(model, optimizer, shape=None, clip=None, scaler=None, steps=2):
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = data(step) if shape is None else data(step, model, shape)
        if hasattr(model, "train_step"):
            model.train_step(**batch)
        else:
            loss = model(**batch).loss
            (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            norms.append(float(clip_grad_norm_(model.parameters(), *(clip if isinstance(clip, tuple) else (clip,)))))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return norms


def started(shape, **options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS) if shape[0] > 1 else None
    mesh = init_device_mesh("cpu", shape[1:], mesh_dim_names=DIMENSIONS[1:]) if mesh is None else mesh
    if shape[0] > 1:
        options["micro_batches"] = 2
    return oases.parallelize(plain(), mesh=mesh, **options)


def plain(name="llama"):
    return build(name).double()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def apart(model, one):
    """Largest relative difference of a model's parameters from those of another one with the same names, and more."""
    theirs = dict(one.named_parameters())
    found = [
        float((whole(each.detach()) - theirs[name].detach()).abs().max() / theirs[name].detach().abs().max())
        for name, each in model.named_parameters()
    ]
    assert len(found) > 8
    return max(found)


def differences(shape):
    found = {}
    for name, (make, clip) in OPTIMIZERS.items():
        if shape[0] > 1 and isinstance(clip, tuple):
            continue
        one, model = plain(), started(shape)
        assert all(isinstance(each, DTensor) for each in model.parameters())
        norms = trained(one, make(one), clip=clip), trained(model, make(model), shape, clip=clip)
        found[name] = max([apart(model, one), *(abs(a - b) / a for a, b in zip(*norms, strict=True))])
        if hasattr(model, "oases_pipeline"):
            model.oases_pipeline.close()
    return found


@pytest.mark.parametrize("shape", [(1, 2, 2), pytest.param((2, 1, 2), marks=pytest.mark.long)])
def test_norms_and_optimizers_of_whole_matrices(four_ranks, shape):
    for found in four_ranks.run(differences, shape):
        worst = {name: each for name, each in found.items() if each > (2e-4 if name == "Muon" else 1e-5)}
        assert not worst


def other_tools():
    """Largest differences of tools that change, read, average and scale parameters."""
    shape, found = (1, 1, 2), {}

    def drawn(model):
        torch.manual_seed(5)
        for each in matrices(model):
            torch.nn.init.normal_(each, std=0.02)
        torch.nn.init.uniform_(next(model.parameters()))

    def read(model):
        largest = sum(each.detach().norm().item() + float(each.detach().max()) for each in model.parameters())
        with torch.no_grad():
            next(model.parameters()).mul_(largest)

    def set_data(model):
        for each in model.parameters():
            each.data = each.data * 1.5

    def scaled(model):
        given = None if model is one else shape
        trained(model, torch.optim.SGD(model.parameters(), 0.1), given, scaler=torch.amp.GradScaler("cpu", 64.0))

    def penalized(model):
        loss = model(**data(0)).loss + sum(whole(each.norm()) for each in matrices(model))
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()

    for tool in (drawn, read, set_data, scaled, penalized):
        one, model = plain(), started(shape)
        tool(one)
        tool(model)
        with torch.no_grad():  # it reads what the tool changed
            losses = [float(each(**data(9)).loss) for each in (one, model)]
        found[tool.__name__] = max(apart(model, one), abs(losses[0] - losses[1]))
    one, model = plain(), started(shape)
    means = [AveragedModel(each, avg_fn=lambda mean, new, _: 0.9 * mean + 0.1 * new) for each in (one, model)]
    for each, mean, given in ((one, means[0], None), (model, means[1], shape)):
        mean.update_parameters(each)
        trained(each, torch.optim.SGD(each.parameters(), 0.1), given)
        mean.update_parameters(each)
    found["averaged"] = apart(means[1].module, means[0].module)
    return found


def test_weights_drawn_read_set_scaled_and_averaged(two_ranks):
    for found in two_ranks.run(other_tools):
        assert not {name: each for name, each in found.items() if each > 1e-5}


def found_infinity():
    """Scales and weights after an infinity in one rank's shard, where a replicated gradient comes first."""
    model = started((1, 1, 2))
    parameters = sorted(model.parameters(), key=lambda each: each.ndim)
    before = [each.detach().clone() for each in parameters]
    optimizer, scaler = torch.optim.SGD(parameters, 0.1), torch.amp.GradScaler("cpu", 1024.0)
    scaler.scale(model(**data(0)).loss).backward()
    if dist.get_rank() == 1:
        model.model.layers[0].mlp.up_proj.weight.grad.to_local()[-1, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(whole(a), whole(b)) for a, b in zip(parameters, before, strict=True))
    return scaler.get_scale(), same


def test_all_ranks_skip_a_step_with_an_infinity_on_one(two_ranks):
    assert two_ranks.run(found_infinity) == [(512.0, True)] * 2


def saved_and_loaded(name, folder):
    """Weights of one process, full ones of two ranks, and those that another mesh loads."""
    model = oases.parallelize(plain(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**data(0)).loss.backward()
    optimizer.step()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = get_state_dict(model, optimizer)
    dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    other = oases.parallelize(plain(name), mesh=alone)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, theirs), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, theirs, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    moments = [
        float((whole(optimizer.state[a]["exp_avg"]) - theirs.state[b]["exp_avg"]).abs().max())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    ]
    weights = [float((full[key] - each).abs().max()) for key, each in other.state_dict().items()]
    again = oases.parallelize(plain(name))
    again.load_state_dict(full)
    losses = [float(each(**data(1)).loss) for each in (model, other, again)]
    return max(*moments, *weights), max(losses) - min(losses)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_distributed_checkpoints_at_another_mesh(two_ranks, tmp_path, name):
    for worst, losses in two_ranks.run(saved_and_loaded, name, str(tmp_path / "saved")):
        assert worst == 0
        assert losses < 1e-6


def of_plain_shards(folder):
    """Errors of torch's tools with weights fused of unequal parts, and gradients' norms beside one process."""
    one, model = plain("phi3"), oases.parallelize(plain("phi3"))
    norms = [0.0, 0.0]
    for at, each in enumerate((one, model)):
        each(**data(0)).loss.backward()
        norms[at] = float(clip_grad_norm_(each.parameters(), 1e9))
    texts = [
        said(lambda: get_model_state_dict(model)),
        said(lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=folder)),
        said(torch.optim.Muon([each for each in model.parameters() if each.ndim == 2]).step),
    ]
    optimizer = oases.make_optimizer(model, torch.optim.AdamW, lr=1e-3)
    optimizer.step()
    torch.optim.AdamW(one.parameters(), lr=1e-3).step()
    losses = [float(each(**data(1)).loss) for each in (one, model)]
    return norms, losses, texts


def test_unequal_parts_are_plain_shards(two_ranks, tmp_path):
    for norms, losses, texts in two_ranks.run(of_plain_shards, str(tmp_path / "saved")):
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for text in texts[:2]:
            assert re.search(r"UsageError: .*is this rank's shard of a tensor, .*oases\.save_checkpoint", text), text
        assert re.search(r"UsageError: Muon computes with whole matrices, .*another optimizer", texts[2]), texts[2]


def refusals(folder):
    model, fused = started((1, 1, 2)), oases.parallelize(plain("gpt2"))
    first = next(model.parameters())
    model(**data(0)).loss.backward()
    adam = torch.optim.AdamW(model.parameters())
    adam.step()
    if dist.get_rank() == 0:
        torch.save((model.state_dict(), adam.state_dict()), f"{folder}.pt")
    dist.barrier()
    theirs, of_adam = torch.load(f"{folder}.pt", weights_only=False)
    adafactor = torch.optim.Adafactor(model.parameters())
    changed = copy.deepcopy(model)
    changed.model.extra = torch.nn.Linear(2, 2)

    def stepped():
        adam.load_state_dict(of_adam)
        adam.step()

    def set_data():
        first.data = torch.zeros(3, dtype=first.dtype)

    def loaded_whole():
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(fused, get_model_state_dict(fused, options=options), options=options)

    def to_hugging_face():
        writer = dcp.HuggingFaceStorageWriter(folder)
        dcp.save(get_model_state_dict(fused), storage_writer=writer)

    tools = (
        adafactor.step, set_data, loaded_whole, to_hugging_face, lambda: model.resize_token_embeddings(200),
        lambda: changed(**data(0)), stepped, lambda: model.load_state_dict(theirs),
    )  # fmt: skip
    return [said(tool) for tool in tools]


REFUSED = (
    "UsageError: Adafactor sums over rows and columns of whole matrices, .*; use AdamW",
    r"UsageError: \.data of a parameter of shape .* was set to a Tensor of shape \(3,\); set it to a full tensor",
    r"UsageError: .* is fused of several parts, .*full_state_dict=True .*oases\.load_weights",
    r"UsageError: .* is fused of several parts, .*save_pretrained",
    r"UsageError: resize_token_embeddings\(\) .* before oases\.parallelize",
    r"UsageError: model\.extra\.bias came after parallelize\(\), .*get_peft_model\(model, config\), then",
)


def test_what_cannot_be_right_is_refused(two_ranks, tmp_path):
    for *found, stepped, loaded in two_ranks.run(refusals, str(tmp_path / "saved")):
        for text, expected in zip(found, REFUSED, strict=True):
            assert re.search(expected, text), text
        for text in (stepped, loaded):
            assert "is the shard of rank (0,) of its mesh, and this is rank (1,)" in text, text
