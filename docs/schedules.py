"""Write the pages of docs/schedules: each schedule drawn from its list, with a table that the simulator computes.

python docs/schedules.py            # rewrites them
python docs/schedules.py --check    # exits with 1 where they are not what this would write
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from oases.core.schedule import GENERATORS, PIPELINES, Schedule, generate
from oases.core.schedule.pipeline import generate_pipeline
from oases.core.schedule.tensor import WHOLE, Recompute
from oases.plans.expert_schedules import EXPERT_SCHEDULES, generate_experts
from oases.plans.pipelines import chunks_of, in_flight, read_stage
from oases.simulator import StackCosts, Timeline, simulate
from oases.simulator.cost import BlockBytes
from oases.simulator.drawing import COLOURS

FOLDER = Path(__file__).resolve().with_name("schedules")
RATIOS = (0.5, 1.0, 2.0)
BLOCKS, SUB_BATCHES, KEPT = 8, 2, 5
"""Shape of the tables of tensor-parallel schedules. KEPT: activations that a block keeps, by its input."""
STAGES, MICRO_BATCHES = 4, (4, 8, 16)
PASSES = {"F": 1.0, "R": 1.0, "B": 2.0, "send": 0.1}
"""Seconds of a stage's passes on one micro-batch; B includes the weight gradients, or W takes half of it."""
EXPERTS = {"D": 1.0, "E": 1.0, "F": 0.2, "P": 0.2, "all_to_all": 0.5, "share": 0.3, "join": 0.3, "split": 0.3,
           "return": 0.3}  # fmt: skip
EARLY = ("pre_recompute", "last_no_recompute", "shifted_critical_path")
"""Pipelines that are drawn with recomputation, in which they differ from 1F1B."""
UNITS = {"tensor": "Tensor-parallel blocks", "pipeline": "Pipelines", "experts": "Blocks of experts"}


# --- drawings ---

_WIDTH, _LABEL, _LANE, _TITLE = 960, 110, 22, 26


def svg(timelines: Sequence[Timeline], *, links: bool) -> str:
    """Timelines to one time scale, a lane for each rank's compute and, with `links`, its links."""
    scale = (_WIDTH - _LABEL) / max(timeline.total_seconds for timeline in timelines)
    shapes: list[str] = []
    kinds: dict[str, None] = {}
    top = 2 * _TITLE
    for timeline in timelines:
        shapes.append(f'<text x="{_LABEL}" y="{top - 6}">{escape(timeline.name)}</text>')
        for rank, lane in (each for each in timeline.lanes if links or each[1] == "compute"):
            label = f"stage {rank}" if timeline.who == "stage" else lane
            shapes.append(f'<text x="{_LABEL - 8}" y="{top + 15}" text-anchor="end">{label}</text>')
            for span in timeline.spans:
                if (span.rank, span.lane) == (rank, lane) and span.seconds:
                    kinds[span.kind] = None
                    shapes.append(_rectangle(span.kind, span.name, scale * span.start, scale * span.seconds, top))
            top += _LANE
        top += _TITLE
    height = top - _TITLE + 6
    legend = "".join(
        f'<rect x="{_LABEL + 130 * place}" y="4" width="12" height="12" fill="{COLOURS[kind]}"/>'
        f'<text x="{_LABEL + 130 * place + 17}" y="14">{kind}</text>'
        for place, kind in enumerate(kind for kind in COLOURS if kind in kinds)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#222">\n<rect width="{_WIDTH}" height="{height}" fill="white"/>\n{legend}\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _rectangle(kind: str, name: str, start: float, width: float, top: int) -> str:
    """One span; named where there is room."""
    x = _LABEL + start
    named = "" if kind in ("waiting", "bubble") else re.sub(r"^(all_reduce|all_to_all) ", "", name)
    text = (
        f'<text x="{x + width / 2:.1f}" y="{top + 14}" text-anchor="middle" font-size="9">{escape(named)}</text>'
        if named and width > 6 * len(named)
        else ""
    )
    return (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_LANE - 3}" fill="{COLOURS[kind]}" '
        f'stroke="white" stroke-width="0.5"><title>{escape(name)}</title></rect>{text}'
    )


# --- tables ---


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))


TENSOR = ("recompute", "communication / compute", "step / compute alone", "exposed",
          "all-reduces per layer and sub-batch", "peak memory, block inputs")  # fmt: skip
PIPELINE = ("micro-batches", "recompute", "bubble", "in flight, of a stage", "deferred W", "messages")
EXPERT = ("recompute", "step / compute alone", "exposed", "all-to-alls per block", "transfers of replicas per block")


def costs_of(schedule: Schedule, ratio: float) -> StackCosts:
    """Costs of tables and drawings: of a block F 1, R 1, B 1, W 1 for a batch; all-reduces by the ratio."""
    many = schedule.num_sub_batches
    seconds = {"F": 1.0, "R": 1.0, "B": 1.0, "W": 1.0, "all_reduce": 1.5 * ratio}
    costs = StackCosts.by_kind(schedule, {kind: value / many for kind, value in seconds.items()})
    size = BlockBytes(1000 // many, KEPT * 1000 // many)
    return StackCosts(costs.times, costs.collectives, (size,) * schedule.num_blocks)


def of_tensor(name: str, recompute: Recompute, blocks: int = BLOCKS) -> Schedule:
    """A tensor-parallel schedule of the tables."""
    return generate(name, blocks, 1 if name in WHOLE else SUB_BATCHES, recompute)


def tensor_row(name: str, recompute: Recompute, ratio: float) -> tuple[str, ...]:
    """Row of a tensor-parallel schedule."""
    schedule = of_tensor(name, recompute)
    found = simulate(schedule, costs_of(schedule, ratio))
    sums = sum(op.kind == "all_reduce" for op in schedule) / schedule.num_sub_batches / (schedule.num_blocks / 2)
    return (
        str(recompute), f"{ratio:g}", f"{found.total_seconds / found.busy(0, 'compute'):.2f}",
        f"{100 * found.exposed(0) / found.total_seconds:.0f} %", f"{sums:g}", f"{found.peak_bytes(0) / 1000:.1f}",
    )  # fmt: skip


def pipeline_row(name: str, micro_batches: int, recompute: bool) -> tuple[str, ...]:
    """Row of a pipeline."""
    schedule = generate_pipeline(name, STAGES, micro_batches, recompute)
    found = simulate(schedule, PASSES)
    stages = range(STAGES)
    bubble = sum(found.bubble(stage) for stage in stages) / STAGES / found.total_seconds
    held = max(in_flight(name, STAGES, micro_batches, stage) for stage in stages) / chunks_of(name)
    waiting = max(
        weights for stage in stages for _, weights in read_stage(name, STAGES, micro_batches, stage).held
    ) / chunks_of(name)  # fmt: skip
    sent = sum(op.kind == "send" for op in schedule) / micro_batches
    return str(micro_batches), schedule.recompute, f"{100 * bubble:.0f} %", f"{held:g}", f"{waiting:g}", f"{sent:g}"


def expert_row(name: str, recompute: bool) -> tuple[str, ...]:
    """Row of a schedule of experts."""
    schedule = generate_experts(name, BLOCKS, recompute)
    found = simulate(schedule, EXPERTS)
    counts = [
        sum(op.kind in kinds for op in schedule) / BLOCKS
        for kinds in (("all_to_all",), ("share", "join", "split", "return"))
    ]
    return (
        "full" if recompute else "none", f"{found.total_seconds / found.busy(0, 'compute'):.2f}",
        f"{100 * found.exposed(0) / found.total_seconds:.0f} %", *(f"{count:g}" for count in counts),
    )  # fmt: skip


# --- pages ---

_HOW = {
    "tensor": f"""
    Tables: {BLOCKS} blocks (4 layers) in {SUB_BATCHES} sub-batches, `sync` and `fine_grained` in one; no
    contention. F, R, W, and B without weight gradients, take one unit of time for a batch; communication takes as
    many times the compute of a step without recomputation as the table says, for 4 all-reduces per layer.
    *Exposed*: share of the step in which compute waits for an all-reduce. A block keeps activations of {KEPT} times
    its input for the backward pass. Each all-reduce carries the bytes of one activation of a sub-batch.""",
    "pipeline": f"""
    Tables: {STAGES} stages. F and R take one unit of time per micro-batch, B with weight gradients two, a message
    0.1. *Bubble*: share of the step in which a stage waits or has ended, mean of the stages. *In flight*:
    micro-batches whose activations the fullest stage holds; of several model parts per stage each counts its share.
    *Deferred W*: micro-batches whose weight gradients wait meanwhile. *Messages*: of one micro-batch, over all
    stages; each carries the bytes of one activation.""",
    "experts": f"""
    Tables: {BLOCKS} blocks. D and E take one unit of time, F and P 0.2, backward twice that, an all-to-all 0.5, a
    transfer of replicas' parameters or gradients 0.3. *Exposed*: share of the step in which compute waits for one
    of them. An all-to-all carries the bytes of a batch's tokens, `top_k` times; a transfer those of the replicas'
    parameters.""",
}
_INDEX = """
    Each schedule is a list of ops. These pages are made from the lists by the simulator, with round figures:
    predictions, not measurements, which are in the [benchmarks](../benchmarks/index.md). The letters are in the
    [glossary](../glossary.md). [Write a schedule](../howto/write-a-schedule.md) shows how to make your own. `python
    docs/schedules.py` writes these pages."""


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _about(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "").split("\n\nnum_micro_batches")[0]


def _page(name: str, about: str, rows: str) -> str:
    end = "[Ops](../glossary.md) · [what the table assumes](index.md) · written by `docs/schedules.py`"
    return f"# {name}\n\n{about}\n\n![Timeline of {name}]({name}.svg)\n\n{rows}\n\n{end}\n"


def tensor_pages(name: str) -> dict[str, str]:
    """Page and drawing of a tensor-parallel schedule."""
    drawn = []
    for recompute in ("none", "full"):
        schedule = of_tensor(name, recompute, 4)
        found = simulate(schedule, costs_of(schedule, 1.0))
        drawn.append(Timeline(f"{name}, recompute {recompute}: two layers", found.spans))
    rows = [tensor_row(name, recompute, ratio) for recompute in ("none", "full") for ratio in RATIOS]
    function = GENERATORS[name]
    level = re.search(r"_(\d)$", name)
    about = _about(getattr(function, "func", function)) + (f"\n\nThis is level {level[1]}." if level else "")
    page = _page(name, about, table(TENSOR, rows))
    return {f"{name}.md": page, f"{name}.svg": svg(drawn, links=True)}


def pipeline_pages(name: str) -> dict[str, str]:
    """Page and drawing of a pipeline."""
    early = name in EARLY
    found = simulate(generate_pipeline(name, STAGES, 8, early), PASSES)
    title = f"{name}: {STAGES} stages, 8 micro-batches" + (", recomputed" if early else "")
    drawn = Timeline(title, found.spans, who="stage")
    rows = [pipeline_row(name, many, recompute) for recompute in (False, True) for many in MICRO_BATCHES]
    page = _page(name, _about(PIPELINES[name]), table(PIPELINE, rows))
    return {f"{name}.md": page, f"{name}.svg": svg([drawn], links=False)}


def expert_pages(name: str) -> dict[str, str]:
    """Page and drawing of a schedule of experts."""
    found = simulate(generate_experts(name, 3), EXPERTS)
    drawn = Timeline(f"{name}: three blocks", found.spans)
    rows = [expert_row(name, recompute) for recompute in (False, True)]
    about = re.sub(r" \(\d\)$", "", _about(EXPERT_SCHEDULES[name]))
    page = _page(name, about, table(EXPERT, rows))
    return {f"{name}.md": page, f"{name}.svg": svg([drawn], links=True)}


def index() -> str:
    """The page that compares them."""
    tables: Mapping[str, str] = {
        "tensor": table(
            ("schedule", *TENSOR),
            [
                (_link(name), *tensor_row(name, recompute, 1.0))
                for recompute in ("none", "full")
                for name in GENERATORS
            ],
        ),
        "pipeline": table(
            ("schedule", *PIPELINE),
            [(_link(name), *pipeline_row(name, 8, recompute)) for recompute in (False, True) for name in PIPELINES],
        ),
        "experts": table(
            ("schedule", *EXPERT),
            [(_link(name), *expert_row(name, recompute)) for recompute in (False, True) for name in EXPERT_SCHEDULES],
        ),
    }
    sections = "\n\n".join(f"## {title}\n\n{_wrapped(_HOW[unit])}\n\n{tables[unit]}" for unit, title in UNITS.items())
    toctree = "```{toctree}\n:hidden:\n:glob:\n\n*\n```"
    return f"# Schedules\n\n{_wrapped(_INDEX)}\n\n{sections}\n\n{toctree}\n"


def _link(name: str) -> str:
    return f"[{name}]({name}.md)"


def pages() -> dict[str, str]:
    """Texts of all files of the folder, by name."""
    found = {"index.md": index()}
    for names, write in ((GENERATORS, tensor_pages), (PIPELINES, pipeline_pages), (EXPERT_SCHEDULES, expert_pages)):
        for name in names:
            found |= write(name)
    return found


def main() -> None:
    """Write or check the pages."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.*")}
    if "--check" in sys.argv:
        if wanted != there:
            raise SystemExit(
                f"{FOLDER.name} is not what python docs/schedules.py writes; run it and commit the pages"
            )
        return
    FOLDER.mkdir(exist_ok=True)
    for name in there.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
