"""Runs that train LoRA adapters of given weights: equal for all degrees, saved, resumed, and exported for peft."""

import json
from importlib.util import find_spec

import pytest
import torch

from oases import TrainConfig, Trainer, UsageError
from oases.models.options import Degrees
from oases_train.adapters import export_adapter
from oases_train.optimizer import WEIGHT_DECAY

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
transformers = pytest.importorskip("transformers")
SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    vocab_size=256, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def config_of(model, **changes):
    sizes = dict(batch=8, sequence=24, steps=4, micro_batches=2, validation_batches=2, warmup=0, lora_rank=4)
    return TrainConfig(model=model, **{**sizes, "learning_rate": 3e-2, "clip": 0.1, **changes})


def trained(model, degrees, changes):
    """Losses, the last gradient norm, and whether the weights that have no adapters stayed as they were."""
    trainer = Trainer(config_of(model, degrees=Degrees(*degrees), **changes))
    before = {name: each.clone() for name, each in trainer.model.named_parameters() if not each.requires_grad}
    result = trainer.train()
    named = dict(trainer.model.named_parameters())
    kept = all(torch.equal(named[name], value) and named[name].grad is None for name, value in before.items())
    trainer.close()
    return [*result["losses"], result["validation_loss"], trainer.gradient_norm], kept


def reference(model, corpus):
    """Losses and the last gradient norm of peft's own model, with the optimizer's steps written out."""
    import peft  # takes seconds

    config = config_of(model, data=corpus, degrees=Degrees(1, 1, 1))
    trainer = Trainer(config)
    plain = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(model), config.lora)
    plain.load_state_dict({name: each.clone() for name, each in trainer.model.state_dict().items()})
    parameters = [each for each in plain.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(config.steps):
        samples = trainer.corpus.samples(split="train", step=step, batch=8, sequence=24, seed=0)
        optimizer.param_groups[0]["lr"] = config.rate(step)
        losses.append(plain(**samples).loss)
        losses[-1].backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        optimizer.zero_grad()
    trainer.close()
    return [each.item() for each in (*losses, norm)]


@pytest.mark.slow
def test_all_degrees_train_adapters_alike(two_ranks, llama, corpus):
    *expected, norm = reference(llama, corpus)
    assert expected[0] > expected[-1] + 0.01  # it learns
    for degrees, changes in (
        ((2, 1, 1), {}),
        ((1, 1, 2), {}),
        ((1, 2, 1), {}),
        ((2, 1, 1), {"zero": True}),
        ((2, 1, 1), {"fsdp": True}),
    ):
        for found, kept in two_ranks.run(trained, llama, degrees, {"data": corpus, **changes}):
            assert kept, (degrees, changes)
            assert [*found[:-2], found[-1]] == pytest.approx([*expected, norm], rel=1e-4), (degrees, changes)


@pytest.mark.slow
def test_adapters_are_resumed_and_exported(two_ranks, llama, corpus, tmp_path):
    import peft  # takes seconds

    unbroken = trained(llama, (1, 1, 1), {"data": corpus, "steps": 6, "precision": "bfloat16"})[0]
    folder, out = str(tmp_path / "run"), tmp_path / "adapter"
    saved = {"data": corpus, "steps": 6, "checkpoint": folder, "checkpoint_every": 2, "precision": "bfloat16"}
    two_ranks.run(trained, llama, (1, 1, 2), saved)
    (tmp_path / "run" / "step-000006").rename(tmp_path / "last")
    (found, _), _ = two_ranks.run(trained, llama, (1, 2, 1), {**saved, "resume": "auto"})
    assert found[:2] == pytest.approx(unbroken[4:6], rel=0.02)
    shapes = export_adapter(folder, out)
    assert {name.split(".")[-2] for name in shapes} == {"lora_A", "lora_B"}
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == llama
    export_adapter(folder, out)  # again, over it
    loaded = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(llama), out)
    again = {**saved, "steps": 8, "precision": "float32", "resume": folder, "degrees": Degrees(1, 1, 1)}
    trainer = Trainer(config_of(llama, **again))
    named = dict(trainer.model.named_parameters())
    for name, each in loaded.named_parameters():
        if ".lora_" in name:
            assert each.abs().sum() > 0
            assert torch.equal(each, named[name])
    assert len(shapes) == 2 * 2 * 7
    trainer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "lora_rank 4 trains adapters of given weights alone, and the built-in GPT has none"),
        ({"lora_rank": -1}, "lora_rank must be at least 0, got -1"),
    ],
)
def test_options_of_adapters_that_train_nothing(llama, changes, message):
    with pytest.raises(UsageError, match=message):
        config_of(**{"model": llama, **changes})


@pytest.mark.long
def test_adapters_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    with pytest.raises(
        UsageError, match="a folder without safetensors, has none; give --model a folder with weights"
    ):
        config_of(str(tmp_path))
