"""Faults of measured choices of schedules, and of the report."""

from reliability.mutation_list.mutation import Mutation

CHOICES = (
    Mutation(
        "autotune_believes_every_turn",
        "oases/core/execution/autotune.py",
        "        doubt = max(each for _, each in everyone)\n",
        "        doubt = 0.0\n",
        ("core/execution/test_autotune.py::test_noise_does_not_choose",),
        "One slow turn of a step of milliseconds, in which turns differ by half, decides that it overlaps.",
    ),
    Mutation(
        "autotune_picks_the_slowest",
        "oases/core/execution/autotune.py",
        "min(self._left, key=self._medians.__getitem__)",
        "max(self._left, key=self._medians.__getitem__)",
        ("core/execution/test_autotune.py",),
        "Autotuning chooses the slowest candidate.",
    ),
    Mutation(
        "autotune_tries_more_sub_batches_because_of_off",
        "oases/core/execution/autotune.py",
        "if label in self._left and label != off]",
        "if label in self._left]",
        ("core/execution/test_autotune.py",),
        "More sub-batches are measured where fewer are clearly slower than none.",
    ),
    Mutation(
        "autotune_measures_again_in_a_later_run",
        "oases/core/execution/autotune.py",
        "            return self.resumed, repeated, known\n",
        "            return self.resumed, self.resumed, known\n",
        ("core/execution/test_autotune.py",),
        "A later run has the choice of an earlier one from its first step, so its losses differ in the last bits.",
    ),
    Mutation(
        "autotune_asks_for_each_shape_of_replicas_with_experts",
        "oases/core/blocks/chooser.py",
        "= () if wider else",
        "= () if False else",
        ("autotp/test_measured_schedules.py",),
        "Replicas that share experts ask one another for the choice for a shape that only some of them have.",
    ),
    Mutation(
        "report_counts_a_late_wait_as_overlap",
        "oases/reporting.py",
        "max(totals.blocked_seconds, totals.link_seconds * at_once)",
        "totals.blocked_seconds",
        ("test_reporting.py",),
        "A host that begins a wait late seems to have hidden communication.",
    ),
    Mutation(
        "choices_of_replicas_are_forgotten",
        "oases/checkpoint/contents.py",
        '                    found[f"{rank}/{number}/{key}"] = label\n',
        "                    pass\n",
        ("train/test_trainer.py",),
        "A resumed replica runs the schedule that another one chose.",
    ),
    Mutation(
        "hidden_seconds_of_what_was_exposed",
        "oases/reporting.py",
        "return max(0.0, self.link_seconds - self.blocked_seconds)",
        "return self.link_seconds",
        ("test_reporting.py",),
        "The report counts link time as hidden for which the compute waited.",
    ),
    Mutation(
        "report_hidden_share",
        "oases/reporting.py",
        "return max(0.0, 1.0 - self.blocked_seconds / self.link_seconds)",
        "return min(1.0, self.blocked_seconds / self.link_seconds)",
        ("test_reporting.py",),
        "oases.report() gives the exposed share as the hidden one.",
    ),
)
