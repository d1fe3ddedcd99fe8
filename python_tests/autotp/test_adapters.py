"""Models with adapters of peft (LoRA), parallelized on two ranks, against themselves in one process."""

import pytest
import torch
import torch.distributed as dist
from autotp.comparison import ACROSS, gradients_apart
from autotp.zoo import batch, build

import oases
from oases.errors import UsageError

peft = pytest.importorskip("peft")

TARGETS = {"all": "all-linear", "queries and values": ["q_proj", "v_proj"]}


def adapted(targets, **options):
    """Model with LoRA pairs of which the second, which is zero at first, has values, too."""
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules=TARGETS[targets], **options))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.detach(), std=0.1)
    return model


def check(targets, folder):
    plain, parallel, data = adapted(targets), oases.parallelize(adapted(targets)), batch("llama")
    (layers,) = parallel.oases_partition.layers
    assert layers.runs == ACROSS, layers
    expected, got = plain(**data).loss, parallel(**data).loss
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    expected.backward()
    got.backward()
    worst, name = gradients_apart(plain, parallel)
    assert worst < 1e-4, name
    parallel.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(build("llama"), folder)
    torch.testing.assert_close(loaded(**data).loss, expected, rtol=1e-6, atol=0)
    for parameter in parallel.parameters():  # peft loads full tensors, of which the ranks keep their shards
        if parameter.requires_grad:
            parameter.detach().zero_()
    parallel.load_adapter(folder, "default")
    torch.testing.assert_close(parallel(**data).loss, expected, rtol=1e-5, atol=0)
    dist.barrier()


@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_are_cut_as_the_linears_that_they_are_added_to(two_ranks, targets, tmp_path):
    two_ranks.run(check, targets, str(tmp_path / "adapter"), timeout_seconds=100)


def dropped(alone):
    """Loss in training with dropout before the adapters."""
    model = adapted("all", lora_dropout=0.3)
    mesh = dist.new_group([dist.get_rank()], use_local_synchronization=True) if alone else None
    return float(oases.parallelize(model.train(), mesh=mesh)(**batch("llama")).loss.detach())


def test_dropout_of_adapters_does_not_depend_on_the_degree(two_ranks):
    assert two_ranks.run(dropped, False) == [pytest.approx(two_ranks.run(dropped, True)[0], rel=1e-5)] * 2


def check_refused():
    model = oases.parallelize(build("llama"))
    with pytest.raises(
        UsageError, match=r"LoraModel would put adapters .* get_peft_model\(model, config\), then oases"
    ):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def test_adapters_come_before_parallelize(two_ranks):
    two_ranks.run(check_refused)
