"""Models trained in pipeline stages beside the same models in one process; runs on every rank."""

import torch
import torch.distributed as dist
from autotp.zoo import batch, build
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.core.execution.dtensors import local_of as local
from oases.core.execution.failure import check

DIMENSIONS = ("pp", "dp", "tp")
LAYERS = {"gpt2": "n_layer", "t5": "num_layers"}
"""Options with the number of layers, by model; num_hidden_layers in others."""


def sizes(name, layers):
    if name == "gemma3":
        return {"num_hidden_layers": layers, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    return {LAYERS.get(name, "num_hidden_layers"): layers}


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS)


def shares(data, shape, model):
    """The samples of this rank's replica."""
    replica = model.oases_pipeline.mesh.replica(shape[2]) if hasattr(model, "oases_pipeline") else 0
    return {key: value.chunk(shape[1])[replica] for key, value in data.items()}


def trained_in_stages(
    name, shape, options, layers=4, steps=3, dtype=torch.float64, changes=None, prepare=None, before=None
):
    """Losses and gradient norms of steps of AdamW, each beside those of one process; evaluation; held parameters.

    changes: of the configuration. prepare: called with each model before it is parallelized. before: called with the
    parallel model and the number of each step.
    """
    dtype = torch.float32 if name == "olmoe" and prepare is None else dtype  # its experts' matmul has no float64
    plain, model = (build(name, **sizes(name, layers), **(changes or {})).to(dtype) for _ in range(2))
    whole = sum(parameter.numel() for parameter in model.parameters())
    for each in (plain, model) if prepare is not None else ():
        prepare(each)
    how = options if "plan" in options else {"mesh": mesh_of(*shape), "micro_batches": 2, **options}
    oases.parallelize(model, **how)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    ours = oases.make_optimizer(model, torch.optim.AdamW, lr=1e-3)
    pairs = []
    for step in range(steps):
        if before is not None:
            before(model, step)
        data = batch(name, samples=8, seed=step, dtype=dtype)
        theirs.zero_grad()
        expected = plain(**data).loss
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        ours.zero_grad()
        if hasattr(model, "train_step"):
            loss = model.train_step(**shares(data, shape, model))
        else:  # a plan of tensor parallelism alone
            loss = model(**data).loss
            loss.backward()
        pairs.append((float(expected.detach()), float(loss.detach())))
        pairs.append((float(norm), float(oases.clip_grad_norm(model, 1.0))))
        ours.step()
    data = batch(name, samples=8, seed=9, dtype=dtype)
    with torch.no_grad():
        staged = hasattr(model, "eval_step")
        found = model.eval_step(**shares(data, shape, model)) if staged else model(**data).loss
        pairs.append((float(plain(**data).loss), float(found)))
    check(dist.group.WORLD)  # no rank has reported a failure that did not end its step
    held = sum(local(parameter).numel() for parameter in model.parameters()) / whole
    runs = [(each.runs, each.schedule, each.layers) for each in model.oases_partition.layers]
    if staged:
        model.oases_pipeline.close()
    return pairs, held, runs


def apart(results):
    """Largest relative difference of a pair on any rank."""
    return max(abs(one - other) / abs(one) for pairs, *_ in results for one, other in pairs)
