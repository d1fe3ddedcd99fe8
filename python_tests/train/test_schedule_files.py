"""Lists of all three kinds from files: equal to their generators to the bit, refused where they do not fit."""

import dataclasses

import pytest
from plan_runs import EXPERTS

from oases import TrainConfig, Trainer
from oases.core.schedule import ScheduleError, format_schedule, generate, generate_pipeline
from oases.errors import UsageError
from oases.plans.expert_schedules import generate_experts
from oases.plans.plan import Plan
from oases_train.plan import Run

CONFIG = TrainConfig(
    hidden=32, layers=4, heads=4, sequence=16, batch=8, steps=3, warmup=1, validation_batches=1, learning_rate=3e-3,
    micro_batches=2, degrees={"pipeline": 2, "tensor": 1},
)  # fmt: skip
LISTS = {
    "blocks": (CONFIG, {"schedule": "cross_pass@2"}, "schedule", generate("cross_pass", 4, 2)),
    "recomputed": (CONFIG, {"schedule": "oases@2", "recompute": "full"}, "schedule", generate("oases", 4, 2, "full")),
    "stages": (CONFIG, {"pipeline_schedule": "gpipe"}, "pipeline_schedule", generate_pipeline("gpipe", 2, 2, False)),
    "experts": (
        dataclasses.replace(EXPERTS, steps=3),
        {"schedule": "blocking"},
        "schedule",
        generate_experts("blocking", 2),
    ),
}


def curve(config):
    trainer = Trainer(config)
    losses, validation = [trainer.step() for _ in range(3)], trainer.validate()
    trainer.close()
    return losses, validation


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("name", LISTS)
def test_a_list_from_a_file_trains_as_the_generator_s(two_ranks, corpus, tmp_path, name):
    config, named, field, made = LISTS[name]
    path = tmp_path / "list.txt"
    path.write_text(format_schedule(made))
    config = dataclasses.replace(config, data=corpus)
    given = dataclasses.replace(config, **{field: str(path)})
    plan = Run.of(given, 2).plan
    assert Plan.from_json(plan.to_json()) == plan  # the text travels in the plan
    assert made.name in plan.text()
    assert Run.of(dataclasses.replace(config, schedule=str(path)), 2).plan == plan  # whatever its sort
    assert two_ranks.run(curve, given) == two_ranks.run(curve, dataclasses.replace(config, **named))


@pytest.mark.parametrize("name", LISTS)
def test_a_file_that_does_not_fit_is_refused_with_its_line(tmp_path, name):
    config, _, field, made = LISTS[name]
    path, text = tmp_path / "list.txt", format_schedule(made)
    for broken in (
        text.rsplit("\n", 2)[0] + "\n",
        "\n".join([*text.splitlines()[:2], *text.splitlines()[3:]]) + "\n",
    ):
        path.write_text(broken)
        with pytest.raises(ScheduleError, match=r"list.txt', line \d+"):
            Run.of(dataclasses.replace(config, **{field: str(path)}), 2)


def test_a_file_and_a_name_for_one_field_are_refused(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(format_schedule(generate_pipeline("gpipe", 2, 2)))
    with pytest.raises(UsageError, match=r"list.txt' is a file for --pipeline-schedule, given too; leave out one"):
        dataclasses.replace(CONFIG, schedule=str(path), pipeline_schedule="zb_h1")
    assert dataclasses.replace(CONFIG, schedule=str(path)).pipeline_schedule == str(path)


def test_a_file_for_other_sizes_is_refused(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(format_schedule(generate("oases", 8, 2)))
    with pytest.raises(ScheduleError, match="it is for 8 blocks, but 4 are required"):
        Run.of(dataclasses.replace(CONFIG, schedule=str(path)), 2)
    path.write_text(format_schedule(generate_pipeline("gpipe", 2, 4)))
    with pytest.raises(ScheduleError, match="it is for 4 micro-batches, but 2 are required"):
        Run.of(dataclasses.replace(CONFIG, pipeline_schedule=str(path)), 2)
    path.write_text(format_schedule(generate_experts("block_wise", 3)))
    with pytest.raises(ScheduleError, match="is for 3 blocks, but the model has 2"):
        Run.of(dataclasses.replace(EXPERTS, schedule=str(path)), 2)
    with pytest.raises(UsageError, match="needs a mixture of experts; give --experts N, too"):
        dataclasses.replace(CONFIG, schedule=str(path))
    with pytest.raises(ScheduleError, match="is a schedule of blocks of experts"):
        Run.of(dataclasses.replace(CONFIG, pipeline_schedule=str(path)), 2)
