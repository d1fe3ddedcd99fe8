"""Faults of measured choices of schedules, and of the report."""

from mutation_list.mutation import Mutation

CHOICES = (
    Mutation(
        "autotune_picks_the_slowest",
        "oases/parallel/autotune.py",
        "min(self._left, key=self._medians.__getitem__)",
        "max(self._left, key=self._medians.__getitem__)",
        ("parallel/test_autotune.py",),
        "Autotuning chooses the slowest candidate.",
    ),
    Mutation(
        "autotune_tries_more_sub_batches_because_of_off",
        "oases/parallel/autotune.py",
        "if label in self._left and label != off]",
        "if label in self._left]",
        ("parallel/test_autotune.py",),
        "More sub-batches are measured where fewer are clearly slower than none.",
    ),
    Mutation(
        "autotune_measures_again_in_a_later_run",
        "oases/parallel/autotune.py",
        "            return known._replace(turns=self.resumed)\n",
        "            return known._replace(turns=self.resumed, repeated=self.resumed)\n",
        ("parallel/test_autotune.py",),
        "A later run has the choice of an earlier one from its first step, so its losses differ in the last bits.",
    ),
    Mutation(
        "autotune_asks_for_each_shape_of_replicas_with_experts",
        "oases/parallel/tunings.py",
        "= () if together else",
        "= () if False else",
        ("autotp/test_measured_schedules.py",),
        "Replicas that share experts ask one another for the choice for a shape that only some of them have.",
    ),
    Mutation(
        "report_counts_a_late_wait_as_overlap",
        "oases/reporting.py",
        "max(totals.blocked_seconds, totals.link_seconds * at_once)",
        "totals.blocked_seconds",
        ("parallel/test_reporting.py",),
        "A host that begins a wait late seems to have hidden communication.",
    ),
    Mutation(
        "autotune_goes_on_after_a_failure",
        "oases/parallel/stack.py",
        "            self._tunings.begin_again()\n",
        "            pass\n",
        ("parallel/test_autotune.py",),
        "Ranks that counted different calls before a failure go on with different candidates.",
    ),
    Mutation(
        "choices_of_replicas_are_forgotten",
        "oases/train/checkpoint/contents.py",
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
        ("parallel/test_reporting.py",),
        "The report counts link time as hidden for which the compute waited.",
    ),
    Mutation(
        "report_hidden_share",
        "oases/reporting.py",
        "return max(0.0, 1.0 - self.blocked_seconds / self.link_seconds)",
        "return min(1.0, self.blocked_seconds / self.link_seconds)",
        ("parallel/test_reporting.py",),
        "oases.report() gives the exposed share as the hidden one.",
    ),
)
