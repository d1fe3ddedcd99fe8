"""Properties of schedules, plans and checkpoint folders, over inputs that hypothesis draws; always the same ones."""

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oases.checkpoint import retention
from oases.checkpoint.metadata import Metadata
from oases.checkpoint.writer import write
from oases.core.schedule import (
    GENERATORS,
    PIPELINES,
    ScheduleError,
    format_schedule,
    generate,
    generate_pipeline,
    parse_schedule,
    validate,
)
from oases.core.schedule.validate import needs
from oases.errors import UsageError
from oases.plans.check import check
from oases.plans.expert_schedules import EXPERT_SCHEDULES, generate_experts
from oases.plans.plan import Plan
from oases.simulator import simulate
from oases.simulator.hardware_file import read_hardware
from oases.simulator.hardware_file import to_json as hardware_json
from oases_train.config import TrainConfig
from oases_train.plan import plan_from_degrees
from oases_train.resume import starting_checkpoint
from reliability.input_mutations import hardware, mutated, plans, schedules

PLAIN = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck)
)

SIZES = st.integers(1, 4)
BLOCKS = st.builds(generate, st.sampled_from(sorted(GENERATORS)), SIZES, SIZES, st.sampled_from(["none", "full"]))
EXPERTS = st.builds(generate_experts, st.sampled_from(sorted(EXPERT_SCHEDULES)), SIZES, st.booleans())
STAGES = st.builds(
    lambda name, stages, times, again: generate_pipeline(name, stages, stages * times, again),
    st.sampled_from(sorted(PIPELINES)), SIZES, st.integers(1, 3), st.booleans(),
)  # fmt: skip


def shuffled(schedule, random, swaps=60):
    """The ops in another order in which each still comes after what it needs; collectives keep their order."""
    ops = list(schedule.ops)
    for _ in range(swaps):
        at = random.randrange(len(ops) - 1)
        first, second = ops[at], ops[at + 1]
        both_sent = first in schedule.collectives and second in schedule.collectives
        if first.in_backward == second.in_backward and not both_sent and first not in set(needs(second, schedule)):
            ops[at : at + 2] = second, first
    return type(schedule)(**vars_of(schedule) | {"ops": tuple(ops)})


def vars_of(schedule):
    return {name: getattr(schedule, name) for name in schedule.__dataclass_fields__}


@pytest.mark.long
@PLAIN
@given(st.one_of(BLOCKS, EXPERTS), st.randoms(use_true_random=False))
def test_any_order_that_respects_the_needs_is_valid_and_round_trips(schedule, random):
    other = shuffled(schedule, random)
    validate(other)
    assert parse_schedule(format_schedule(other)) == other


@pytest.mark.long
@PLAIN
@given(st.one_of(BLOCKS, EXPERTS, STAGES))
def test_a_simulated_step_scales_with_its_costs(schedule):
    assert parse_schedule(format_schedule(schedule)) == schedule
    costs = dict.fromkeys((op.kind for op in schedule if op.kind != "wait"), 1.0)
    once, twice = (simulate(schedule, dict.fromkeys(costs, times)).total_seconds for times in (1.0, 2.0))
    assert twice == 2 * once > 0


@PLAIN
@given(st.one_of(BLOCKS, EXPERTS, STAGES), st.randoms(use_true_random=False))
def test_a_changed_list_is_a_schedule_or_an_error_of_one(schedule, random):
    lines = format_schedule(schedule).splitlines()
    for _ in range(random.randrange(1, 3)):
        at, to = (random.randrange(1, len(lines)) for _ in range(2))
        change = random.randrange(4)
        if change == 0 and len(lines) > 2:
            del lines[at]
        elif change == 1:
            lines.insert(to, lines[at])
        elif change == 2:
            lines[at], lines[to] = lines[to], lines[at]
        else:
            lines[at] = lines[at].replace(random.choice("0123."), random.choice("0129."), 1)
    with contextlib.suppress(ScheduleError):
        made = parse_schedule("\n".join(lines))
        validate(made)
        assert parse_schedule(format_schedule(made)) == made


@PLAIN
@given(
    data=st.integers(1, 3), pipeline=st.integers(1, 3), tensor=st.sampled_from([1, 2, 4]), micro=st.integers(1, 3),
    layers=st.integers(1, 6), sub_batches=st.integers(1, 3), name=st.sampled_from([*sorted(GENERATORS), "auto"]),
    how=st.sampled_from(sorted(PIPELINES)), recompute=st.sampled_from(["none", "full"]), zero=st.booleans(),
    fsdp=st.booleans(), experts=st.sampled_from([0, 0, 4, 12]), sequence_parallel=st.booleans(),
)  # fmt: skip
def test_the_plan_of_any_degrees_is_read_again_as_it_is_or_refused(
    data, pipeline, tensor, micro, layers, sub_batches, name, how, recompute, zero, fsdp, experts, sequence_parallel
):
    try:
        config = TrainConfig(
            hidden=64, heads=4, sequence=16, layers=layers, batch=12 * micro, micro_batches=micro,
            schedule="auto" if experts or name == "auto" else f"{name}@{sub_batches}", pipeline_schedule=how,
            zero=zero, recompute=recompute, fsdp=fsdp, experts=experts, sequence_parallel=sequence_parallel,
            degrees={"data": data, "pipeline": pipeline, "tensor": tensor},
        )  # fmt: skip
        plan = plan_from_degrees(config, data * pipeline * tensor)
    except UsageError:
        return
    assert Plan.from_json(plan.to_json()) == plan
    with contextlib.suppress(UsageError, ScheduleError):
        check(plan)


PARSED = [
    *((Plan.from_json, Plan.to_json, json.loads(text)) for text in plans()),
    *((read_hardware, hardware_json, json.loads(text)) for text in hardware()),
]


@settings(PLAIN, max_examples=300)
@given(st.sampled_from(PARSED), st.integers(1, 3), st.randoms(use_true_random=False))
def test_changed_json_is_refused_or_means_what_it_says(parsed, times, random):
    read, written, data = parsed
    text = json.dumps(mutated(data, random, times))
    with contextlib.suppress(UsageError, ScheduleError):
        found = read(text)
        assert read(written(found)) == found


def test_mutations_change_what_they_are_given():
    data = json.loads(plans()[0])
    assert len({json.dumps(mutated(data, Random(seed))) for seed in range(100)}) > 50
    assert json.dumps(data) == json.dumps(json.loads(plans()[0])), "the data itself stays"
    assert len(schedules()) == 2 * (len(GENERATORS) + len(PIPELINES) + len(EXPERT_SCHEDULES))


# --- checkpoint folders ---


class Killed(BaseException):
    """A run ends between two changes of its folder."""


class Mortal:
    """Renames and removals of files, of which the one after `left` more does not happen, nor any later one."""

    def __init__(self):
        self.left = None
        self._rename, self._rmtree = Path.rename, shutil.rmtree

    def _step(self):
        if self.left is not None:
            if self.left == 0:
                raise Killed
            self.left -= 1

    def __enter__(self):
        def rename(path, target):
            self._step()
            return self._rename(path, target)

        def rmtree(path, *arguments, **options):
            self._step()
            for file in sorted(Path(path).glob("*")) if self.left == 0 else []:
                file.unlink()  # half of a removal is done
                raise Killed
            return self._rmtree(path, *arguments, **options)

        Path.rename, shutil.rmtree = rename, rmtree
        return self

    def __exit__(self, *_):
        Path.rename, shutil.rmtree = self._rename, self._rmtree


DAMAGES = ("cut", "changed", "gone", "empty", "pipe")


class CheckpointFolder(RuleBasedStateMachine):
    """A run that saves, is killed, finds its files damaged, and resumes.

    whole: steps whose checkpoints are surely valid. Whatever happens, the newest of them is found, or a newer one
    whose write was killed.
    """

    def __init__(self):
        super().__init__()
        self.parent = Path(tempfile.mkdtemp(prefix="oases-properties-"))
        self.folder = self.parent / "run"
        self.whole = set()
        self.unsure = set()
        self.step = 0

    def teardown(self):
        shutil.rmtree(self.parent)

    @initialize()
    def begin(self):
        self.save(1)

    def save(self, step):
        self.folder.mkdir(exist_ok=True)
        record = Metadata(step=step, updates=step, sizes={"hidden": 1})
        write(retention.folder_of(self.folder, step), {"model.x": torch.full((2,), float(step))}, record, None)
        self.step = max(self.step, step)
        self.whole.add(step)
        self.unsure.discard(step)

    @rule(ahead=st.integers(1, 3))
    def saves_a_later_step(self, ahead):
        self.save(self.step + ahead)

    @precondition(lambda self: self.whole)
    @rule()
    def saves_its_last_step_again(self):
        self.save(max(self.whole))

    @rule(after=st.integers(0, 7), again=st.booleans(), keep=st.integers(1, 2))
    def is_killed_while_it_saves_and_prunes(self, after, again, keep):
        step = max(self.whole) if again and self.whole else self.step + 1
        before = set(self.whole)
        with Mortal() as mortal, contextlib.suppress(Killed):
            mortal.left = after
            self.save(step)
            self._prune(keep)
        self.step = max(self.step, step)
        if step not in before and step not in self.whole:
            self.unsure.add(step)
        # What a prune was to remove may be there or not; the newest, damaged ones among them, are there.
        gone = set() if self._kept is None else self.whole - self._kept
        self.whole -= gone
        self.unsure |= gone
        self._kept = None

    _kept = None

    def _prune(self, keep):
        self._kept = {retention.step_of(path) for path in retention.checkpoints(self.folder)[:keep]}
        retention.tidy(self.folder, keep)

    @rule(keep=st.integers(1, 3))
    def prunes(self, keep):
        there = [retention.step_of(path) for path in retention.checkpoints(self.folder)]
        retention.tidy(self.folder, keep)
        self.whole &= set(there[:keep])
        self.unsure &= set(there[:keep])

    @rule(newest=st.booleans(), how=st.sampled_from(DAMAGES), which=st.integers(0, 9))
    def a_file_is_damaged(self, newest, how, which):
        paths = retention.checkpoints(self.folder)
        if not paths:
            return
        path = paths[0 if newest else -1]
        files = sorted(path.iterdir())
        if not files:
            return
        file = files[which % len(files)]
        if not file.is_file() or not file.stat().st_size:
            return
        data = file.read_bytes()
        file.unlink()
        if how == "pipe":
            os.mkfifo(file)
        elif how != "gone":
            file.write_bytes({"cut": data[:-1], "empty": b""}.get(how, bytes([data[0] ^ 1]) + data[1:]))
        self.whole.discard(retention.step_of(path))
        self.unsure.discard(retention.step_of(path))

    @rule()
    def resumes(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = starting_checkpoint(str(self.folder), "auto", True, None)
        step = 0 if found is None else Metadata.read(found).step
        assert step >= max(self.whole, default=0), "the newest valid checkpoint was lost"
        assert not step or step in self.whole | self.unsure, "a damaged checkpoint was taken"
        assert not any(path.name.startswith(".") for path in self.folder.iterdir()), "tidied"
        there = {retention.step_of(path) for path in retention.checkpoints(self.folder)}
        assert self.whole <= there
        if step in self.unsure:
            self.unsure.discard(step)
            self.whole.add(step)
        self.step = step
        self.unsure = {each for each in self.unsure if each <= step}

    @invariant()
    def valid_checkpoints_are_in_the_folder_or_set_aside(self):
        there = {path.name.strip(".").removesuffix(".old") for path in self.folder.glob("*")} if self.whole else set()
        assert {retention.folder_of("", step).name for step in self.whole} <= there


TestCheckpointFolder = CheckpointFolder.TestCase
TestCheckpointFolder.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=15, stateful_step_count=12, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_a_killed_replacement_of_a_checkpoint_is_undone(tmp_path):
    """The write of a step that is saved already ends after any of its renames and removals."""
    record, between = Metadata(step=3, updates=3, sizes={}), 0
    for left in range(8):
        path = retention.folder_of(tmp_path / str(left), 3)
        write(path, {"model.x": torch.ones(2)}, record, None)
        with Mortal() as mortal, contextlib.suppress(Killed):
            mortal.left = left
            write(path, {"model.x": torch.zeros(2)}, record, None)
        between += not path.exists()
        assert starting_checkpoint(str(path.parent), "auto", True, None) == path
    assert between == 1, "killed between the rename of the old and that of the new checkpoint"
