"""`oases profile` on real ranks: what a simulated link was given is found again, and every time is there."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import astuple, fields, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from oases import cli
from oases.core.execution.executor import Context
from oases.core.schedule import Op, generate
from oases.errors import UsageError
from oases.layers import OverlappedStack
from oases.models.gpt import GPTConfig, transformer_blocks
from oases.plans.gpt import gpt
from oases.plans.shape import KINDS
from oases.profile.compute import apart
from oases.profile.config import ProfileConfig
from oases.profile.links import TRIES, LinkBench, Probe, fitted_link, ranks_per_node, sizes
from oases.profile.run import Surroundings, of_model, run_profile
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware_file import read_hardware
from oases.simulator.links import LinkModel, Sample, wire_bytes

ALPHA, BANDWIDTH = 0.01, 2e7
SMALL = ["--hidden", "64", "--heads", "2", "--sequence", "16", "--layers", "2", "--batch", "2", "--iterations", "1"]
SHAPE = gpt(64, 2, 2, 16)


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


@pytest.mark.long
def test_a_simulated_link_is_found_again(tmp_path, capfd):
    path = tmp_path / "h.json"
    profile("--backend", f"sim:alpha={ALPHA * 1e3:g}ms,bandwidth={BANDWIDTH / 1e6:g}MB/s", "--json", str(path))
    hardware = read_hardware(path)
    link = hardware.cluster
    # Bounds that load cannot break. What is fitted to such samples is tested with times that nobody measured.
    assert all(s.seconds > ALPHA + wire_bytes(s.collective, 2, s.bytes) / BANDWIDTH for s in link.samples)
    assert link.bytes_per_second > 0
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


@pytest.mark.long
def test_one_process_for_all_ranks_and_more_shapes_in_one_file(tmp_path, capfd):
    path = tmp_path / "h.json"
    command = ("--tp", "4", "--backend", "sim:alpha=1us,bandwidth=1GB/s,single_process", "--json", str(path))
    profile(*command, "--degrees", "1,2", "--name", "mine")
    first = read_hardware(path)
    assert {block.tp for block in first.blocks} == {1, 2}
    assert "One process represented all ranks" in first.about
    profile(*command, "--sequence", "32", "--degrees", "2", "--append")
    both = read_hardware(path)
    assert len(both.blocks) == len(first.blocks) + 4
    assert (both.name, both.device, both.cluster) == ("mine", first.device, first.cluster)
    assert both.has_block(SHAPE, 1)
    assert both.has_block(gpt(64, 2, 2, 32), 2)
    other = json.loads(path.read_text())
    other["device"]["name"] = "abacus"
    path.write_text(json.dumps(other))
    with pytest.raises(SystemExit):
        profile(*command, "--degrees", "2", "--append")
    assert "'abacus'" in capfd.readouterr().err


LINK = LinkModel(1e-4, 1e8)
sample = LinkBench.sample


def as_of_the_link(bench, probe, collective, num_bytes, attempt=0):
    """Runs what is to be timed, and takes as long as LINK says."""
    found = sample(bench, probe, collective, num_bytes, attempt)
    return replace(found, seconds=LINK.seconds(collective, probe.ranks, found.bytes))


def as_under_load(bench, probe, collective, num_bytes, attempt=0):
    """The first time the more bytes the shorter."""
    found = as_of_the_link(bench, probe, collective, num_bytes, attempt)
    return found if attempt else replace(found, seconds=1 / found.bytes)


def run_small(take=as_of_the_link):
    with mock.patch.object(LinkBench, "sample", take):
        return run_profile(ProfileConfig(64, 1, 2, 16, 1, iterations=1), Surroundings("in a test"), False)


@pytest.mark.long
def test_ranks_of_one_node(two_ranks):
    first, second = two_ranks.run(run_small)
    assert first == second, "the slowest rank's times are everybody's"
    assert first.ranks_per_node == 2
    assert first.node == first.cluster
    assert {sample.collective for sample in first.node.samples} >= {"send", "all_reduce"}
    assert "the inter-node link was not measured" in first.about
    assert first.node.bytes_per_second == pytest.approx(LINK.bytes_per_second)
    assert first.node.startup_seconds == pytest.approx(LINK.startup_seconds)
    assert "busy" not in first.about.partition("Other programs")[0]


@pytest.mark.long
def test_links_that_were_measured_again_are_told_of(two_ranks):
    first, second = two_ranks.run(run_small, as_under_load)
    assert first == second
    assert first.node.bytes_per_second == pytest.approx(LINK.bytes_per_second)
    assert "At first the times of the links did not grow with their bytes, as on a busy machine" in first.about


def found_after(noisy_tries, victims):
    """Count each rank's measurements until a link is found where some first tries are noise; return it, too."""
    asked = []

    def measure(attempt):
        asked.append(attempt)
        noisy = attempt < noisy_tries and dist.get_rank() in victims
        return [
            Sample("all_reduce", 2, size, 1 / size if noisy else LINK.seconds("all_reduce", 2, size))
            for size in sizes(ProfileConfig(), attempt)
        ]

    try:
        return asked, fitted_link(measure, "--batch").bytes_per_second
    except UsageError as error:
        return asked, str(error)


@pytest.mark.parametrize(("noisy_tries", "victims"), [(0, ()), (1, (0, 1)), (2, (0, 1)), (2, (1,))])
def test_noise_is_measured_again_by_all_ranks(two_ranks, noisy_tries, victims):
    for asked, found in two_ranks.run(found_after, noisy_tries, victims):
        assert asked == list(range(noisy_tries + 1))
        assert found == pytest.approx(LINK.bytes_per_second)


@pytest.mark.parametrize("victims", [(0, 1), (1,)])
def test_a_link_whose_times_never_grow_is_refused_by_all_ranks(two_ranks, victims):
    why = "the samples do not grow with their bytes, so no bandwidth can be fitted; measure larger ones"
    for asked, found in two_ranks.run(found_after, TRIES, victims):
        assert asked == list(range(TRIES))
        assert found == f"links, measured {TRIES} times: {why}, with a larger --batch"


def test_sizes_grow_from_try_to_try():
    small = ProfileConfig(hidden=64, sequence=16, batch=1)
    largest = [sizes(small, attempt)[-1] for attempt in range(TRIES)]
    assert largest == [1 << 20, 1 << 22, 1 << 24]
    assert {sizes(small, attempt)[0] for attempt in range(TRIES)} == {sizes(small)[0]}
    large = ProfileConfig(hidden=4096, sequence=4096, batch=8)
    assert sizes(large, 1) == sizes(large), "large enough"


@pytest.mark.parametrize(("attempt", "seconds"), [(0, 0.3), (1, 0.2)])
def test_repetitions_by_their_median_and_measured_again_by_the_least(attempt, seconds):
    bench = LinkBench(ProfileConfig(iterations=3))
    times = iter([9.0, 0.2, 0.1, *([0.3, 0.4, 0.2] if attempt == 0 else [0.3] * 11 + [0.2])])
    bench._train = lambda run, count: next(times) * count
    assert bench.sample(Probe("node", 2, None), "all_reduce", 1 << 20, attempt).seconds == seconds
    assert list(times) == [], "connected, tried, and each repetition taken"


def run_two_nodes():
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        with mock.patch.object(LinkBench, "sample", as_of_the_link):
            return run_profile(
                ProfileConfig(64, 1, 4, 16, 2, iterations=1, degrees="2"), Surroundings("as two nodes"), False
            )
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.slow
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
    ticks = itertools.count()
    context = Context([], clock=lambda: f"mark {next(ticks)}")
    stack(torch.randn(2, 4, 16), context=context).sum().backward()
    assert context.spans[0] == ("F 0.0", "mark 0", "mark 1")
    assert next(ticks) == 2 * len(context.spans)


def test_sizes_and_degrees():
    assert ProfileConfig(batch=6).sub_batch_sizes == (1, 2, 4, 6)
    assert ProfileConfig(batch=1).sub_batch_sizes == (1,)
    assert ProfileConfig(degrees=" 4, 2,2").tensor_parallel(8) == (2, 4)
    assert ProfileConfig().tensor_parallel(8) == (8,)
    with pytest.raises(UsageError, match="groups of 3"):
        ProfileConfig(degrees="3").tensor_parallel(8)


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 64,
}  # fmt: skip


def test_a_model_has_its_own_sizes(tmp_path, capsys):
    """Degrees and sizes of links are those of the model: those of the GPT beside it have 12 heads and 256 rows."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    given = ProfileConfig(model=str(path), sequence=512, degrees="1,3,24", layers=2)
    config = of_model(given)
    config.check(24)
    assert (config.hidden, config.heads) == (2048, 32)
    assert sizes(config)[-1] == 8 * 512 * 2048 * 4
    assert [config.beside(degree).heads for degree in (1, 3, 24)] == [32, 33, 48]
    assert config.beside(24).hidden == 48 * 64
    assert "has its sizes; leave out --heads, --hidden" in fails(capsys, "--model", str(path))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--tp", "1"], ["--tp 1", "at least 2"]),
        (["--tp", "4"], ["heads 2", "--tp 4"]),
        (["--degrees", "two"], ["'two'", "1,2,4"]),
        (["--degrees", "3"], ["groups of 3", "single_process"]),
        (["--dtype", "int8"], ["'int8'"]),
        (["--device", "cuda"], ["--device cpu"]),
        (["--iterations", "0"], ["iterations", "got 0"]),
        (["--append"], ["--append needs --json"]),
        (["--model", "/nowhere"], ["'/nowhere'"]),
        (["--json", "/dev/null/x.json"], ["a file is in the way"]),
    ],
    ids=" ".join,
)
def test_mistakes(capsys, arguments, parts):
    error = fails(capsys, *arguments)
    for part in parts:
        assert part in error


@pytest.mark.slow
def test_interrupted_it_says_that_nothing_was_written(tmp_path):
    path = tmp_path / "h.json"
    command = [sys.executable, "-m", "oases", "profile", *SMALL, "--iterations", "20", "--json", str(path)]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("oases: measuring"):
            break
    time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 130, errors
    assert f"nothing was written to {path}" in errors
    assert os.listdir(tmp_path) == []
