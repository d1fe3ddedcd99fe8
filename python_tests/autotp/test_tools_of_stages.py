"""Tools around models in pipeline stages, which refuse them before anything trains; and the mesh that a model has."""

import copy

import pytest
import torch.distributed as dist
from autotp.comparison import said
from autotp.staged import mesh_of
from autotp.zoo import build
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import oases

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def refusals(folder, staged):
    mesh = mesh_of(2, 1, 1) if staged else init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = {"micro_batches": 2} if staged else {"fsdp": True}
    model = oases.parallelize(build("llama"), mesh=mesh, **options)
    arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[], disable_tqdm=True)
    tools = (
        lambda: transformers.Trainer(model, arguments),
        lambda: accelerate.Accelerator(cpu=True).prepare(model),
        lambda: DistributedDataParallel(model),
    )
    try:
        return [said(tool) for tool in tools]
    finally:
        model.oases_pipeline.close()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("staged", "is_what", "remedy"),
    [
        pytest.param(True, "in pipeline stages", "model.train_step(**batch)", marks=pytest.mark.slow),
        pytest.param(False, "with 'pp' or fsdp", "in a custom training loop", marks=pytest.mark.long),
    ],
)
def test_tools_refuse_stages_and_shards(two_ranks, tmp_path, staged, is_what, remedy):
    names = (
        f"Trainer was given LlamaForCausalLM {is_what}",
        f"Accelerator.prepare was given LlamaForCausalLM {is_what}",
        "DistributedDataParallel around LlamaForCausalLM, of which this rank has one stage, or shards",
    )
    for found in two_ranks.run(refusals, str(tmp_path), staged):
        for text, name in zip(found, names, strict=True):
            assert f"UsageError: {name}" in text
            assert (remedy if "wrapper" not in text else "call the model without a wrapper") in text


def meshes(kind):
    mesh = {
        "none": lambda: None,
        "group": lambda: dist.group.WORLD,
        "unnamed": lambda: init_device_mesh("cpu", (2,)),
        "dp and tp": lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")),
        "stages": lambda: mesh_of(1, 1, 2),
    }[kind]()
    model = oases.parallelize(build("llama"), mesh=mesh)
    found = model.oases_mesh
    if kind == "stages":
        return found.mesh_dim_names, found["tp"].size(), found is mesh
    return found.mesh_dim_names, found["tp"].size(), copy.deepcopy(model).oases_mesh == found


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["none", "group", "unnamed", "dp and tp", "stages"])
def test_every_model_knows_its_mesh(two_ranks, kind):
    names = {"dp and tp": ("dp", "tp"), "stages": ("pp", "dp", "tp")}.get(kind, ("tp",))
    assert two_ranks.run(meshes, kind) == [(names, 2, True)] * 2
