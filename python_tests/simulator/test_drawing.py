"""Pictures of timelines: every kind of span, every lane, memory, one scale."""

import pytest

from oases.planner import Plan, Predictor, Segment, Stage
from oases.plans.gpt import gpt
from oases.simulator.cluster import cluster_called
from oases.simulator.drawing import COLOURS, Section, draw_timelines, write_page
from oases.simulator.timeline import Held, Span, Timeline

SPANS = (
    Span(0, "compute", "F 0.0", 0.0, 0.1),
    Span(0, "compute", "wait F 0.0", 0.1, 0.3),
    Span(0, "node", "all_reduce F 0.0", 0.1, 0.3),
    Span(0, "cluster", "gradients 0.1", 0.2, 0.3),
    Span(1, "compute", "receive F 0.0", 0.0, 0.3),
    Span(1, "to the stage before", "send B 1.0", 0.3, 0.4),
)
HELD = (Held(0, 0.0, 2**30), Held(0, 0.1, 3 * 2**30), Held(1, 0.0, 2**29))
TIMELINE = Timeline("x", SPANS, HELD, "stage")


def names(figure):
    return [trace.name for trace in figure.data]


def bars(figure):
    return [trace for trace in figure.data if trace.type == "bar"]


@pytest.mark.parametrize(
    ("lane", "name", "kind"),
    [
        ("compute", "F 0.0", "forward"),
        ("compute", "micro-batch 3 segment 1 F 0.0", "forward"),
        ("compute", "segment 0 BC 2.1", "backward"),
        ("compute", "RC 0.0", "recompute"),
        ("compute", "W 0.0", "weight gradient"),
        ("compute", "wait micro-batch 3 segment 1 all_reduce F 0.0", "waiting"),
        ("compute", "receive F 0.0", "bubble"),
        ("compute", "micro-batch 0 head forward", "embedding and head"),
        ("compute", "optimizer 0", "optimizer"),
        ("compute", "segment 0 enter", "other"),
        ("link", "all_reduce F 0.0", "all-reduce"),
        ("link", "segment 0 reduce_scatter F 0.0", "all-reduce"),
        ("link", "gradients tp 1 bucket 0", "gradients"),
        ("link", "reshard head", "reshard"),
        ("link", "parameters 0", "parameters"),
        ("to the next stage", "send F 0.0", "send"),
    ],
)
def test_kinds(lane, name, kind):
    assert Span(0, lane, name, 0.0, 1.0).kind == kind
    assert kind in COLOURS


def test_every_span_is_drawn_in_its_lane_and_colour():
    figure = draw_timelines([TIMELINE])
    assert sum(len(trace.x) for trace in bars(figure)) == len(SPANS)
    assert {trace.name for trace in bars(figure)} == {
        "forward", "waiting", "bubble", "all-reduce", "gradients", "send",
    }  # fmt: skip
    assert all(trace.marker.color == COLOURS[trace.name] for trace in bars(figure))
    assert list(figure.layout.yaxis.categoryarray)[::-1] == [
        "stage 0 compute", "stage 0 link between nodes", "stage 0 link in its node", "stage 1 compute",
        "stage 1 to the stage before",
    ]  # fmt: skip


def test_memory_is_a_panel_below_with_the_capacity():
    figure = draw_timelines([TIMELINE], capacity=4 * 2**30)
    lines = [trace for trace in figure.data if trace.type == "scatter"]
    assert [trace.name for trace in lines] == ["stage 0", "stage 1"]
    assert list(lines[0].y) == [1.0, 3.0, 3.0]
    assert list(lines[0].x) == [0.0, 100.0, 400.0], "milliseconds, up to the end of the step"
    assert figure.layout.shapes[0].y0 == 4
    assert figure.layout.yaxis2.title.text == "GiB"
    assert not [trace for trace in draw_timelines([Timeline("x", SPANS)]).data if trace.type == "scatter"]


def test_long_steps_are_drawn_in_seconds_and_names_stand_once_in_the_legend():
    long = Timeline("y", (Span(0, "compute", "F 0.0", 0.0, 20.0),))
    figure = draw_timelines([TIMELINE, long])
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range == figure.layout.xaxis3.range == (0, 20.0)
    assert figure.layout.xaxis3.title.text == "seconds"
    shown = [trace.name for trace in figure.data if trace.showlegend]
    assert len(shown) == len(set(shown))


def test_a_predicted_step_can_be_drawn(tmp_path):
    hardware, world = cluster_called("4x3090")
    model = gpt(hidden=64, layers=2, heads=4, sequence=32, vocabulary=256, name="<small>")
    half = Stage((Segment(2, 2, "oases"),))
    timeline = Predictor(hardware).timeline(Plan(model, world, 4, 16, 4, (half, half)), every_op=True)
    assert timeline.who == "stage"
    figure = draw_timelines([timeline])
    assert sum(len(trace.x) for trace in bars(figure)) == len(timeline.spans)
    path = tmp_path / "page.html"
    section = Section("heading & more", "text", figure)
    write_page(path, title="<small>", subtitle="s", header=("a",), rows=[("<b>",)], sections=[section])
    page = path.read_text()
    assert "&lt;b&gt;" in page
    assert "heading &amp; more" in page
    assert "<small>" not in page.split("<script>")[0]
