"""Runs of the zoo's models on every rank: steps of training beside the model in one process, weights in and out."""

import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
from autotp.comparison import gradients_apart
from autotp.zoo import batch, build, config
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.core.execution.dtensors import local_of

DOCS = Path(__file__).parents[2] / "docs"


def rows_of(report):
    """Rows of a model in docs/models.md."""
    spec = importlib.util.spec_from_file_location("tables_of_models", DOCS / "models.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    return tables.rows(report)


def trained_beside_itself(name, options, dtype=torch.float32, steps=3, changes=None):
    model, parallel = (build(name, **(changes or {})).to(dtype) for _ in range(2))
    oases.parallelize(parallel, **options)
    report = parallel.oases_partition
    data = batch(name, dtype=dtype)
    expected, got = model(**data), parallel(**data)
    apart = float((got.logits - expected.logits).abs().max() / expected.logits.abs().max())
    expected.loss.backward()
    got.loss.backward()
    gradients = gradients_apart(model, parallel)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (parallel, model))
    losses = []
    for step in range(steps):
        data = batch(name, seed=step, dtype=dtype)
        pair = []
        for each, optimizer in ((model, theirs), (parallel, ours)):
            optimizer.zero_grad()
            loss = each(**data).loss
            loss.backward()
            optimizer.step()
            pair.append(float(loss.detach()))
        losses.append(pair)
    rows = [(row.where, row.collectives, row.hidden) for row in oases.report().stacks]
    found = {"logits": apart, "gradients": gradients, "losses": losses, "report": report.json(), "rows": rows}
    return found | {"table": rows_of(report) if not options else []}


def one_step(name, folder, out):
    """Build on meta, stream the weights, train a step of lr 0, and save."""
    kind = type(build(name))
    with torch.device("meta"):
        model = kind(config(name))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    oases.parallelize(model, mesh=mesh, weights=folder)
    loss = model(**batch(name)).loss
    loss.backward()
    oases.save_pretrained(model, out)
    return float(loss.detach()), sum(local_of(p).numel() for p in model.parameters())
