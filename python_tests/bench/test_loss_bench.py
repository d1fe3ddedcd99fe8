"""The benchmark of validation losses by wire dtype: what it counts, and the kernels' rates."""

import json

import pytest
import torch

from oases.cli import main
from oases.errors import UsageError
from oases.kernels.quantized import dequantize, quantize
from oases_bench.harness import Ranks
from oases_bench.loss import LossBenchConfig, kernels_of

SMALL = ["--hidden", "128", "--layers", "1", "--sequence", "8", "--batch", "4", "--steps", "2", "--seeds", "1"]


@pytest.mark.long
def test_losses(tmp_path, capsys):
    path = tmp_path / "loss.json"
    main(["bench", "loss", "--wires", "none,int8", *SMALL, "--json", str(path)])
    found = json.loads(path.read_text())["wires"]
    exact, lossy = found["none"][0], found["int8"][0]
    assert lossy["validation_loss"] == pytest.approx(exact["validation_loss"], rel=0.01)
    assert lossy["bytes"] + lossy["saved_bytes"] == exact["bytes"]
    assert lossy["replicas_equal"]
    assert exact["saved_bytes"] == 0
    assert "int8" in capsys.readouterr().out


def test_unknown_wires():
    with pytest.raises(UsageError, match="--wires 'int7' is unknown; known are none, bfloat16"):
        LossBenchConfig(wires="none,int7")


def test_heads_for_every_rank():
    config = LossBenchConfig(sequence=8).prepared(Ranks(4))
    assert [config.training("none", 0, ranks).heads for ranks in (2, 4)] == [2, 4]
    with pytest.raises(UsageError, match="heads 2 does not divide by --tp 4"):
        LossBenchConfig(sequence=8, heads=2).prepared(Ranks(4))


@pytest.fixture
def llama(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def losses(model, path, *options):
    small = ["--sequence", "8", "--batch", "4", "--steps", "2", "--seeds", "1", "--wires", "none,int8"]
    main(["bench", "loss", "--model", str(model), *small, *options, "--json", str(path)])
    return json.loads(path.read_text())["wires"]


@pytest.mark.slow
def test_losses_of_a_model(llama, tmp_path):
    found = losses(llama, tmp_path / "result.json")
    exact, lossy = found["none"][0], found["int8"][0]
    assert lossy["validation_loss"] == pytest.approx(exact["validation_loss"], rel=0.01)
    assert lossy["saved_bytes"] > 0
    assert lossy["replicas_equal"]


def test_a_models_own_sizes(llama):
    with pytest.raises(UsageError, match=r"--hidden is for the built-in GPT; --model .* leave it out"):
        LossBenchConfig(model=str(llama)).prepared(Ranks(given=frozenset({"hidden"})))
    with pytest.raises(UsageError, match="--tp 3 does not divide"):
        LossBenchConfig(model=str(llama), sequence=8, batch=6).prepared(Ranks(3))


def test_every_kernel_that_is_timed():
    x = torch.randn(300)
    found = {name: kernel() for name, kernel in kernels_of(x).items()}
    back = dequantize(found["quantize"], 300)
    assert torch.equal(found["dequantize"], back)
    torch.testing.assert_close(found["dequantize and sum"], x + back)
    again = dequantize(found["sum and requantize"], 300)
    assert (again - x - back).norm() < 0.02 * (x + back).norm()


def test_parts_of_another_size():
    with pytest.raises(ValueError, match="parts of 300 numbers are contiguous rows of 396 bytes"):
        quantize(torch.ones(300), torch.zeros(1, 3, dtype=torch.uint8))
