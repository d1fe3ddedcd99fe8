"""Loops over layers as authors write them: what is called when, on what, and who else reads it; loops within them."""

import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from autotp.comparison import ACROSS, CLOSE, INSIDE, WHOLE, said
from autotp.plain_models import (
    WIDTH,
    Block,
    Plain,
    beside_itself,
    made,
    spec,
    tokens,
)  # fmt: skip
from torch import nn

import oases
from oases.autotp import as_run, signatures
from oases.autotp.export import UnsplittableError, export, twin_of, without_data

pytestmark = pytest.mark.usefixtures("shared_traces")


class Loop(Plain):
    """A loop over the layers in one of many ways. Layers differ in what no shape shows."""

    def __init__(self, way):
        super().__init__({"reads two": TwoInputs, "first again": TwoInputs, "keywords": Keywords, "sets": Sets,
                          "functions": Functions, "places": Functions, "constants": Functions}.get(way, Block),
                         layers=3)  # fmt: skip
        self.way = way
        for place, layer in enumerate(self.layers):
            if way == "places":
                layer.place = place
            if way == "constants":
                layer.factor = torch.tensor(1.0 + place).double()
        first = self.layers[0]
        if way == "functions":
            self.layers[1].function = F.relu
        elif way == "shared":
            self.layers = nn.ModuleList([first] * 3)
        elif way == "tied":
            for layer in self.layers[1:]:
                layer.up.weight, layer.attn.qkv.weight = first.up.weight, first.attn.qkv.weight
                layer.norm.weight = first.norm.weight
        elif way == "tied outside":
            self.extra = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.extra.weight = first.up.weight
        elif way == "reversed":  # not alike, so a mistake in the order would show
            first.up, first.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, tokens):
        x = first = self.table(tokens)
        way, layers, seen = self.way, list(self.layers), [x, x]
        layers = {"twice": layers * 2, "reversed": layers[::-1], "skips": layers[::2]}.get(way, layers)
        for layer in layers:
            given = x * 0.9 if way == "code between" else x
            other = {"reads two": seen[-2], "first again": first}.get(way)
            if way == "keywords":
                x = layer(torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype), hidden=given)["hidden"]
            else:
                x = layer(given) if other is None else layer(given, other)
            seen.append(x)
        if way == "all results":
            x = sum(seen)
        if way == "returned":
            return self.head(x), seen
        if way == "part of a layer":
            x = x + self.layers[0].attn(first)
        if way == "weights":
            x = x * sum(layer.up.weight.norm() for layer in self.layers)
        if way == "tied outside":
            x = x * self.extra(first).mean(-1, keepdim=True)
        if way == "sets":
            x = x + sum(layer.found for layer in self.layers)
        return F.linear(x, self.table.weight) if way == "table" else self.head(x)


class TwoInputs(Block):
    def forward(self, x, y):
        return super().forward(x) + 0.1 * y


class Keywords(Block):
    def forward(self, mask, *, hidden):
        return {"hidden": super().forward(hidden, mask), "flag": 3}


class Sets(Block):
    def __init__(self):
        super().__init__()
        self.found = 0

    def forward(self, x):
        self.found = x.mean()
        return super().forward(x)


class Functions(Block):
    def __init__(self):
        super().__init__()
        self.function, self.factor, self.place = F.gelu, 1.0, 0

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        x = x + self.down(self.function(self.up(self.norm2(x)))) * self.factor
        return x * 2 if self.place % 2 else x


WAYS = {
    "plain": (ACROSS, ""),
    "keywords": (ACROSS, ""),
    "first again": (ACROSS, ""),
    "functions": (ACROSS, ""),
    "places": (ACROSS, ""),
    "constants": (ACROSS, ""),
    "tied": (ACROSS, ""),
    "tied outside": (ACROSS, ""),
    "part of a layer": (ACROSS, ""),
    "weights": (ACROSS, ""),
    "table": (ACROSS, ""),
    "shared": (INSIDE, "more than once"),
    "twice": (INSIDE, "more than once"),
    "reversed": (INSIDE, "not every layer is called, in order"),
    "skips": (INSIDE, "not every layer is called, in order"),
    "code between": (INSIDE, "read by other code"),
    "all results": (INSIDE, "read by other code"),
    "returned": (INSIDE, "read by other code"),
    "reads two": (INSIDE, "several layers before"),
    "sets": (WHOLE, "Sets sets found in its forward"),
}


def looped(way):
    return beside_itself(Loop, (way,))


SLOW = {"first again", "places", "constants", "twice", "reversed", "all results", "returned"}
"""Found by the same rules as others, which the rest of the ways show."""


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] if way in SLOW else []) for way in WAYS])
def test_loops_over_layers(two_ranks, way):
    runs, reason = WAYS[way]
    for worst, report in two_ranks.run(looped, way):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == runs
        assert reason in report["layers"][0]["reason"]
        assert bool(report["layers"][0]["reason"]) == bool(reason)
        if way in ("weights", "tied outside"):  # who reads a weight by itself needs all of it
            assert "up.weight" in report["layers"][0]["replicated"]
        if way == "part of a layer":
            assert "attn.qkv.weight" in report["layers"][0]["replicated"]
        if way == "table":
            assert report["vocabulary"] == []
            assert "table.weight is read outside" in report["notes"][0]


class Keeps(Block):
    def forward(self, x, kept):
        self._kept = x.mean()
        return super().forward(x)


class Appends(Block):
    def forward(self, x, kept):
        kept.append(x.mean())
        return super().forward(x)


class Fills(Block):
    def forward(self, x, *, kept):
        kept[len(kept)] = x.mean()
        return super().forward(x)


class Beside(Plain):
    """Layers whose result is not all that they compute."""

    def forward(self, tokens):
        x, kept = self.table(tokens), {}
        if isinstance(self.layers[0], Fills):
            for layer in self.layers:
                x = layer(x, kept=kept)
            kept = kept.values()
        else:
            kept = []
            for layer in self.layers:
                x = layer(x, kept if isinstance(layer, Appends) else None)
            kept = kept or [layer._kept for layer in self.layers]
        return self.head(x + sum(kept))


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "what"), [(Keeps, "_kept"), (Appends, "items of argument 1"), (Fills, "items of kept")]
)
def test_layers_that_keep_values_beside_their_result(two_ranks, kind, what):
    for worst, report in two_ranks.run(beside_itself, Beside, (kind,)):
        assert worst < CLOSE
        assert report["layers"][0]["runs"] == WHOLE
        assert report["layers"][0]["reason"] == f"{kind.__name__} sets {what} in its forward"


class Counts(Block):
    """Changes itself, or an argument, in calls of other forms than the first."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, kept=None):
        self.calls += not self.training
        if kept is not None:
            kept.append(1)
        return super().forward(x)


@pytest.mark.parametrize(("training", "args", "what"), [(False, (), "calls"), (True, ([],), "items of argument 1")])
def test_layers_that_begin_to_keep_values_are_refused(training, args, what):
    layer, x = twin_of(Counts().train(training)), without_data(torch.randn(3, 5, WIDTH))
    with pytest.raises(UnsplittableError, match=f"^Counts sets {what} in its forward$"):
        export(layer, (x, *args), {})


class Recurrent(Block):
    """A layer with a loop over tokens, of three calls for each."""

    def forward(self, x):
        total, rows = 0, []
        for row in x.unbind(1):
            total = total * 0.5 + row
            rows.append(total.tanh())
        return super().forward(torch.stack(rows, 1))


def too_long(most):
    """Difference from the plain model, report, number of traces, error where overlap is required, and warnings."""
    with (
        mock.patch.object(as_run, "MOST_CALLS", most),
        mock.patch.object(signatures, "export", wraps=signatures.export) as traces,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        worst, report = beside_itself(Plain, (Recurrent,))
        traced = traces.call_count
        required = said(lambda: oases.parallelize(made(Plain, Recurrent), spec=spec(), require_overlap=True))
    return worst, report["layers"][0], traced, required, [str(each.message) for each in told]


def test_layers_that_are_too_long_to_trace_stay_whole(two_ranks):
    why = "Recurrent calls more than 30 functions of torch, whose trace would take a minute or more: "
    for rank, (worst, layers, traced, required, told) in enumerate(two_ranks.run(too_long, 30)):
        assert worst < CLOSE
        assert (layers["runs"], traced) == (WHOLE, 1)
        assert layers["reason"].startswith(why)
        assert required.startswith("OverlapError: require_overlap: these layers are replicated")
        assert f"layers (2 layers, 80% of the parameters): {why}" in required
        assert "make the loop one op by torch.library.custom_op" in required
        assert len([text for text in told if why in text]) == (rank == 0)


class Growing(Recurrent):
    """The same, whose traces are not those of the test above."""


def longer_later():
    model = oases.parallelize(made(Plain, Growing), spec=spec())
    model(tokens())
    with (
        mock.patch.object(as_run, "MOST_CALLS", 60),
        mock.patch.object(signatures, "export", wraps=signatures.export) as traces,
    ):
        return said(lambda: model(tokens(length=20))), traces.call_count


@pytest.mark.long
def test_a_call_that_makes_a_layer_too_long_is_an_error_with_the_remedy(two_ranks):
    for text, traced in two_ranks.run(longer_later):
        assert text.startswith("UsageError: Growing calls more than 60 functions of torch")
        assert "spec=ParallelSpec(inputs=...): layers that cannot be sharded with them then stay whole" in text
        assert traced == 1  # no other lengths are tried
