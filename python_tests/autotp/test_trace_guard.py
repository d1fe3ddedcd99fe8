"""Traces: values that they read may change, and errors name the line of the author."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from autotp.comparison import CLOSE, said
from autotp.plain_models import ROWS, WIDTH, Block, Plain, apart, made, spec, tokens
from torch import nn

import oases
from oases.autotp.trace_guard import MOST_VALUES, TraceGuard

pytestmark = pytest.mark.usefixtures("shared_traces")

FACTOR = 1.0


@dataclasses.dataclass(frozen=True)
class Rates:
    factor: float = 1.0


def bent(x):
    return F.gelu(x)


class Scaled(Block):
    """Reads a factor from where a loop may change it."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.rates, self.more = Rates(), {"inner": [1.0], "of": F.gelu}

    def forward(self, x):
        factors = self.factor * self.rates.factor * self.more["inner"][0] * FACTOR
        return super().forward(x) * factors + bent(x)


def _of_object(model):
    for layer in model.layers:
        object.__setattr__(layer.rates, "factor", layer.rates.factor + 1)


def _of_items(model):
    for layer in model.layers:
        layer.more["inner"][0] += 1


CHANGES = {
    "object": _of_object,
    "items": _of_items,
    "class": lambda model: setattr(Scaled, "factor", 2.0),
    "global": lambda model: globals().update(FACTOR=2.0),
    "function": lambda model: globals().update(bent=F.relu),
    "method": lambda model: setattr(Scaled, "mlp", lambda self, x: self.down(F.relu(self.up(x)))),
}


def changed(way):
    before = globals()["FACTOR"], bent
    model, parallel = made(Plain, Scaled), made(Plain, Scaled)
    oases.parallelize(parallel, spec=spec())
    worst = apart(model, parallel, tokens())
    for each in (model, parallel):
        CHANGES[way](each)
    try:
        return max(worst, apart(model, parallel, tokens()))
    finally:
        globals().update(FACTOR=before[0], bent=before[1])
        Scaled.factor = 1.0
        if "mlp" in vars(Scaled):
            del Scaled.mlp


@pytest.mark.few(1, 3)
@pytest.mark.parametrize("way", CHANGES)
def test_what_a_trace_read_is_read_again(two_ranks, way):
    assert max(two_ranks.run(changed, way)) < CLOSE


class Numbered(Block):
    """Computes with its number where `when` holds."""

    def __init__(self, when, place=None):
        super().__init__()
        self.when, self.place = when, place

    def forward(self, x):
        y = super().forward(x)
        if self.when == "long":
            return y * 2 if x.shape[1] > 5 + self.place else y
        now = {"training": self.training, "no gradients": not torch.is_grad_enabled(), "double": x.element_size() > 4}
        return y * (1 + self.place) if now[self.when] else y


class Counted(Plain):
    def __init__(self, when):
        super().__init__(lambda: Numbered(when), layers=3)
        for place, layer in enumerate(self.layers):
            layer.place = place


def numbered(when):
    model, parallel = made(Counted, when), made(Counted, when)
    for each in (model, parallel):
        each.train(when != "training")
    oases.parallelize(parallel, spec=spec())
    worst = apart(model, parallel, tokens())
    for each in (model, parallel):
        each.train()
    if when == "no gradients":
        with torch.no_grad():
            return float((model(tokens()) - parallel(tokens())).abs().max())
    return max(worst, *(apart(model, parallel, tokens(length=length)) for length in (6, 7)))


@pytest.mark.few(1, 3)
@pytest.mark.parametrize("when", ["training", "long", "no gradients"])
def test_layers_that_compute_with_their_number_in_some_calls(two_ranks, when):
    assert max(two_ranks.run(numbered, when)) < CLOSE


class Looking(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(ROWS, WIDTH))

    def forward(self, x, index):
        return super().forward(x + self.rows[index])  # the author's line


class Indexed(Plain):
    def __init__(self):
        super().__init__(Looking)

    def forward(self, tokens):
        x = self.table(tokens % ROWS)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.head(x)


def told_of(schedule):
    parallel = made(Indexed)
    oases.parallelize(parallel, schedule=schedule, spec=spec())
    parallel(tokens())
    return said(lambda: parallel(tokens() + ROWS))


@pytest.mark.few(1, 2)
@pytest.mark.parametrize("schedule", ["oases", "layers"])
def test_an_error_of_a_layer_names_the_line_of_its_author(two_ranks, schedule):
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if "# the author's line" in text)
    for text in two_ranks.run(told_of, schedule):
        assert re.search(
            rf"test_trace_guard\.py:{line}, in forward: rank \d failed at .*index \d+ is out of", text
        ), text


class Deciding(Block):
    def forward(self, x):
        return super().forward(x) if self.training or x.sum() > 0 else x


def test_a_layer_that_cannot_be_traced_names_the_line_of_its_author(two_ranks):
    for text in two_ranks.run(said, decided):
        assert re.search(r"Deciding cannot be traced.*test_trace_guard\.py:\d+, in forward", text), text


def decided():
    parallel = made(Plain, Deciding)
    oases.parallelize(parallel, spec=spec())
    parallel.eval()(tokens())


def test_a_state_that_changes_in_every_step_is_told():
    """Each value of it is traced, which takes seconds."""
    layer = nn.Sequential(nn.Linear(2, 2))
    layer[0]._count = 0
    guard = TraceGuard(layer, "layers.1")
    read = 1, ("_count",)
    for number in range(MOST_VALUES):
        guard.note({read: layer[0]._count})
        layer[0]._count += 1
        assert not guard.holds({read: number})
    with pytest.raises(RuntimeError, match=r"layers\.1\.0\._count has had 17 values, now 16, .* outside of"):
        guard.note({read: layer[0]._count})
