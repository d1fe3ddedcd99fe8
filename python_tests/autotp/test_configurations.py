"""Models given by a config.json, as `oases plan --model` takes them: strangers' files run no code."""

import json
import sys

import pytest
from command_line import GIVEN, fails

from oases import cli

pytest.importorskip("transformers")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
CLUSTER = ("--cluster", "4x3090", "--global-batch", "16")


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in (CONFIG | changes).items() if value is not None}))
        return str(path)

    return write


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "name"),
    [({}, "LlamaForCausalLM"), ({"model_type": "bert", "architectures": None}, "BertForMaskedLM")],
    ids=["its class", "no class"],
)
def test_a_configuration_is_traced_and_planned(config, tmp_path, capsys, changes, name):
    config(**changes)
    cli.main(["plan", "--model", str(tmp_path), *CLUSTER])
    assert name in capsys.readouterr().out


@pytest.mark.long
def test_foreign_code_is_never_run(config, tmp_path, capsys):
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    code = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    path = config(
        auto_map=code, attn_implementation="evil/kernels", _attn_implementation="evil/kernels",
        quantization_config={"quant_method": "evil"}, torch_dtype="evil",
    )  # fmt: skip
    cli.main(["plan", "--model", path, *CLUSTER])
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert "evil" in fails(capsys, "plan", "--model", config(auto_map=code, model_type="evil"), *CLUSTER)
    assert not ran.exists()


def test_without_transformers_the_remedy_is_named(config, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in fails(capsys, "plan", "--model", config(), *CLUSTER)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, got 1000000000"),
        ({"num_hidden_layers": "x"}, "invalid configuration"),
        ({"num_attention_heads": 7}, "llama"),
        ({"architectures": ["EvilForCausalLM"]}, "['EvilForCausalLM'] are not supported; known are"),
        ({"model_type": None}, "model_type None"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config, capsys, changes, said):
    assert said in fails(capsys, "plan", "--model", config(**changes), *CLUSTER)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sequence", "65"], "sequence 65 is longer than the 64 positions"),
        (["--sequence", "0"], "--sequence must be at least 1"),
        (["--vocabulary", "0"], "leave out --vocabulary 0"),
        (["--dtype", "int4"], "'int4'"),
    ],
)
def test_mistakes_are_named(config, capsys, options, said):
    assert said in fails(capsys, "plan", "--model", config(), *CLUSTER, *options)


def test_files_that_are_no_configuration(tmp_path, capsys):
    path = tmp_path / "some.json"
    for text, said in (
        ("{", "is not JSON"),
        ("[]", "a JSON object"),
        ("\0", "is not JSON"),
        ("{}", "model_type"),
    ):
        path.write_text(text)
        assert said in fails(capsys, "plan", "--model", str(path), *CLUSTER)
    path.write_bytes(b"\xff")
    assert "is not UTF-8 text" in fails(capsys, "plan", "--model", str(path), *CLUSTER)
    assert "is not a file" in fails(capsys, "plan", "--model", str(tmp_path), *CLUSTER)


def test_an_option_that_went_is_refused_with_what_to_give(capsys):
    assert "did you mean --model?" in fails(capsys, "plan", *GIVEN, "--graph", "config.json")
