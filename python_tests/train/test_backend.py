"""`--backend auto`: which backend a run takes, and that a resumed one keeps it, whose sums are others to the bit."""

from argparse import Namespace

import kills
import pytest

from oases.checkpoint.metadata import Metadata
from oases.cli import main
from oases.cli.options import make_rank_options, resolve_backend
from oases.testbed import Backend
from oases_train.resume import differences, resumed_backend


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "staged"),
        ({"backend": "nccl"}, "nccl"),
        ({"device": "cuda"}, "gloo"),
        ({"ranks": 1}, "gloo"),
        ({"link": "1gbit"}, "gloo"),
        ({"nodes": 2}, "gloo"),
        ({"resumed": "gloo"}, "gloo"),
        ({"resumed": "sim"}, "gloo"),
        ({"resumed": "staged"}, "staged"),
        ({"resumed": "staged", "link": "1gbit"}, "gloo"),
        ({"launched": ("4", "4")}, "staged"),
        ({"launched": ("4", "2")}, "gloo"),
        ({"launched": ("4", None)}, "gloo"),
    ],
)
def test_ranks_of_one_machine_share_memory(monkeypatch, changes, expected):
    for name, value in zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), changes.get("launched", (None, None)), strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    options = Namespace(backend="auto", link=None, nodes=1)
    vars(options).update({name: changes[name] for name in ("backend", "link", "nodes") if name in changes})
    resolve_backend(options, changes.get("device", "cpu"), changes.get("ranks", 4), changes.get("resumed"))
    assert options.backend == expected


@pytest.mark.parametrize(("device", "cuda"), [("cpu", False), ("cuda", True)])
def test_staged_is_for_both_kinds_of_devices(device, cuda):
    options = Namespace(backend="staged", timeout=60, tp=2, nodes=1, link=None)
    assert make_rank_options(options, device).backend == Backend("staged", cuda=cuda)


@pytest.mark.parametrize(
    ("saved", "now", "differs"),
    [("staged", "staged", False), ("gloo", "staged", True), ("", "staged", True), ("staged", "gloo", True),
     ("sim", "gloo", False), ("", "gloo", False), ("staged", "", False)],
)  # fmt: skip
def test_a_change_of_sums_is_described(saved, now, differs):
    record = Metadata(step=1, updates=1, sizes={}, ranks=2, backend=saved)
    assert bool(differences(record, {}, now, 0.0)) == differs


def saved(folder, step, **changes):
    path = folder / f"step-{step:08}"
    path.mkdir(parents=True)
    Metadata(step=step, updates=step, sizes={}, **changes).write(path)
    return path


def test_the_backend_of_the_run_that_is_resumed(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    path = saved(other, 3, ranks=2)
    saved(own, 1, ranks=2, backend="staged")
    assert resumed_backend(str(own), None, False) is None
    assert resumed_backend(str(own), "auto", True) == "staged"
    assert resumed_backend(str(tmp_path / "none"), "auto", True) is None
    assert resumed_backend(str(tmp_path / "none"), str(path), False) == "gloo", "as before 0.2"
    assert resumed_backend(None, str(other), False) == "gloo"
    newer = saved(own, 2, ranks=2, backend="gloo")
    assert resumed_backend(str(own), "auto", True) == "gloo"
    (newer / "checkpoint.json").write_text("{")
    assert resumed_backend(str(own), "auto", True) == "staged", "the one that the ranks will take"
    saved(own, 4)
    assert resumed_backend(str(own), "auto", True) is None, "one rank makes no sums"


@pytest.mark.slow
def test_a_run_says_its_backend_and_keeps_it(corpus, tmp_path, capfd):
    """With ranks of its own, which join over it."""

    def run(steps, *options):
        main([*kills.arguments(corpus, tp=2, steps=steps, checkpoint=tmp_path / "ck", resume="auto"), *options])
        return capfd.readouterr()

    assert "starting 2 ranks over staged" in run(1).out
    record = Metadata.read(next((tmp_path / "ck").glob("step-*")))
    assert record.backend == "staged"
    out, error = run(2, "--backend", "gloo")
    assert "starting 2 ranks over gloo" in out
    why = "sums were made over staged, these are over gloo and may differ in their last bits; give --backend staged"
    assert why in error
