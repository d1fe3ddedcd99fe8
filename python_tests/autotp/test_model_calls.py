"""Parallelized models of transformers, called in the many ways they are called, against themselves in one process."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from autotp.comparison import gradients_apart, said
from autotp.plain_models import Block, Plain, loss_of, spec, tokens
from autotp.zoo import OTHERS, batch, build

import oases
from oases.layers.weight_gradient import DeferredGradients

pytestmark = pytest.mark.usefixtures("shared_traces")


def pair(name="llama", **options):
    model, parallel = build(name), build(name)  # in float64 llama's layers would not run in a stack
    oases.parallelize(parallel, **options)
    return model, parallel


def inputs(model):
    data = batch("llama")
    tokens, labels, n = data["input_ids"], data["labels"], data["input_ids"].shape[1]
    mask = torch.zeros(4, 1, n, n).masked_fill(~torch.ones(n, n).tril().bool(), -1e9)
    mask[1, :, 1:, 0] = -1e9
    embeddings = model.model.embed_tokens(tokens).detach()
    positions = torch.arange(n).repeat(4, 1) + torch.arange(4)[:, None]
    return [
        {"input_ids": tokens, "labels": labels, "attention_mask": mask, "position_ids": positions},
        {"inputs_embeds": embeddings, "labels": labels, "attention_mask": mask[:1]},
        {"input_ids": tokens[:1], "labels": tokens[:1]},
        {"input_ids": tokens[:4, :4], "labels": tokens[:4, :4]},
    ]


def in_many_ways():
    model, parallel = pair()
    worst = []
    for data in inputs(model):
        model.zero_grad()
        parallel.zero_grad()
        expected, got = model(**data), parallel(**data)
        worst.append(float((expected.logits - got.logits).abs().max()))
        expected.loss.backward()
        got.loss.backward()
        worst.append(gradients_apart(model, parallel)[0])
    model.eval()
    parallel.eval()
    options = {"max_new_tokens": 3, "do_sample": False, "use_cache": False}
    tokens = batch("llama")["input_ids"]
    assert torch.equal(model.generate(tokens, **options), parallel.generate(tokens, **options))
    return max(worst)


@pytest.mark.slow
def test_masks_positions_and_embeddings(two_ranks):
    assert max(two_ranks.run(in_many_ways)) < 1e-5


def hidden_states():
    model, parallel = pair(schedule="layers")
    data = batch("llama")
    expected, got = (each(**data, output_hidden_states=True).hidden_states for each in (model, parallel))
    apart = max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
    parallel.zero_grad()
    parallel(**data).loss.backward()  # what transformers hooked for that stays
    return apart


@pytest.mark.slow
def test_hidden_states_of_layers_that_run_by_themselves(two_ranks):
    assert max(two_ranks.run(hidden_states)) < 1e-5


def recomputed(parallel):
    (layers,) = parallel.oases_partition.layers
    return len(layers.runner.stack.schedule.recomputed_blocks)


def checkpointed():
    """Gradient checkpointing of transformers, turned on before and after, off, and on for every other layer."""
    model, parallel, before, data = build("llama"), build("llama"), build("llama"), batch("llama")
    before.activation_checkpointing_enable()
    oases.parallelize(parallel)
    oases.parallelize(before)
    parallel.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert recomputed(parallel) == recomputed(before) == 4  # blocks of two layers
    model(**data).loss.backward()
    for each in (parallel, before):
        each(**data).loss.backward()
        assert gradients_apart(model, each)[0] < 1e-5
    parallel.activation_checkpointing_enable(every_n_layers=2)
    assert recomputed(parallel) == 2
    parallel.gradient_checkpointing_disable()
    assert recomputed(parallel) == 0
    parallel(**data).loss.backward()


@pytest.mark.long
def test_gradient_checkpointing_is_recomputation(two_ranks):
    two_ranks.run(checkpointed)


def of_hidden_states():
    _, parallel = pair()
    return parallel(**batch("llama"), output_hidden_states=True).hidden_states[1] + 1


def attentions():
    _, parallel = pair()
    return parallel(**batch("llama"), output_attentions=True)


def checkpointing_offloaded():
    _, parallel = pair()
    parallel.activation_checkpointing_enable(offload=True)


def checkpointing_inside_layers():
    _, parallel = pair(schedule="layers")
    parallel.activation_checkpointing_enable()


def compiled():
    _, parallel = pair()
    return torch.compile(parallel)


def compiled_in_place():
    _, parallel = pair()
    parallel.compile()


def sharded_by_layers():
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    _, parallel = pair(mesh=mesh["tp"])
    for layer in (*parallel.model.layers, parallel):
        fully_shard(layer, mesh=mesh["dp"])
    return parallel(**batch("llama"))


def quantised():
    model = build("llama")
    model.config.quantization_config = {"bits": 4}
    return oases.parallelize(model)


def layers_dropped():
    config = transformers.BartConfig(**OTHERS["bart"][1], encoder_layerdrop=0.1)
    return oases.parallelize(transformers.BartForConditionalGeneration(config).train())


ERRORS = {
    of_hidden_states: "RuntimeError: model.layers.0 has no result of its own.*schedule='layers'",
    attentions: "UsageError: output_attentions=True .* leave it out",
    checkpointing_offloaded: "UsageError: .*recomputation by its stacks, without offload; leave it out",
    checkpointing_inside_layers: "UsageError: model.layers runs inside layers .*turn it off",
    compiled: "UsageError: torch.compile of LlamaForCausalLM, .* leave torch.compile out",
    compiled_in_place: "UsageError: compile.. of a parallelized model: .* leave it out",
    sharded_by_layers: r"UsageError: fully_shard was called on model.layers.0, .*fully_shard\(model, mesh=mesh",
    quantised: "UsageError: .*quantised weights.*load it unquantised",
    layers_dropped: "UsageError: .*layers dropped at random",
}


def message(function):
    torch.manual_seed(0)
    return said(function)


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("function", ERRORS)
def test_a_clear_error_of_a_call(two_ranks, function):
    for text in two_ranks.run(message, function):
        assert re.search(ERRORS[function], text), text


def other_plan():
    parallel = build("llama")
    parallel._tp_plan = {"model.layers.*.self_attn.q_proj": "rowwise", "model.norm": "colwise", "lm_head": "colwise"}
    oases.parallelize(parallel)
    return parallel.oases_partition.plan_agrees, parallel.oases_partition.plan_differs


@pytest.mark.long
def test_where_the_plan_differs_the_report_says_so(two_ranks):
    for agree, differ in two_ranks.run(other_plan):
        assert agree == ["lm_head"]
        assert differ == {
            "model.layers.*.self_attn.q_proj": "transformers' plan says rowwise, the graph colwise",
            "model.norm": "transformers' plan says colwise, the graph whole",
        }


def under_autocast(backend):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(0, 128, (4, 16))

    def loss_of(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    expected = loss_of(model)
    down = model.model.layers[0].mlp.down_proj.weight.grad
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    parallel = oases.parallelize(model, mesh=mesh, compile=backend, recompute="full")
    noted, note = [], DeferredGradients.note
    DeferredGradients.note = lambda deferred, *work: (noted.append(deferred), note(deferred, *work))
    try:
        torch.testing.assert_close(loss_of(parallel), expected, rtol=1e-4, atol=0)
    finally:
        DeferredGradients.note = note
    # Two layers of seven linears in two sub-batches. Those that are not compiled note theirs in C++.
    assert len(noted) == (0 if backend is None else 2 * 7 * 2)
    (mine,) = [p.grad.to_local() for name, p in parallel.named_parameters() if "layers.0.mlp.down" in name]
    part = down.chunk(2, dim=1)[dist.get_rank()]
    assert mine.dtype == torch.float32
    assert (mine - part).norm() < 0.02 * part.norm()


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_loss_and_gradients_under_autocast_are_those_of_one_process(two_ranks, backend):
    two_ranks.run(under_autocast, backend)


class Casts(Block):
    """Goes back to the type of its linears, which autocast changes."""

    def mlp(self, x):
        h = self.up(x)
        return self.down(F.gelu(h.float() * 1.1).to(h.dtype))


def autocast_first(schedule):
    """Results and gradients of calls in another mode than at parallelize(): under autocast, and then without."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Plain(Casts))
    oases.parallelize(models[1], spec=spec(), schedule=schedule)
    found = []
    for enabled in (True, False):
        pair = []
        for model in models:
            model.eval().zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                pair.append(model(tokens()).float())
            loss_of(pair[-1]).backward()
        found.append((float((pair[0] - pair[1]).abs().max() / pair[0].abs().max()), gradients_apart(*models)[0]))
    return found


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["oases", "layers"])
def test_a_trace_under_autocast_is_for_autocast_alone(two_ranks, schedule):
    for under, without in two_ranks.run(autocast_first, schedule):
        assert max(under) < 0.03
        assert max(without) < 1e-5


def of_one_key_head():
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=90, intermediate_size=64)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1)))
    model, parallel = models[0].train(), oases.parallelize(models[1].train())
    tokens = torch.arange(64).view(4, 16) % 90
    losses = [each(input_ids=tokens, labels=tokens, use_cache=False).loss for each in (model, parallel)]
    for loss in losses:
        loss.backward()
    assert parallel.model.layers[0].self_attn.q_proj.weight.shape == (16, 32)
    return float((losses[0] - losses[1]).abs()), gradients_apart(model, parallel)


@pytest.mark.slow
def test_one_key_head_that_all_queries_share(two_ranks):
    for loss, (gradients, name) in two_ranks.run(of_one_key_head):
        assert loss < 1e-5
        assert gradients < 1e-5, name


def graphs_of_steps():
    """Numbers of graphs of a layer: at parallelize(), after steps without padding, after one with it."""
    model = build("llama", rms_norm_eps=3e-5)  # layers of which no other test has traces
    oases.parallelize(model)
    (layers,) = model.oases_partition.layers
    programs = layers.runner.layers[0].signature.programs
    found = [sum(map(len, programs.values()))]
    for mask in (None, torch.ones(4, 10, dtype=torch.long), batch("llama")["attention_mask"]):
        data = batch("llama") | {"attention_mask": mask}
        model(**data).loss.backward()
        found.append(sum(map(len, programs.values())))
    return found


@pytest.mark.long
def test_steps_without_padding_run_the_graphs_that_parallelize_traced(two_ranks):
    assert two_ranks.run(graphs_of_steps) == [[1, 1, 1, 2]] * 2
