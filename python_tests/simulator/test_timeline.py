import json

import pytest

from oases.simulator.drawing import draw_curves, draw_timelines
from oases.simulator.timeline import from_measurements, trace_json

COMPUTE = [("F 0.0", 10.0, 10.2), ("wait F 0.0", 10.2, 10.5), ("B 0.0", 10.5, 11.0)]
LINK = [("F 0.0", 10.2, 10.4), ("B 0.0", 10.3, 10.8)]


@pytest.fixture
def timeline():
    shifted = [(op, start + 0.1, end + 0.1) for op, start, end in COMPUTE]
    return from_measurements("x", [(COMPUTE, LINK), (shifted, LINK)])


def test_times_count_from_the_first_span_of_any_rank(timeline):
    assert timeline.spans[0].start == 0
    assert timeline.total_seconds == pytest.approx(1.1)


def test_a_link_carries_one_collective_after_another(timeline):
    first, second = [s for s in timeline.spans if (s.rank, s.lane) == (0, "link")]
    assert second.start == pytest.approx(first.end)
    assert timeline.busy(0, "link") == pytest.approx(0.6)


def test_waiting_is_not_busy(timeline):
    assert timeline.busy(0, "compute") == pytest.approx(0.7)
    assert [span.kind for span in timeline.spans[:3]] == ["forward", "waiting", "backward"]


def test_text(timeline):
    lines = timeline.text(columns=11).splitlines()
    assert lines[0] == "x: 1100 ms"
    assert lines[1].startswith("rank 0 compute |FF...BBBBB")
    assert len(lines) == 5


def test_trace_opens_as_chrome_events(timeline):
    events = json.loads(trace_json([timeline, timeline]))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * len(timeline.spans)
    assert {event["pid"] for event in spans} == {0, 1, 100_000, 100_001}
    assert spans[0] | {"dur": 0} == {
        "ph": "X", "pid": 0, "tid": 0, "name": "F 0.0", "cat": "forward", "ts": 0.0, "dur": 0,
    }  # fmt: skip


def test_drawings_share_one_time_scale(timeline):
    figure = draw_timelines([timeline, timeline])
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    assert sum(len(trace.x) for trace in figure.data) == 2 * len(timeline.spans)
    curves = draw_curves({"a": [3.0, 2.0], "b": [3.0, 2.0]}, x="step", y="loss")
    assert [trace.name for trace in curves.data] == ["a", "b"]
