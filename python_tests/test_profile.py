"""`oases profile` on real ranks: what a simulated link was given is found again, and every time is there."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import astuple, fields

import pytest
import torch

from oases import cli
from oases.errors import UsageError
from oases.models.gpt import GPTConfig, transformer_blocks
from oases.parallel import OverlappedStack
from oases.profile.compute import apart
from oases.profile.config import ProfileConfig
from oases.profile.groups import ranks_per_node
from oases.profile.run import Surroundings, run_profile
from oases.schedule import Op, generate
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware_file import read_hardware
from oases.simulator.model import KINDS, ModelShape

ALPHA, BANDWIDTH = 0.01, 2e7
SMALL = ["--hidden", "64", "--heads", "2", "--sequence", "16", "--layers", "2", "--batch", "2", "--iterations", "1"]
SHAPE = ModelShape(64, 2, 2, 16)


def profile(*arguments):
    cli.main(["profile", *SMALL, *arguments])


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        profile(*arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2, error
    assert error.startswith("oases: error: ")
    assert error.count("\n") == 1
    return error


def test_a_simulated_link_is_found_again(tmp_path, capfd):
    path = tmp_path / "h.json"
    profile("--backend", f"sim:alpha={ALPHA * 1e3:g}ms,bandwidth={BANDWIDTH / 1e6:g}MB/s", "--json", str(path))
    hardware = read_hardware(path)
    link = hardware.cluster
    # Simulated, an all-reduce starts once, by a ring of two ranks twice. Above, the margins are for a loaded machine.
    assert 0.3 * ALPHA < link.startup_seconds < 5 * ALPHA
    assert 0.2 * BANDWIDTH < link.bytes_per_second < 2 * BANDWIDTH
    assert all(sample.seconds > ALPHA for sample in link.samples)
    assert {sample.collective for sample in link.samples} == {"all_reduce", "reduce_scatter", "all_gather"}
    assert hardware.ranks_per_node == 1
    assert hardware.node == link
    assert min(link.contention.compute, link.contention.link) >= 1
    assert [(b.kind, b.samples) for b in hardware.blocks] == [(kind, n) for n in (1.0, 2.0) for kind in KINDS]
    for block in hardware.blocks:
        assert all(0 < seconds < 60 for seconds in astuple(block.times))
    assert [(o.sub_batches, o.samples) for o in hardware.overheads] == [(1, 2), (2, 2)]
    assert min(hardware.pass_overhead(SHAPE, 2, 2, 2)) > 0
    assert set(hardware.device.flops_per_second) == {"float32"}
    output = capfd.readouterr().out
    for part in (
        "fit error",
        "halves",
        "passes outside their ops",
        f"written to {path}",
        "Messages between two ranks",
    ):
        assert part in output
    assert os.listdir(tmp_path) == ["h.json"]


def test_one_process_for_all_ranks_and_more_shapes_in_one_file(tmp_path, capfd):
    path = tmp_path / "h.json"
    alone = ("--tp", "4", "--backend", "sim:alpha=1us,bandwidth=10GB/s,alone", "--json", str(path))
    profile(*alone, "--degrees", "1,2", "--name", "mine")
    first = read_hardware(path)
    assert {block.tp for block in first.blocks} == {1, 2}
    assert "One process stood for all ranks" in first.about
    profile(*alone, "--sequence", "32", "--degrees", "2", "--append")
    both = read_hardware(path)
    assert len(both.blocks) == len(first.blocks) + 4
    assert (both.name, both.device, both.cluster) == ("mine", first.device, first.cluster)
    assert both.has_block(SHAPE, 1)
    assert both.has_block(ModelShape(64, 2, 2, 32), 2)
    other = json.loads(path.read_text())
    other["device"]["name"] = "abacus"
    path.write_text(json.dumps(other))
    with pytest.raises(SystemExit):
        profile(*alone, "--degrees", "2", "--append")
    assert "'abacus'" in capfd.readouterr().err


def run_small():
    return run_profile(ProfileConfig(64, 1, 2, 16, 1, iterations=1), Surroundings("in a test"), False)


def test_ranks_of_one_node(two_ranks):
    first, second = two_ranks.run(run_small)
    assert first == second, "the slowest rank's times are everybody's"
    assert first.ranks_per_node == 2
    assert first.node == first.cluster
    assert {sample.collective for sample in first.node.samples} >= {"send", "all_reduce"}
    assert "the link between nodes was not measured" in first.about


def run_two_nodes():
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return run_profile(
            ProfileConfig(64, 1, 4, 256, 4, iterations=3, degrees="2"), Surroundings("as two nodes"), False
        )
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_ranks_of_two_nodes(four_ranks):
    hardware = four_ranks.run(run_two_nodes)[0]
    assert hardware.ranks_per_node == 2
    assert {sample.ranks for sample in hardware.node.samples} == {2}
    assert {(s.collective, s.ranks) for s in hardware.cluster.samples} >= {("all_reduce", 4), ("send", 2)}
    assert {block.tp for block in hardware.blocks} == {2}


def test_who_shares_a_node(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_per_node(4, shaped=False) == 4
    assert ranks_per_node(4, shaped=True) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_per_node(4, shaped=True) == 2, "the shaped link is between the nodes"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert ranks_per_node(4, shaped=False) == 1


def test_every_op_can_be_told_apart():
    schedule = apart(generate("oases", 4, 2))
    for op in schedule:
        if op.kind == "B":
            assert Op("BC", op.block, op.sub_batch) in schedule.backward_set
    assert len(fields(BlockTimes)) == 8, "a new one needs a list it occurs in"


def test_spans_are_taken_with_the_clock_that_is_given():
    stack = OverlappedStack(transformer_blocks(GPTConfig(hidden=16, layers=1, heads=2, sequence=4), None))
    stack.spans, ticks = [], itertools.count()
    stack.clock = lambda: f"mark {next(ticks)}"
    stack(torch.randn(2, 4, 16)).sum().backward()
    assert stack.spans[0] == ("F 0.0", "mark 0", "mark 1")
    assert next(ticks) == 2 * len(stack.spans)


def test_sizes_and_degrees():
    assert ProfileConfig(batch=6).sub_batch_sizes == (1, 2, 4, 6)
    assert ProfileConfig(batch=1).sub_batch_sizes == (1,)
    assert ProfileConfig(degrees=" 4, 2,2").tensor_parallel(8) == (2, 4)
    assert ProfileConfig().tensor_parallel(8) == (8,)
    with pytest.raises(UsageError, match="groups of 3"):
        ProfileConfig(degrees="3").tensor_parallel(8)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--tp", "1"], ["--tp 1", "at least 2"]),
        (["--tp", "4"], ["heads 2", "--tp 4"]),
        (["--degrees", "two"], ["'two'", "1,2,4"]),
        (["--degrees", "3"], ["groups of 3", "alone"]),
        (["--dtype", "int8"], ["'int8'"]),
        (["--device", "cuda"], ["--device cpu"]),
        (["--iterations", "0"], ["iterations", "got 0"]),
        (["--append"], ["--append needs --json"]),
        (["--convert", "/nowhere"], ["--convert needs --json"]),
        (["--convert", "/nowhere", "--json", "x.json"], ["'/nowhere' is no file"]),
        (["--json", "/nowhere/x.json"], ["folder does not exist"]),
    ],
    ids=" ".join,
)
def test_mistakes(capsys, arguments, parts):
    error = fails(capsys, *arguments)
    for part in parts:
        assert part in error


def test_a_file_of_published_times_becomes_a_profile(tmp_path, capsys):
    row = {
        "hidden": 128, "tp": 1, "batch": 1, "attention_forward_ms": 2.0, "attention_backward_ms": 4.0,
        "mlp_forward_ms": 1.0, "mlp_backward_ms": 3.0, "all_reduce_ms": 1.0,
    }  # fmt: skip
    body = {
        "sequence": 256,
        "dtype": "float32",
        "device": "T4 16 GiB",
        "gpus": 8,
        "gpus_per_server": 4,
        "rows": [row],
    }
    source, target = tmp_path / "published.json", tmp_path / "h.json"
    source.write_text(json.dumps(body))
    profile("--convert", str(source), "--json", str(target))
    assert read_hardware(target) == read_hardware(source)
    assert "T4 16 GiB" in capsys.readouterr().out


def test_interrupted_it_says_that_nothing_was_written(tmp_path):
    path = tmp_path / "h.json"
    command = [sys.executable, "-m", "oases", "profile", *SMALL, "--iterations", "100000", "--json", str(path)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("measuring"):
            break
    time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert f"nothing was written to {path}" in errors
    assert os.listdir(tmp_path) == []
