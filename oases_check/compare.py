"""Comparison of ranks with one process: what differs first, by which factor, and which collective that suggests.

All functions are collectives of the default group, and return the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oases_check.case import Case
from oases_check.placement import Part
from oases_check.record import Key, Step

BOUNDS = {
    torch.float64: (1e-5, 1e-7), torch.float32: (2e-4, 4e-6), torch.float16: (2e-2, 1e-3),
    torch.bfloat16: (8e-2, 1e-2),
}  # fmt: skip
"""By type, the largest difference that is rounding: relative to the tensor's largest element, and to that of all."""


@dataclass(frozen=True)
class Finding:
    """What differs from one process.

    kind: loss, output, output gradient, weight, gradient, norm or update. name: of a parameter or module. difference:
    the largest, relative to the unsharded tensor's largest element. factor: relation to the right value. likely: the
    collective to look at, or "".
    """

    kind: str
    name: str
    step: int
    difference: float
    factor: str
    likely: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields by name; no number is infinite."""
        return asdict(self) | {"difference": self.difference if math.isfinite(self.difference) else None}


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run, tp innermost, as lines along its dimensions."""

    tp: int
    dp: int

    def lines(self) -> list[tuple[str, list[list[int]]]]:
        """Names of dimensions longer than 1, with their groups of ranks; then all ranks, where there are two."""
        found = []
        if self.tp > 1:
            found.append(("tp", [[dp * self.tp + tp for tp in range(self.tp)] for dp in range(self.dp)]))
        if self.dp > 1:
            found.append(("dp", [[dp * self.tp + tp for dp in range(self.dp)] for tp in range(self.tp)]))
        if len(found) > 1:
            found.append(("tp x dp", [list(range(self.tp * self.dp))]))
        return found


def everyone(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def distance(mine: Tensor, right: Tensor, scale: float, bounds: tuple[float, float]) -> float:
    """Largest difference over the largest element; 0 where it is rounding, inf for NaN. scale: largest of all."""
    if not right.numel():
        return 0.0
    apart = float((mine.double() - right.double()).abs().max())
    largest = float(right.double().abs().max())
    if math.isnan(apart):
        return 0.0 if torch.equal(mine.isnan(), right.isnan()) else math.inf
    return 0.0 if apart <= bounds[0] * largest + bounds[1] * scale else apart / (largest or scale or 1.0)


def outputs(
    case: Case, kind: str, number: int, mine: Mapping[Key, Tensor], right: Mapping[Key, Tensor],
    bounds: tuple[float, float],
) -> list[Finding]:  # fmt: skip
    """The first module whose output, or its gradient, is neither right, nor a shard of it, nor an addend.

    mine, right: in the order in which they were computed.
    """
    ranks = Ranks(case.tp, case.dp)
    held = everyone(set(mine))
    common = [key for key in right if all(key in each for each in held)]
    share, scale = (
        dist.get_rank() // case.tp,
        max((float(each.abs().max()) for each in right.values() if each.numel()), default=0.0),
    )

    def target(key: Key) -> Tensor:
        whole = right[key]
        if case.dp == 1 or not whole.dim() or whole.shape[0] % case.dp:
            return whole
        # The loss of a rank is the mean of its own samples.
        return whole.chunk(case.dp)[share] * (case.dp if kind == "output gradient" else 1)

    apart = {key: _apart(local(mine[key]), target(key), bounds, scale) for key in common}
    told = everyone(apart)
    for key in common:
        if not any(each[key] for each in told):
            continue
        values, targets = everyone(local(mine[key])), everyone(target(key))
        if not _is_shard_or_sum(values, targets, ranks, bounds, scale):
            factor, likely = Relation(values, targets, [key] * len(values), ranks, bounds[0]).told()
            call = f" (call {key[1] + 1})" if key[1] else ""
            return [Finding(kind, key[0] + call, number, max(each[key] for each in told), factor, likely)]
    return []


def local(value: Tensor) -> Tensor:
    """This rank's part of a module's output."""
    found: Any = value
    return found.to_local() if hasattr(found, "to_local") else value


def _apart(mine: Tensor, right: Tensor, bounds: tuple[float, float], scale: float) -> float:
    return distance(mine, right, scale, bounds) if mine.shape == right.shape else math.inf


def _is_shard_or_sum(
    values: Sequence[Tensor], targets: Sequence[Tensor], ranks: Ranks, bounds: tuple[float, float], scale: float
) -> bool:
    """Whether the ranks along tp hold shards of the right value, or addends of it.

    Of shards the lengths are compared: heads and fused features lie in another order on ranks, and a wrong one shows
    behind the sum that follows.
    """
    for first in range(0, len(values), ranks.tp):
        found, right = values[first : first + ranks.tp], targets[first]
        if found[0].dim() != right.dim():
            return False
        cut = [dim for dim, (a, b) in enumerate(zip(found[0].shape, right.shape, strict=True)) if a != b]
        if not cut:
            is_right = not _apart(torch.stack([each.double() for each in found]).sum(0), right, bounds, scale)
        else:
            is_right = len(cut) == 1 and sum(each.shape[cut[0]] for each in found) == right.shape[cut[0]]
        if not is_right:
            return False
    return True


class Relation:
    """How the ranks' values relate to the right ones. parts: what each rank holds; those of equal parts are equal.

    values, targets, parts: of all ranks, in order.
    """

    def __init__(
        self, values: Sequence[Tensor], targets: Sequence[Tensor], parts: Sequence[Any], ranks: Ranks, bound: float
    ) -> None:
        self._values, self._targets, self._parts, self._ranks = values, targets, parts, ranks
        self._bounds = (max(bound, 1e-4), 0.0)

    def told(self) -> tuple[str, str]:
        """(factor, likely collective)."""
        pairs = list(zip(self._values, self._targets, strict=True))
        if any(one.shape != other.shape for one, other in pairs):
            return f"shape {tuple(pairs[0][0].shape)} for {tuple(pairs[0][1].shape)}", ""
        for rank, (one, other) in enumerate(pairs):
            if not bool(one.isfinite().all()) and bool(other.isfinite().all()):
                return f"not finite on rank {rank}", ""
        return self._of_each() or self._of_sums() or self._of_direction()

    def _same(self, one: Tensor, other: Tensor) -> bool:
        return not distance(one, other, 0.0, self._bounds)

    def _common(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> float | None:
        """Factor by which all values are the targets; None where there is none."""
        factors = [_factor(one, other) for one, other in zip(values, targets, strict=True)]
        if max(factors) - min(factors) > 1e-3 * max(map(abs, factors)):
            return None
        scaled = zip(values, targets, factors, strict=True)
        return factors[0] if all(self._same(one, by * other.double()) for one, other, by in scaled) else None

    def _of_each(self) -> tuple[str, str] | None:
        """A factor of every rank's value, or ranks that are right."""
        if (factor := self._common(self._values, self._targets)) is not None:
            return _named(factor, self._ranks)
        right = [rank for rank, each in enumerate(self._values) if self._same(each, self._targets[rank])]
        if not right:
            return None
        zero = not any(bool(each.any()) for rank, each in enumerate(self._values) if rank not in right)
        text = f"right on rank {', '.join(map(str, right))} alone" + "; others hold 0" * zero
        return text, "a broadcast or an all-reduce that the other ranks lack"

    def _of_sums(self) -> tuple[str, str] | None:
        """A factor of the ranks' sum along a dimension."""
        for name, groups in self._ranks.lines():
            sums = [torch.stack([self._values[rank].double() for rank in group]).sum(0) for group in groups]
            factor = self._common(sums, [self._targets[group[0]] for group in groups])
            if factor is None or abs(factor) < 1e-6:
                continue
            for word, by in (("sum", 1.0), ("mean", float(len(groups[0])))):
                if math.isclose(factor, by, rel_tol=1e-3):
                    text = f"each rank holds its part: their {word} over {name} is right"
                    return text, f"an all-reduce ({word}) over {name} is missing"
            text = f"each rank holds its part: their sum over {name} is {factor:.4g} times the right value"
            return text, f"an all-reduce over {name} is missing"
        return None

    def _of_direction(self) -> tuple[str, str]:
        pairs = list(zip(self._values, self._targets, strict=True))
        alike = min(_cosine(one, other) for one, other in pairs)
        replicas = [each for part, each in zip(self._parts, self._values, strict=True) if part == self._parts[0]]
        if not all(self._same(each, replicas[0]) for each in replicas):
            return f"replicas differ; cosine {alike:.4f}", "an all-reduce is missing on a part of the way"
        about, likely = _named(sum(_factor(one, other) for one, other in pairs) / len(pairs), self._ranks, 0.05)
        if alike > 0.98 and likely:
            return f"about {about}; cosine {alike:.4f}", likely
        return f"{FOLLOWS}; cosine {alike:.4f}", ""


FOLLOWS = "no factor"
"""Beginning of the relation of what may follow from another fault."""


def _factor(one: Tensor, other: Tensor) -> float:
    square = float((other.double() ** 2).sum())
    return float((one.double() * other.double()).sum()) / square if square else 0.0


def _cosine(one: Tensor, other: Tensor) -> float:
    lengths = float(one.double().norm() * other.double().norm())
    return float((one.double() * other.double()).sum()) / lengths if lengths else 0.0


def _named(factor: float, ranks: Ranks, tolerance: float = 1e-3) -> tuple[str, str]:
    """A common factor in terms of the numbers of ranks, with the likely collective."""
    if abs(factor) < 1e-6:
        return "0 on all ranks", "it is not used, or its gradient is dropped"
    known: dict[str, tuple[float, str]] = {}
    for name, number in (("tp", ranks.tp), ("dp", ranks.dp)):
        if number > 1:
            known[f"{name} = {number}"] = (number, f"a sum over {name} too many, or one that should be a mean")
            known[f"1/{name} = 1/{number}"] = (
                1 / number, f"a sum over {name} is missing, or is a mean instead"
            )  # fmt: skip
            known[f"{name} squared"] = (number**2, f"two sums over {name} too many")
    fits = [(name, why) for name, (value, why) in known.items() if math.isclose(factor, value, rel_tol=tolerance)]
    if not fits:
        return f"{factor:.4g} times the right value", ""
    return f"times {' or '.join(name for name, _ in fits)}", "; or ".join(dict.fromkeys(why for _, why in fits))


def tensors(
    case: Case, kind: str, number: int, mine: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None],
    parts: Mapping[str, Part | None], bounds: tuple[float, float], skip: Callable[[str], bool] = lambda name: False,
) -> list[Finding]:  # fmt: skip
    """Parameters, gradients or updated weights that differ from one process's. parts: of those on this rank."""
    scale = max((float(each.abs().max()) for each in right.values() if each is not None and each.numel()), default=0)
    apart: dict[str, float] = {}
    for name, whole in right.items():
        part = parts.get(name)
        if part is None or skip(name):
            continue
        value = mine.get(name)
        if value is None or whole is None:
            other = value if whole is None else whole
            apart[name] = math.inf if other is not None and bool(other.any()) else 0.0
        else:
            target = part.of(whole) if value.shape != whole.shape else whole
            apart[name] = _apart_or_shape(value, target, scale, bounds)
    told = everyone({name: value for name, value in apart.items() if value})
    ranks, found = Ranks(case.tp, case.dp), []
    for name in [name for name in right if any(name in each for each in told)]:
        value, whole, part = mine.get(name), right[name], parts.get(name)
        held = everyone((value, part if part is not None and value is not None else None, name in parts))
        size = max(each.get(name, 0.0) for each in told)
        if whole is None:
            found.append(Finding(kind, name, number, size, "one process has none", "a gradient of nothing used"))
            continue
        if any(each[0] is None for each in held):
            none = [rank for rank, each in enumerate(held) if each[0] is None and each[2]]
            factor = f"none on rank {', '.join(map(str, none))}" if none else "on some ranks alone"
            found.append(Finding(kind, name, number, size, factor, "its gradient is dropped" if none else ""))
            continue
        values = [each[0] for each in held]
        targets = [whole if v.shape == whole.shape or p is None else p.of(whole) for v, p, _ in held]
        how = Relation(values, targets, [each[1] for each in held], ranks, bounds[0]).told()
        found.append(Finding(kind, name, number, size, *how))
    # Those near the loss first, and in front those whose factor tells what is wrong.
    found.reverse()
    return sorted(found, key=lambda each: each.factor.startswith(FOLLOWS))


def _apart_or_shape(value: Tensor, target: Tensor, scale: float, bounds: tuple[float, float]) -> float:
    return distance(value, target, scale, bounds) if value.shape == target.shape else math.inf


def norms(
    case: Case, number: int, mine: Step, right: Step, parts: Mapping[str, Part | None], bounds: tuple[float, float]
) -> list[Finding]:
    """The norm of gradients, where there is one on all ranks."""
    said = everyone((mine.norm, mine.error))
    found = [norm for norm, error in said if not error]
    if case.norm is None or len(found) < len(said):
        return []
    apart = max(abs(norm - right.norm) / (right.norm or 1.0) for norm in found)
    if apart <= max(bounds[0], 1e-6):
        return []
    of_parts, once, ranks = 0.0, 0.0, Ranks(case.tp, case.dp)
    for name, gradient in right.gradients.items():
        if gradient is not None and (part := parts.get(name)) is not None:
            of_parts += float(part.of(gradient).double().norm()) ** 2
            once += float(gradient.double().norm()) ** 2 * (ranks.tp if part.dim is None else 1)
    own = everyone(math.sqrt(of_parts))
    if all(math.isclose(norm, mine, rel_tol=1e-3) for norm, mine in zip(found, own, strict=True)):
        how = "each rank's is that of its own shards", "the all-reduce of squares over tp is missing"
    elif all(math.isclose(norm, math.sqrt(once), rel_tol=1e-3) for norm in found):
        how = "replicated gradients are counted once a rank", "the squares of replicated gradients are summed over tp"
    elif len({f"{norm:.4g}" for norm in found}) > 1:
        how = f"ranks differ: {', '.join(f'{norm:.4g}' for norm in found)} for {right.norm:.4g}", ""
    else:
        how = _named(found[0] / right.norm if right.norm else math.inf, ranks)
    return [Finding("norm", "of all gradients", number, apart, *how)]
