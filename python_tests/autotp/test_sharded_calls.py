"""Models whose weights are sharded over replicas and that a user's own loop calls, beside one process."""

import pytest
import torch
from autotp.comparison import said
from autotp.staged import sizes
from autotp.zoo import batch, build
from torch.distributed.device_mesh import init_device_mesh

import oases
from oases.core.execution.dtensors import local_of as local
from oases.distributed.fsdp import rows_of

STEPS = 3


def pair(shape, dims=("dp", "tp"), **options):
    """A model in one process and the same with sharded weights, and this rank's replica."""
    plain, model = (build("llama", **sizes("llama", 4)).to(torch.float64) for _ in range(2))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    return plain, oases.parallelize(model, mesh=mesh, fsdp=True, **options), mesh.get_local_rank("dp")


def data_of(seed):
    found = batch("llama", samples=8, seed=seed, dtype=torch.float64)
    found.pop("attention_mask", None)
    return {**found, "labels": found["input_ids"].clone()}  # as many labels on each replica


def share(data, replica, replicas):
    return {name: value.chunk(replicas)[replica] for name, value in data.items()}


def trained(shape, options):
    """(theirs, ours) of the norms of steps of two passes each, and of a last loss; the share of weights held."""
    plain, model, replica = pair(shape, **options)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    ours = oases.make_optimizer(model, torch.optim.AdamW, lr=1e-3)
    pairs = []
    for step in range(STEPS):
        for number in range(2):
            data = data_of(2 * step + number)
            plain(**data).loss.backward()
            mine = share(data, replica, shape[0])
            if number == 0:
                with model.no_sync():
                    model(**mine).loss.backward()
                    assert all(parameter.grad is None for parameter in model.parameters())
            else:
                model(**mine).loss.backward()
        pairs.append(
            (float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)), float(oases.clip_grad_norm(model, 1.0)))
        )
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        pairs.append((float(plain(**data).loss), float(model(**data).loss)))
    held = sum(local(each).numel() for each in model.parameters())
    return pairs, held / sum(each.numel() for each in plain.parameters())


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2), {}),
        pytest.param((4, 1), {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param((2, 2), {"schedule": "layers"}, marks=pytest.mark.slow),
    ],
)
def test_own_loops_train_as_one_process(four_ranks, shape, options):
    for pairs, held in four_ranks.run(trained, shape, options):
        for theirs, ours in pairs:
            assert ours == pytest.approx(theirs, rel=3e-7)  # the loss is computed in float32
        assert held < 0.3


def gradients(folder):
    """Compare the gradients of two calls before one backward pass, after passes without one; then save and reload."""
    plain, model, replica = pair((2, 1))
    data, other = data_of(0), data_of(1)
    mine = [share(each, replica, 2) for each in (data, other)]
    with torch.inference_mode():  # the first call of all
        model(**mine[0])
    result = model(**mine[0])
    result.logits.register_hook(stopped)
    with pytest.raises(Exception, match="stopped"):
        result.loss.backward()
    (plain(**data).loss + plain(**other).loss).backward()
    first, second = (model(**each).loss for each in mine)
    (first + second).backward()
    for name, parameter in model.named_parameters():
        begin, end = rows_of(parameter, len(parameter))
        wanted = plain.get_parameter(name).grad[begin:end]
        torch.testing.assert_close(local(parameter.grad), wanted, rtol=1e-5, atol=1e-8, msg=name)
    optimizer = oases.make_optimizer(model, torch.optim.AdamW, lr=1e-3)
    optimizer.step()
    model(**mine[0])  # no backward pass follows
    oases.save_checkpoint(folder, model, optimizer, step=1)
    _, again, _ = pair((2, 1))
    oases.load_checkpoint(folder, again, oases.make_optimizer(again, torch.optim.AdamW, lr=1e-3))
    with torch.no_grad():
        return float(model(**data).loss), float(again(**data).loss), float(plain(**data).loss)


def stopped(gradient):
    raise ValueError("stopped")


@pytest.mark.long
def test_gradients_after_a_pass_that_was_stopped_and_weights_from_a_checkpoint(two_ranks, tmp_path):
    for mine, loaded, before in two_ranks.run(gradients, tmp_path):
        assert mine == loaded
        assert mine != before


def generated():
    """Tokens of both models, the error of a key-value cache, and the norm of a pass in bfloat16 with masters."""
    plain, model, _ = pair((2, 1))
    tokens, options = data_of(0)["input_ids"][:2, :4], {"max_new_tokens": 3, "do_sample": False}
    plain.eval()
    model.eval()
    found = [each.generate(tokens, **options, use_cache=False).tolist() for each in (plain, model)]
    with pytest.raises(oases.UsageError) as error:
        model.generate(tokens, **options)
    _, low, replica = pair((2, 1), dtype=torch.bfloat16)
    low(**share(data_of(0), replica, 2)).loss.backward()
    return found, str(error.value), float(oases.clip_grad_norm(low, 1.0))


@pytest.mark.long
def test_generation_and_bfloat16(two_ranks):
    plain = build("llama", **sizes("llama", 4)).to(torch.float64)
    plain(**data_of(0)).loss.backward()
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in plain.parameters()]))
    for (wanted, tokens), error, low in two_ranks.run(generated):
        assert tokens == wanted
        assert "its weights are sharded (fsdp or zero)" in error
        assert "call the model with use_cache=False" in error
        assert low == pytest.approx(norm, rel=0.02)


def frozen():
    """Errors of calls after layers were frozen and unfrozen, after calls with gradients and without."""
    _, model, replica = pair((2, 1))
    data, layer, texts = share(data_of(0), replica, 2), model.model.layers[1], []
    with torch.no_grad():
        model(**data)
    layer.requires_grad_(False)
    model(**data).loss.backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    layer.requires_grad_(True)
    with torch.no_grad():
        model(**data)
    texts.append(said(lambda: model(**data)))
    layer.requires_grad_(False)
    model(**data).loss.backward()
    model.lm_head.requires_grad_(False)
    texts.append(said(lambda: model(**data)))
    return texts


@pytest.mark.long
def test_freezing_between_calls_is_refused(two_ranks):
    for unfrozen, froze in two_ranks.run(frozen):
        assert "model.layers.1.input_layernorm.weight was frozen or unfrozen after the first call" in unfrozen
        assert "lm_head.weight was frozen or unfrozen after the first call" in froze


def refused(dims):
    with pytest.raises(oases.UsageError) as error:
        pair((2,), dims) if len(dims) == 1 else pair((1, 2), dims)
    return str(error.value)


@pytest.mark.parametrize(
    ("dims", "message"),
    [(("tp",), "shards over a mesh's dimension 'dp', and there is none"), (("cp", "dp"), "a mesh for fsdp may have")],
)
def test_meshes_without_replicas_are_refused(two_ranks, dims, message):
    for text in two_ranks.run(refused, dims):
        assert message in text
