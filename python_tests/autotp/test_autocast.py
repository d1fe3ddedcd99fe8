"""A model of transformers, unedited, under autocast: the loss and gradients of one process under autocast."""

import torch
import torch.distributed as dist

import oases


def check():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config), torch.randint(0, 128, (4, 16))

    def loss_of(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    expected = loss_of(model)
    down = model.model.layers[0].mlp.down_proj.weight.grad
    parallel = oases.parallelize(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    torch.testing.assert_close(loss_of(parallel), expected, rtol=1e-4, atol=0)
    (mine,) = [p.grad for name, p in parallel.named_parameters() if "layers.0.mlp.down" in name]
    part = down.chunk(2, dim=1)[dist.get_rank()]
    assert mine.dtype == torch.float32
    assert (mine - part).norm() < 0.02 * part.norm()


def test_loss_and_gradients_are_those_of_one_process(two_ranks):
    two_ranks.run(check)
