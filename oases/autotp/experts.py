"""Expert modules of mixture-of-experts models, recognised by their weights and results, not by their names.

An expert module has weights stacked along their first dimension, [E, ...], and is called with tokens [T, hidden], the
experts of each token [T, k] and their weights [T, k]. Routing stays the model's own. The function of the experts is
found by calling the module with small random weights and comparing with known MLPs. While a layer is traced, one op
represents the module, because its forward depends on data.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oases.autotp.trace_guard import attributes_of
from oases.moe.experts import ExpertWeights, compute, middle_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class Clamp:
    """Gate and up projection clamped to at most `limit`, the latter to at least -`limit`, too.

    alpha: the gate is (up + 1) * gate * sigmoid(alpha * gate), as GPT-OSS's; None: activation(gate) * up. alternate:
    rows of gate and up alternate.
    """

    limit: float
    alpha: float | None = None
    alternate: bool = False


@dataclass(frozen=True)
class ExpertMlp:
    """Function of one expert: down(activation(gate(x)) * up(x)), or down(activation(up(x))).

    up: name of the parameter [E, i or 2 i, hidden], the gate's rows first. down: name of the parameter [E, hidden,
    i]. transposed: they are [E, hidden, i or 2 i] and [E, i, hidden]. up_bias, down_bias: names, "" for none.
    """

    up: str
    down: str
    gated: bool
    activation: str
    transposed: bool = False
    up_bias: str = ""
    down_bias: str = ""
    clamped: Clamp | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of `ExpertWeights`."""
        return tuple(name for name in (self.up, self.down, self.up_bias, self.down_bias) if name)

    def weights(self, given: Sequence[Tensor]) -> ExpertWeights:
        """The parameters named by `names`."""
        left = iter(given)
        up, down = next(left), next(left)
        return ExpertWeights(up, down, *(next(left) if name else None for name in (self.up_bias, self.down_bias)))

    def run(self, rows: Tensor, counts: Sequence[int], weights: ExpertWeights) -> Tensor:
        """Run rows through their experts, as `oases.moe.experts.compute`."""
        middle = self._middle if self.clamped else middle_of(self.gated, ACTIVATIONS[self.activation])
        return compute(rows, counts, weights, middle, transposed=self.transposed)

    def _middle(self, rows: Tensor) -> Tensor:
        assert self.clamped is not None
        limit, alpha = self.clamped.limit, self.clamped.alpha
        gate, up = (rows[..., ::2], rows[..., 1::2]) if self.clamped.alternate else rows.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if alpha is None:
            return ACTIVATIONS[self.activation](gate) * up
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@dataclass(frozen=True)
class ExpertCollection:
    """Expert module of a layer. names: its parameters, in the order in which the op takes them.

    mlp: None where the function was not recognised. whole: reason why the experts are replicated, or "" where they
    are sharded over the ranks. balanced: tokens are sent to the experts, instead of results summed.
    """

    number: int
    names: tuple[str, ...]
    mlp: ExpertMlp | None
    whole: str
    balanced: bool = False


def substitute_experts(model: nn.Module, ranks: int, *, balanced: bool = False) -> None:
    """Have every expert module of a traced copy call the op `oases::experts`.

    model: made by `twin_of`. ranks: number of ranks to shard the experts over. balanced: see `ExpertCollection`.
    """
    known: dict[Any, ExpertCollection] = {}
    for module in list(model.modules()):
        stacked = _stacked(module)
        if not stacked or len({len(each) for each in stacked.values()}) != 1:
            continue
        look: tuple[Any, ...] = (type(module), *(tuple(each.shape) for each in stacked.values()),
                attributes_of(module),
                *(repr(child) for child in module.children()))  # fmt: skip
        if look not in known:
            found, number, whole = _recognise(module, stacked), len(next(iter(stacked.values()))), ""
            if found is None:
                whole = "the function of its experts is not a known MLP"
            elif number % ranks:
                whole = f"{ranks} ranks do not divide its {number} experts"
            names = tuple(name for name, _ in module.named_parameters()) if found is None else found.names
            known[look] = ExpertCollection(number, names, found, whole, balanced)
        object.__setattr__(module, "_collection", known[look])
        module.__class__ = _substitute_class(type(module))  # type: ignore[arg-type]


def collections(model: nn.Module) -> Iterator[tuple[str, ExpertCollection]]:
    """(name, ExpertCollection) of every expert module that `substitute_experts` has found."""
    for name, module in model.named_modules():
        found = vars(module).get("_collection")
        if found is not None:
            yield name, found


def replicate_experts(layer: nn.Module, kept: Container[str]) -> None:
    """Replicate the experts of each collection in a layer that has a parameter named in `kept`."""
    for path, known in collections(layer):
        names = [name for name in known.names if f"{path}.{name}".lstrip(".") in kept]
        if names and not known.whole:
            why = f"{', '.join(names)} is replicated by request, or read by code outside of the layer"
            object.__setattr__(layer.get_submodule(path), "_collection", replace(known, whole=why))


def original_module(module: nn.Module) -> nn.Module:
    """Copy of a substituted module with the model's own forward; it shares the parameters."""
    own = copy.copy(module)
    own._parameters = dict(module._parameters)
    own.__class__ = type(module).__mro__[1]
    return own


def _stacked(module: nn.Module) -> dict[str, Tensor]:
    """Parameters of a module if it has no submodule parameters and at least two stacked matrices; else {}."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    own = all("." not in name and each.dim() >= 2 for name, each in found.items())
    return found if own and sum(each.dim() == 3 for each in found.values()) >= 2 else {}


@cache
def _substitute_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass of `kind` whose expert calls use the op; other calls are the original's."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if len(given) != 3 or not _is_call(*given):
            return kind.forward(self, *args, **kwargs)
        parameters = [self.get_parameter(name) for name in self._collection.names]
        return torch.ops.oases.experts(*given, parameters)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _is_call(x: Any, index: Any, weights: Any) -> bool:
    """Whether the arguments are tokens, expert indices and weights."""
    if not all(isinstance(each, Tensor) and each.dim() == 2 for each in (x, index, weights)):
        return False
    floats = x.is_floating_point() and weights.is_floating_point()
    return floats and not index.is_floating_point() and index.shape == weights.shape and len(index) == len(x)


def _recognise(module: nn.Module, stacked: dict[str, Tensor]) -> ExpertMlp | None:
    """The known MLP that gives the same results as the module's forward, or None."""
    number = len(next(iter(stacked.values())))
    return next(
        (
            each
            for each in _candidates(module, stacked)
            if all(_computes(module, number, each, scale) for scale in _SCALES)
        ),
        None,
    )


def _candidates(module: nn.Module, stacked: dict[str, Tensor]) -> Iterator[ExpertMlp]:
    """MLPs whose parameters have the shapes of the module's."""
    matrices = [name for name, each in stacked.items() if each.dim() == 3]
    biases = [name for name in stacked if name not in matrices]
    if len(matrices) != 2 or len(biases) not in (0, 2) or any(stacked[name].dim() != 2 for name in biases):
        return
    limits, alphas = (
        {each for name in names if isinstance(each := getattr(module, name, None), float)}
        for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"))
    )
    for (up, down), transposed, gated in itertools.product(
        itertools.permutations(matrices), (False, True), (True, False)
    ):
        first, second = stacked[up].shape[1:], stacked[down].shape[1:]
        (wide, hidden), other = (first[::-1], second[::-1]) if transposed else (first, second)
        if tuple(other) != (hidden, wide // 2 if gated else wide) or (gated and wide % 2):
            continue
        for one, two in itertools.permutations(biases) if biases else [("", "")]:
            if biases and (stacked[one].shape[1], stacked[two].shape[1]) != (wide, hidden):
                continue
            for activation in ACTIVATIONS:
                yield ExpertMlp(up, down, gated, activation, transposed, one, two)
                for limit in limits if gated else ():
                    yield ExpertMlp(up, down, gated, activation, transposed, one, two, Clamp(limit))
            for limit, alpha, alternate in itertools.product(limits if gated else (), alphas, (False, True)):
                clamp = Clamp(limit, alpha, alternate)
                yield ExpertMlp(up, down, gated, "silu", transposed, one, two, clamp)


_TOKENS, _HIDDEN, _INNER, _CHOICES = 6, 8, 4, 2
"""Sizes of the trial call. Grouped matmuls need widths that are multiples of 16 bytes in float32."""
_SCALES = (1.0, 30.0, 1000.0)
"""Sizes of what the activation is given there: clamps begin somewhere."""


def _computes(module: nn.Module, number: int, mlp: ExpertMlp, scale: float) -> bool:
    """Whether a copy of the module with small random weights computes the MLP, on a few tokens."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    wide = 2 * _INNER if mlp.gated else _INNER
    shapes = [(number, wide, _HIDDEN), (number, _HIDDEN, _INNER)]
    tensors = [drawn(a, c, b) if mlp.transposed else drawn(a, b, c) for a, b, c in shapes]
    tensors[0] *= scale
    tensors += [drawn(number, width) for name, width in ((mlp.up_bias, wide), (mlp.down_bias, _HIDDEN)) if name]
    small = dict(zip(mlp.names, map(nn.Parameter, tensors), strict=True))
    x, choices = drawn(_TOKENS, _HIDDEN), min(_CHOICES, number)
    index = torch.stack([torch.randperm(number, generator=generator)[:choices] for _ in range(_TOKENS)])
    weights = drawn(_TOKENS, choices).exp()  # whose sums are not 1
    expected = torch.zeros_like(x)
    for token, slot in itertools.product(range(_TOKENS), range(choices)):
        one = int(index[token, slot])
        row = mlp.run(x[token : token + 1], [1], mlp.weights([each[one : one + 1] for each in tensors]))
        expected[token] += weights[token, slot] * row[0]
    copied = copy.deepcopy(module, {id(getattr(module, name)): each for name, each in small.items()})
    for training in (True, False):
        try:
            with torch.no_grad():
                got = copied.train(training)(x, index, weights)
        except Exception:  # a model's forward may raise anything; then it is not this MLP
            return False
        if not isinstance(got, Tensor) or got.shape != x.shape:
            return False
        if not torch.allclose(got, expected, 1e-4, 1e-5 * max(1.0, expected.abs().max().item())):
            return False
    return True


@torch.library.custom_op("oases::experts", mutates_args=())
def experts(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor]) -> Tensor:
    """Placeholder op of an expert module in a layer's graph."""
    raise AssertionError("a placeholder that was not replaced")


@experts.register_fake
def _(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor]) -> Tensor:
    return torch.empty_like(x)
