"""Elastic runs: a lost node or rank lowers the number of replicas, and the same curve goes on."""

import os
import signal
import socket
import subprocess
import sys
import time

import kills
import pytest

from oases import TrainConfig, Trainer
from oases.cli import _parser, main
from oases.launch.agents import RankFailedError
from oases.launch.ranks import _restart_or_exit
from oases_train.command import _runs_of

STEPS = 24
RUN = {"steps": STEPS, "checkpoint_every": 4, "tp": 1}


@pytest.fixture(scope="module")
def alone(corpus):
    """Losses of one rank that nobody disturbs."""
    sizes = {name.replace("-", "_"): value for name, value in kills.SIZES.items()}
    return Trainer(TrainConfig(data=str(corpus), steps=STEPS, **sizes)).train()["losses"]


def assert_same_curve(log, alone):
    steps, losses = zip(*kills.losses_of(log), strict=True)
    assert steps == tuple(range(1, STEPS + 1))
    assert losses == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_a_rank_lost_for_good_leaves_fewer_replicas(corpus, alone, tmp_path):
    log, folder = tmp_path / "log.jsonl", tmp_path / "run"
    started = []

    def lose(run):
        now = []
        for step in (6, 0):  # in training, and then before the first step of the restart
            assert kills.wait_until(lambda now=now: len(set(run.ranks()) - set(now)) == 2, run)
            now = sorted(set(run.ranks()) - set(now))
            assert kills.wait_until(lambda: not step or len(kills.lines_of(log)) >= step, run)  # noqa: B023
            started.append(len(now))
            os.kill(now[1], signal.SIGKILL)
        kills.wait_until(lambda now=now: set(run.ranks()) - set(now), run)
        started.append(len(set(run.ranks()) - set(now)))

    words = kills.arguments(corpus, dp="1:2", max_restarts=2, checkpoint=folder, step_log=log, **RUN)
    code = kills.Run(words, tmp_path / "stderr").call(lose)
    said = (tmp_path / "stderr").read_text()
    assert code == 0, said
    assert started == [2, 2, 1]
    assert "rank 1 ended with signal SIGKILL; restart 1 of 2\n" in said
    assert "restart 2 of 2 with 1 ranks instead of 2\n" in said
    assert_same_curve(log, alone)


def test_a_restart_with_fewer_ranks_says_so(capsys):
    _restart_or_exit(RankFailedError("rank 1", -9), 0, 1, 2, " with 2 ranks instead of 4")
    assert capsys.readouterr().err.endswith("restart 2 of 2 with 2 ranks instead of 4\n")


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ("--dp 2:1", None, "argument --dp/--data-parallel: must be a degree from 1 to 4096, or two as MIN:MAX"),
        ("--dp 0", None, "must be a degree from 1 to 4096, or two as MIN:MAX, e.g. 1:2, got '0'"),
        ("--dp 0:2", None, "must be a degree from 1 to 4096"),
        ("--dp 1:x", None, "must be a degree from 1 to 4096"),
        ("--dp 1:99999", None, "must be a degree from 1 to 4096"),
        ("--dp 1:4 --batch 8 --max-restarts 1", None, "--dp 1:4 with 3 replicas: a batch of 8 does not divide"),
        ("--dp 1:2 --tp 1", None, "--dp 1:2 lowers the replicas at a restart; give --max-restarts N"),
        ("--dp 1:2 --tp 2 --batch 8", 6, "--dp 1:2 needs 2 to 4 ranks, 2 for each replica, but the launcher gives 6"),
        ("--tp 2", 3, "--tp 2 needs 2 ranks, but the launcher gives 3"),
        ("--tp 1 --batch 8", 3, "a batch of 8 does not divide into 1 micro-batches for each of 3 replicas"),
    ],
)
def test_mistakes(capsys, monkeypatch, options, ranks, message):
    if ranks is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit) as caught:
        main(["train", "--hidden", "32", "--layers", "1", "--heads", "4", *options.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "ranks", "degrees"),
    [
        ("--tp 2", 4, (2, 1, 2)),
        ("--tp 2 --pp 2 --micro-batches 2", 8, (2, 2, 2)),
        ("--dp 1:2 --tp 2", 2, (1, 1, 2)),
        ("--dp 1:2", 2, (2, 1, 1)),
        ("--dp 1:2 --experts 4", 1, (1, 1, 1)),
        ("", 2, (1, 1, 2)),
    ],
)
def test_the_ranks_of_a_launcher_are_replicas(monkeypatch, options, ranks, degrees):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    words = ["train", "--hidden", "32", "--layers", "2", "--heads", "4", *options.split()]
    (run,) = _runs_of(_parser(words).parse_args(words))
    assert (run.config.degrees.data, run.config.degrees.pipeline, run.config.degrees.tensor) == degrees
    assert run.plan.world == ranks


# --- nodes of torchrun ---


def agent(port, words, log, *, host):
    """An agent of one node with one rank, which goes on with one node or two."""
    settings = f"last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={int(host)}"
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts",
        "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", settings,
        "--rdzv-id", "elastic", "--local-addr", "localhost",
    ]  # fmt: skip
    with log.open("a") as out:
        return subprocess.Popen(
            [*launcher, *words], stdout=out, stderr=out, start_new_session=True,
            env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )  # fmt: skip


def lose(node):
    """Kill an agent and its ranks."""
    for process in [node.pid, *kills.children_of(node.pid)]:
        os.kill(process, signal.SIGKILL)
    node.wait()


@pytest.mark.slow
def test_a_node_is_lost_and_another_joins(corpus, tmp_path):
    """At two replicas, then at one, then at two again; for the node that joins the others end a step and save it."""
    log, output = tmp_path / "log.jsonl", tmp_path / "output"
    options = {"tp": 1, "batch": 64, "learning_rate": 1e-4, "learning_rate_schedule": "constant"}
    saves = {"checkpoint": tmp_path / "run", "checkpoint_every": 4, "resume": "auto", "step_log": log}
    words = kills.command(corpus, steps=100000, **options, **saves)[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [agent(port, words, output, host=first) for first in (True, False)]

    def wait_for(condition):
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, output.read_text()
            assert nodes[0].poll() is None, output.read_text()
            time.sleep(0.01)

    def wait_for_steps_at(replicas, starts, resumed):
        wait_for(lambda: output.read_text().count(f"tp 1 x dp {replicas}") == starts)
        wait_for(lambda: output.read_text().count("resumed from") == resumed)
        steps = len(kills.lines_of(log))
        wait_for(lambda: len(kills.lines_of(log)) >= steps + 10)

    try:
        wait_for_steps_at(2, starts=1, resumed=0)
        lose(nodes[1])
        wait_for_steps_at(1, starts=1, resumed=1)
        nodes.append(agent(port, words, output, host=False))
        wait_for_steps_at(2, starts=2, resumed=2)
    finally:
        for node in nodes:
            if node.poll() is None:
                lose(node)
    there = kills.losses_of(log)
    main(kills.arguments(corpus, steps=len(there), step_log=tmp_path / "undisturbed", **options))
    steps, losses = zip(*there, strict=True)
    assert steps == tuple(range(1, len(there) + 1))
    assert losses == pytest.approx([loss for _, loss in kills.losses_of(tmp_path / "undisturbed")], rel=1e-3)
