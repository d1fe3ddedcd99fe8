"""Statements of docs/models.md on a parallelized model: hooks, results of layers, dropout, replicas."""

import pytest
import torch
import torch.distributed as dist
import transformers
from autotp.comparison import said
from autotp.zoo import batch, build, config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import oases
from oases.autotp import ParallelSpec

pytestmark = pytest.mark.usefixtures("shared_traces")

DATA = batch("llama")


def hooked():
    model, seen = oases.parallelize(build("llama")), []

    def note(name):
        return lambda module, args, result: seen.append((name, type(result).__name__))

    model.model.layers[0].register_forward_hook(note("first"))
    model.model.layers[1].register_forward_hook(note("last"))
    model.model.norm.register_forward_hook(note("norm"))
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: seen.append(("head", "gradient")))
    model(**DATA).loss.backward()
    model.model.layers[0].mlp.register_forward_hook(note("inside"))
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp got hooks, which would not be called"):
        model(**DATA)
    return seen


@pytest.mark.slow
def test_hooks_fire_around_the_layers_and_are_refused_inside(two_ranks):
    expected = [("first", "Pending"), ("last", "Tensor"), ("norm", "Tensor"), ("head", "gradient")]
    assert two_ranks.run(hooked) == [expected] * 2


def results_of_layers(schedule):
    model = oases.parallelize(build("llama"), schedule=schedule).eval()
    found = model(**DATA, output_hidden_states=True)
    try:
        read = [tuple(states.clone().shape) for states in found.hidden_states]
    except RuntimeError as error:
        read = str(error)
    return read


@pytest.mark.slow
def test_hidden_states_are_there_where_layers_run_by_themselves(two_ranks):
    for read in two_ranks.run(results_of_layers, "oases"):
        assert "schedule='layers'" in read
    for read in two_ranks.run(results_of_layers, "layers"):
        assert read == [(4, 10, 32)] * 3


def mesh_of(degree):
    return init_device_mesh("cpu", (2 // degree, degree), mesh_dim_names=("dp", "tp"))


def dropped(options, degree):
    """Losses in training with dropout, ranks with seeds of their own but the first."""
    found = config("gpt2")
    found.resid_pdrop = found.embd_pdrop = 0.2
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(found)
    torch.manual_seed(3 + dist.get_rank())
    oases.parallelize(model, mesh=mesh_of(degree), **options)
    return float(model(**batch("gpt2")).loss.detach())


@pytest.fixture(scope="module")
def loss_alone(shared_traces, two_ranks):
    return two_ranks.run(dropped, {}, 1)[0]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"schedule": "sync"}, {"sub_batches": 4}, {"recompute": "full"}])
def test_masks_of_dropout_depend_on_no_schedule_and_degree(two_ranks, loss_alone, options):
    assert two_ranks.run(dropped, options, 2) == [pytest.approx(loss_alone, rel=1e-6)] * 2


def replicated():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = oases.parallelize(build("llama"), mesh=mesh["tp"])
    return said(lambda: DistributedDataParallel(model, process_group=mesh.get_group("dp")))


@pytest.mark.long
def test_data_parallel_around_it_is_refused(two_ranks):
    for text in two_ranks.run(replicated):
        assert "whose parameters are DTensors" in text
        assert "give parallelize() a mesh with 'dp'" in text


class WithLanguageModel(nn.Module):
    """A model that calls a language model of transformers without the option `use_cache`, as multimodal ones do."""

    def __init__(self):
        super().__init__()
        self.language = build("llama").model

    def forward(self, tokens):
        return self.language(tokens).last_hidden_state


def inner_language_model():
    model, parallel = (WithLanguageModel().double() for _ in range(2))
    tokens = batch("llama")["input_ids"]
    oases.parallelize(parallel, spec=ParallelSpec(inputs=((tokens,), {})))
    report = parallel.oases_partition
    torch.testing.assert_close(parallel(tokens), model(tokens))
    return report.layers[0].runs, report.notes


@pytest.mark.slow
def test_inner_language_models_make_no_cache(two_ranks):
    for runs, notes in two_ranks.run(inner_language_model):
        assert runs == "across layers"
        assert notes == ["language.config.use_cache is False now"]
