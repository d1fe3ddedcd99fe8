"""The command plan --graph: tables, JSON and a picture of a model's graph; strangers' files run no code."""

import json
import re
import sys

import pytest
from command_line import GIVEN, fails

from oases import cli
from oases.graph.layer_graph import read_graph

pytest.importorskip("transformers")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in (CONFIG | changes).items() if value is not None}))
        return str(path)

    return write


@pytest.mark.long
def test_a_configuration_is_traced_and_its_graph_written(config, tmp_path, capsys):
    config()
    path = tmp_path / "graph.json"
    cli.main(["plan", "--graph", str(tmp_path), "--json", str(path)])
    first = capsys.readouterr().out
    graph = read_graph(path)
    assert (graph.name, len(graph.layers)) == ("LlamaForCausalLM", 4)
    assert graph.inputs[0].shape == (1, 64), "as many tokens as there are positions"
    assert {each.dtype for each in graph.parameters} == {"float32"}
    for part in ("model.layers.1-3", "model.embed_tokens", "model.norm, lm_head", "params (M)"):
        assert part in first
    cli.main(["plan", "--graph", str(path)])
    assert first.startswith(capsys.readouterr().out), "the same table, without tracing"


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("balance", ["time", "parameters", "uniform", "model.layers.1,model.layers.3"])
def test_stages(config, balance, capsys):
    cli.main(["plan", "--graph", config(tie_word_embeddings=True), "--stages", "3", "--balance", balance])
    out = capsys.readouterr().out
    assert len(re.findall(r"^│ [012] ", out, re.MULTILINE)) == 3
    assert "model.embed_tokens.weight = lm_head.weight (0.0 MB) is on stages 0, 2" in out


@pytest.mark.long
def test_a_cluster_and_a_type_change_the_balance(config, capsys):
    cli.main(
        [
            "plan",
            "--graph",
            config(),
            "--stages",
            "2",
            "--cluster",
            "8x3090",
            "--dtype",
            "bfloat16",
            "--sequence",
            "16",
        ]
    )
    assert "input_ids 1x16" in capsys.readouterr().out


@pytest.mark.long
def test_a_picture(config, tmp_path, capsys):
    path = tmp_path / "graph.html"
    cli.main(["plan", "--graph", config(), "--stages", "2", "--html", str(path)])
    text = path.read_text()
    assert "model.layers.3" in text
    assert "<script src" not in text, "it loads nothing"


@pytest.mark.long
def test_a_model_that_does_not_name_its_class(config, capsys):
    cli.main(["plan", "--graph", config(model_type="bert", architectures=None)])
    assert "BertForMaskedLM" in capsys.readouterr().out


@pytest.mark.long
def test_foreign_code_is_never_run(config, tmp_path, capsys):
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    code = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    path = config(
        auto_map=code, attn_implementation="evil/kernels", _attn_implementation="evil/kernels",
        quantization_config={"quant_method": "evil"}, torch_dtype="evil",
    )  # fmt: skip
    cli.main(["plan", "--graph", path])
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert "evil" in fails(capsys, "plan", "--graph", config(auto_map=code, model_type="evil"))
    assert not ran.exists()


def test_without_transformers_the_remedy_is_named(config, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in fails(capsys, "plan", "--graph", config())


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
    assert said in fails(capsys, "plan", "--graph", config(**changes))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--global-batch", "8"], "leave out --global-batch"),
        (["--hidden", "8", "--explain"], "leave out --hidden, --explain"),
        (["--expert-parallel", "4", "--pipelines", "zb_h1"], "leave out --pipelines, --expert-parallel"),
        (["--vocabulary", "0"], "leave out --vocabulary"),
        (["--world", "4", "--link", "25gbit"], "--world, --link: of which cluster? Give --cluster or --profile"),
        (["--balance", "time"], "give --stages N"),
        (["--stages", "0"], "--stages must be at least 1, got 0"),
        (["--stages", "99"], "99 stages are more than"),
        (["--stages", "2", "--balance", "speed"], "'speed'"),
        (["--sequence", "65"], "sequence 65 is longer than the 64 positions"),
        (["--sequence", "0"], "--sequence must be at least 1"),
        (["--dtype", "int4"], "'int4'"),
        (["--cluster", "8xabacus"], "abacus"),
        (["--html", "/dev/null/graph.html"], "/dev/null"),
    ],
)
def test_mistakes_are_named(config, capsys, options, said):
    assert said in fails(capsys, "plan", "--graph", config(), *options)


def test_files_that_are_no_graph(tmp_path, capsys):
    path = tmp_path / "some.json"
    for text, said in (
        ("{", "is not JSON"),
        ("[]", "a JSON object"),
        ("\0", "is not JSON"),
        ("{}", "model_type"),
    ):
        path.write_text(text)
        assert said in fails(capsys, "plan", "--graph", str(path))
    path.write_bytes(b"\xff")
    assert "is not UTF-8 text" in fails(capsys, "plan", "--graph", str(path))
    assert "is not a file" in fails(capsys, "plan", "--graph", str(tmp_path))
    path.write_text(json.dumps({"format": "oases graph", "version": 1, "name": 3}))
    assert "name must be a string" in fails(capsys, "plan", "--graph", str(path))
    path.write_text(json.dumps({"format": "oases graph", "version": 1}))
    assert "leave out --dtype" in fails(capsys, "plan", "--graph", str(path), "--dtype", "float32")


@pytest.mark.parametrize("option", [["--stages", "2"], ["--balance", "time"], ["--html", "x.html"]])
def test_options_of_graphs_need_one(capsys, option):
    assert "needs --graph MODEL" in fails(capsys, "plan", *GIVEN, *option)
