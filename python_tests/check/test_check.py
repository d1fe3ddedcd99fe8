"""`oases.check`: right models pass, replicas of known faults are named with parameter, factor and collective."""

import json

import faults
import pytest
import torch
from faults import Sharded, averaged, batch, build, replicated

from oases.cli import main
from oases.errors import UsageError
from oases_check import check
from oases_check.ways import WAYS, Way

pytest_plugins = ["oases_check.pytest_plugin"]


def found(report):
    return {(each.kind, each.name): (each.factor, each.likely) for each in report.findings}


def test_a_right_model_is_equal(trains_as_one_process):
    report = trains_as_one_process(build, Sharded(""), batch, norm=None)
    assert report.as_json()["parameters"] == len(list(build().parameters()))
    assert "equal to one process over 2 steps" in str(report)
    assert not report.first.skipped


FAULTS = {
    "router": ("layers.1.router.weight", "their sum over tp is right", "an all-reduce (sum) over tp is missing"),
    "k_pe": ("layers.1.k_pe.weight", "their sum over tp is right", "an all-reduce (sum) over tp is missing"),
    "row bias": ("layers.1.down.bias", "times 1/tp = 1/2", "a sum over tp is missing, or is a mean instead"),
    "experts doubled": ("layers.0.experts_up", "times tp = 2", "a sum over tp too many"),
    "expert bias": ("layers.1.experts_bias", "about times tp = 2", "a sum over tp too many"),
    "norm": ("layers.1.norm.weight", "replicas differ", "an all-reduce is missing on a part of the way"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    name, factor, likely = FAULTS[fault]
    report = check(build, Sharded(fault), batch, norm=None)
    assert not report.equal
    said = found(report)["gradient", name]
    assert factor in said[0]
    assert likely in said[1]
    shown = str(report)
    assert name in shown
    assert json.loads(json.dumps(report.as_json()))["equal"] is False


def test_a_fault_of_the_forward_pass_names_the_first_module():
    report = check(build, Sharded("expert bias"), batch, norm=None)
    assert (report.findings[0].kind, report.findings[0].name) == ("output", "layers.0")


def test_a_norm_of_shards_is_named():
    report = check(build, Sharded(""), batch)
    assert found(report) == {
        ("norm", "of all gradients"): (
            "each rank's is that of its own shards",
            "the all-reduce of squares over tp is missing",
        )
    }


@pytest.mark.parametrize(("way", "equal"), [(averaged, True), (replicated, False)])
def test_replicas(way, equal):
    report = check(build, way, batch, tp=1, dp=2)
    assert report.equal == equal
    if not equal:
        factors = {each.factor for each in report.findings if each.kind == "gradient"}
        assert factors == {"each rank holds its part: their mean over dp is right"}


def test_rounding_is_no_fault():
    """A sum in bfloat16 differs from one process in float32 and not in float64, where it is left out."""
    report = check(build, Sharded("rounded"), batch, norm=None)
    assert report.first.findings
    assert report.equal
    assert "rounding" in str(report)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def tokens(step):
    drawn = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": drawn, "labels": drawn}


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "dp", "tp"), [("oases", 1, 2), ("oases", 2, 2), ("fsdp2", 2, 1), ("ddp", 2, 1), ("tp_plan", 1, 2)]
)
def test_a_llama_by_every_way(way, dp, tp):
    report = check(llama, Way(way, dp, tp), tokens, tp=tp, dp=dp)
    assert report.equal, f"\n{report}"
    assert way in WAYS


OWN = {"build": faults.linear, "batch": faults.floats, "parallelize": replicated}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"build": faults.nothing}, r"build\(\) returned None; return an nn.Module"),
        ({"build": faults.unseeded, "batch": faults.floats}, "two runs of the unsharded model differ"),
        ({"build": faults.with_dropout, "batch": faults.floats}, "set the dropout to 0 or give training=False"),
        ({"build": faults.no_loss, "batch": faults.floats}, "have the model return a scalar"),
        ({"batch": faults.forgetful}, "the batch is None"),
        ({"batch": None}, "the batch is None; give a dict or tuple"),
        ({"parallelize": faults.forgetful}, r"parallelize\(\) returned NoneType; return the sharded model"),
        (OWN | {"batch": faults.of_rank}, "ranks have different batches"),
        ({"parallelize": faults.broken}, "a rank failed, so that nothing was compared"),
        ({"parallelize": lambda model: model}, "define them at the top level"),
        ({"parallelize": None}, "parallelize is None; give a function"),
        ({"steps": 0}, "steps is 0; give a whole number from 1"),
        ({"tp": 64}, "are 64 ranks; give at most 8"),
        (OWN | {"tp": 1, "dp": 3}, "4 samples does not divide over dp 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_refused(options, said):
    given = {"build": build, "parallelize": Sharded(""), "batch": batch} | options
    with pytest.raises(UsageError, match=said):
        check(**given)


def test_a_hang_ends_with_the_stacks_of_all_ranks(capfd):
    with pytest.raises(UsageError, match="a hang, or a case that is too large"):
        check(build, faults.waiting, batch, timeout_seconds=14)
    assert capfd.readouterr().err.count("Timeout (0:00:09)!") == 2


@pytest.mark.long
def test_the_command(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Total(nn.Module):\n    def forward(self, x):\n"
        "        return x.square().sum()\n\n\ndef case():\n"
        "    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(4, 4), Total()), (torch.randn(4, 4),)\n\n\n"
        "def wrong(model):\n    model[0].weight.register_hook(lambda gradient: 2 * gradient)\n    return model\n"
    )
    main(["check", f"{script}:case", "--tp", "2", "--with", "oases"])
    assert "equal to one process" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["check", f"{script}:case", "--with", f"{script}:wrong", "--json", str(tmp_path / "found.json")])
    assert ended.value.code == 1
    assert json.loads((tmp_path / "found.json").read_text())["findings"][0]["factor"] == "times tp = 2"
    with pytest.raises(SystemExit):
        main(["check", f"{script}:nothing"])
    assert "has no function 'nothing'" in capsys.readouterr().err
