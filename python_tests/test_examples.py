"""The examples, run as a user runs them, and what they leave behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
FINETUNE = ROOT / "examples" / "finetune.py"
TEXT = "Oases are where the road is short of water. " * 20


def run(script, *args, folder):
    """Run a script under torchrun over two ranks in `folder`; return what the first rank printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, *map(str, args)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed):
    return [float(found) for found in re.findall(r"^step +\d+ loss (\S+)$", printed, re.MULTILINE)]


def pretrained(folder):
    """A small model with its tokenizer, one token per byte, as transformers saves them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, vocab_size=256, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model.save_pretrained(folder)
    return model, torch.tensor(tokenizer.encode(TEXT).ids)


def test_the_example_is_short():
    assert len(FINETUNE.read_text().splitlines()) < 30


def test_finetune_of_a_folder_leaves_a_model_that_transformers_loads(tmp_path):
    before, tokens = pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    printed = run(FINETUNE, tmp_path / "model", tmp_path / "text.txt", folder=tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    window = tokens[None, :128]
    first, last = (float(model.eval()(window, labels=window).loss.detach()) for model in (before, after))
    found = losses(printed)
    assert len(found) == 20
    assert found[0] == pytest.approx(first, rel=0.02)  # windows of the same text, and the folder's weights
    assert found[-1] < found[0]
    assert last < first
    assert "transformer.h layer 1" in printed


def test_finetune_runs_with_nothing_given(tmp_path):
    found = losses(run(FINETUNE, folder=tmp_path))
    assert len(found) == 20
    assert found[-1] < found[0] - 0.5
    assert (tmp_path / "tuned" / "model.safetensors").is_file()
