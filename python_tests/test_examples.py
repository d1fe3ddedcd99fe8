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
    assert len(FINETUNE.read_text().splitlines()) <= 30


@pytest.mark.slow
def test_finetune_of_a_folder_leaves_a_model_that_transformers_loads(tmp_path, script_ranks):
    before, tokens = pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    printed = script_ranks.run(FINETUNE, [tmp_path / "model", tmp_path / "text.txt"], folder=tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    window = tokens[None, :128]
    first, last = (float(model.eval()(window, labels=window).loss.detach()) for model in (before, after))
    found = losses(printed)
    assert len(found) == 20
    assert found[0] == pytest.approx(first, rel=0.02)  # windows of the same text, and the folder's weights
    assert found[-1] < found[0]
    assert last < first
    assert "transformer.h layer 1" in printed


@pytest.mark.slow
def test_finetune_runs_with_nothing_given(tmp_path, script_ranks):
    found = losses(script_ranks.run(FINETUNE, folder=tmp_path))
    assert len(found) == 20
    assert found[-1] < found[0] - 0.5
    assert (tmp_path / "tuned" / "model.safetensors").is_file()


def blocks(page, language):
    """The fenced blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def printed_after(page, command):
    """Output of a command as a page shows it: the indented lines below it."""
    found = re.search(rf"^    \$ {re.escape(command)}\n((?:    .*\n)+)", (ROOT / page).read_text(), re.MULTILINE)
    assert found, command
    return re.sub(r"^    ", "", found[1], flags=re.MULTILINE)


@pytest.mark.slow
def test_torchrun_prints_what_the_page_says(tmp_path):
    page, script = "docs/howto/own-blocks.md", "example.py"
    (code,) = (block for block in blocks(page, "python") if "class Mlp" in block)
    (tmp_path / script).write_text(code)
    assert run(tmp_path / script, folder=tmp_path) == printed_after(page, f"torchrun --nproc-per-node 2 {script}")


@pytest.mark.long
def test_a_page_prints_what_it_says(tmp_path, script_ranks):
    page, script = "docs/models.md", "tagger.py"
    (code,) = (block for block in blocks(page, "python") if "class Tagger" in block)
    (tmp_path / script).write_text(code)
    printed = script_ranks.run(tmp_path / script, folder=tmp_path)
    asked = printed.replace("schedule oases", "schedule auto")  # conftest.py names one in place of "auto"
    assert asked == printed_after(page, f"torchrun --nproc-per-node 2 {script}")


@pytest.mark.slow  # thirty models are traced; autotp/test_models.py checks the rows of some
@pytest.mark.timeout(600)
def test_the_tables_of_models_are_what_parallelize_says():
    command = [sys.executable, str(ROOT / "docs" / "models.py"), "--check"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


WITHOUT_TRANSFORMERS = """
import sys, torch
import oases.autotp
layers = [torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)) for _ in range(2)]
model = torch.nn.Sequential(torch.nn.Sequential(*layers))
oases.parallelize(model, spec=oases.ParallelSpec(inputs=((torch.empty(2, 8),), {})))
model(torch.ones(2, 8)).sum().backward()
oases.save_pretrained(model, sys.argv[1])
assert "transformers" not in sys.modules
"""


@pytest.mark.long
def test_parallelize_needs_no_transformers(tmp_path):
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(tmp_path / "saved")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert (tmp_path / "saved" / "model.safetensors").is_file()
