"""`S2Reducer`: mean over ranks of gradients with few non-zero rows.

After S2 Reducer (arXiv 2110.02140): a bitmap marks the used rows, and only these are sent, compressed to a count
sketch. Two exact modes are added: `packed` sends the used rows uncompressed, and `gather` sends every rank's rows to
every rank, which is cheapest for few ranks with different rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from oases.core.execution.group import all_gather_objects
from oases.errors import UsageError
from oases.reporting import register
from oases_sparse.costs import Costs, measure
from oases_sparse.exchange import MODES, Exchange, ReducerSettings, Steps, TensorState
from oases_sparse.gradient import Form, is_marked, rows_of
from oases_sparse.wire import Account, Reduction, Report, Wire

SKETCH_ROWS = (1, 3, 5)


class S2Reducer:
    """Averages sparse gradients over the ranks of a process group (None: the default group).

    mode: "dense", "packed", "gather" (all exact), "sketch" (lossy) or "auto", which chooses for each tensor and step
    by bytes and by link and kernel speeds measured at the first gradient: among the exact modes, and sketch where
    cells_per_nonzero is given. rows: of the sketch, 1, 3 or 5. cells_per_nonzero: cells of the whole sketch for each
    number in rows that any rank uses, above 0 (None: 0.25); from 1 on packed sends less without loss. error_feedback:
    add the sketch's error to the gradient of the next step that uses the same row; costs a float32 copy of the
    parameter. seed: of the hash functions, equal on all ranks; each step derives its own. measure_error: also send
    every gradient dense, to measure the error.

    Every rank of the group must create one at the same point, with the same arguments, and reduce the same tensors in
    the same order. `last` is the cost of the last reduction, `report()` the sums. ValueError for arguments out of
    range.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, mode: str = "auto", rows: int = 3,
        cells_per_nonzero: float | None = None, error_feedback: bool = True, seed: int = 0,
        measure_error: bool = False,
    ) -> None:  # fmt: skip
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if rows not in SKETCH_ROWS:
            raise ValueError(f"rows must be 1, 3 or 5, got {rows}")
        if cells_per_nonzero is not None and not 0 < cells_per_nonzero < float("inf"):
            raise ValueError(
                f"cells_per_nonzero must be above 0, got {cells_per_nonzero}; None takes the default, and 1 is as "
                "much as packed sends"
            )
        self.settings = ReducerSettings(mode, rows, cells_per_nonzero, error_feedback, seed)
        self.measure_error = measure_error
        self.wire = Wire(process_group)
        self.last: Reduction | None = None
        self.costs: Costs | None = None
        """Measured costs for "auto"."""
        self._named: dict[str, TensorState] = {}
        self._of_parameters: Any = WeakTensorKeyDictionary()
        self._names: Any = WeakTensorKeyDictionary()
        self._accounts: dict[str, Account] = {}
        self._numbered = 0
        self.jobs: Any = None
        """Queue of the hook's thread, from the first bucket on."""
        self.last_bucket: int | None = None
        """Number of the hook's last bucket."""
        register(self)

    def all_reduce(self, gradient: Tensor | None, *, name: str = "gradient", like: Tensor | None = None) -> Tensor:
        """Mean of the ranks' gradients, stored like the given one, which is not changed.

        gradient: dense [rows, ...], or sparse COO with one sparse dimension, of a float dtype. None: zero, of the
        shape and dtype of `like`, and the layout of the other ranks' or of the name's first gradients. name:
        identifies the tensor where several use one reducer; key of its error feedback. Waits for the result.
        UsageError, on all ranks, where one gives what cannot be reduced or has another shape or dtype than the name
        had before, or where they first use a name for gradients of other shapes, dtypes or layouts.
        """
        memory = self._named.get(name)
        form = None if memory is None else memory.form
        refusal = ""
        try:
            mine = Form.of(gradient, like)
            if form is not None:
                _require_unchanged(form, mine)
        except ValueError as error:
            mine, refusal = None, str(error)
        if form is None:
            form = self._agreed(name, mine, refusal)
        if memory is None:
            memory = self._named[name] = self._new_memory(name)
        memory.form = None if form.layout is None else form
        shown = like if gradient is None else gradient
        if shown is not None and not refusal:
            memory.device = shown.device
        if refusal or gradient is None:
            # The others cannot know of a refusal before they send. So it goes with what is sent anyway, as a NaN.
            gradient = form.zeros(memory.device, marked=bool(refusal))
        steps, exchange = self.begin(gradient.detach(), memory)
        for _ in range(2):
            next(steps)
        mean = self.end(steps, exchange)
        if gradient.device.type != "cpu":
            torch.accelerator.current_stream(gradient.device).synchronize()
        if is_marked(mean) or not form.shape.numel():  # of no numbers, none is sent
            self._agreed(name, None if refusal else form, refusal)
        return mean

    def _agreed(self, name: str, mine: Form | None, refusal: str) -> Form:
        """Form of all ranks' gradients. Collective; UsageError, on all ranks, for a refusal or different forms."""
        caller = f"S2Reducer.all_reduce({name!r})"
        forms = []
        for rank, (form, why) in enumerate(all_gather_objects((mine, refusal), self.wire.group)):
            if form is None:
                raise UsageError(f"{caller} on rank {rank}: {why}")
            forms.append(form)
        agreed: list[Any] = []
        for field, values in zip(Form._fields, zip(*forms, strict=True), strict=True):
            ranks = {value: rank for rank, value in enumerate(values) if value is not None}
            if len(ranks) > 1:
                said = ", ".join(f"{value} on rank {rank}" for value, rank in ranks.items())
                raise UsageError(
                    f"{caller}: the {field} of the gradient differs between ranks of one group: {said}; make the "
                    "same calls on all of them"
                )
            agreed.append(next(iter(ranks), None))
        return Form(*agreed)

    def prepare(self, device: torch.device) -> None:
        """Measure the costs for "auto", once. Collective; no other collective may be pending."""
        if self.settings.mode == "auto" and self.costs is None and self.wire.world > 1:
            self.costs = measure(self.wire, device, self.settings.rows)

    def begin(
        self, gradient: Tensor, memory: TensorState, *, in_place: bool = False, if_sparse: bool = False
    ) -> tuple[Steps, Exchange]:
        """Generator of one gradient's reduction, not started; see `Exchange`."""
        self.prepare(gradient.device)
        rows = rows_of(gradient, in_place)
        exchange = Exchange(self.wire, self.settings, self.costs, rows, memory, if_sparse=if_sparse)
        return self._with_error(exchange) if self.measure_error else exchange.steps(), exchange

    def _with_error(self, exchange: Exchange) -> Steps:
        """The same generator, which also measures the error of the result."""
        exact = exchange.rows.dense().clone().double()
        self.wire.sum(exact, Reduction("", "")).wait()
        exact /= self.wire.world
        mean = yield from exchange.steps()
        found = (mean.to_dense() if mean.is_sparse else mean).reshape(exact.shape).double()
        scale = float(exact.norm())
        exchange.found.error = float((found - exact).norm()) / scale if scale else float(found.norm())
        return mean

    def end(self, steps: Steps, exchange: Exchange) -> Tensor:
        """Advance the generator to its end, record the cost, and return the mean."""
        try:
            next(steps)
        except StopIteration as ended:
            mean: Tensor = ended.value
        else:
            raise AssertionError("steps pause twice")
        self.last = exchange.found
        self.book(exchange.found)
        return mean

    def book(self, found: Reduction) -> None:
        """Add a reduction to its tensor's account."""
        self._accounts.setdefault(found.name, Account(found.name)).add(found)

    def memory_of(self, parameter: Tensor) -> TensorState:
        """State of a parameter, for the hook."""
        if parameter not in self._of_parameters:
            shape = "x".join(map(str, parameter.shape))
            self._of_parameters[parameter] = self._new_memory(
                self._names.get(parameter, f"parameter {self._numbered} {shape}")
            )
        memory: TensorState = self._of_parameters[parameter]
        return memory

    def _new_memory(self, name: str) -> TensorState:
        self._numbered += 1
        return TensorState(name, self._numbered)

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Use the model's parameter names in reports. Call it before the first backward pass."""
        for name, parameter in model.named_parameters():
            self._names[parameter] = name

    def report(self) -> Report:
        """Costs of all reductions so far, by tensor."""
        return Report(list(self._accounts.values()), f"sparse gradients, mode {self.settings.mode}")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group; () without a process group."""
        return self.wire.ranks

    def section(self) -> Report | None:
        """Section of `oases.report()`."""
        return self.report() if self._accounts else None

    def reset_report(self) -> None:
        """Reset the accounts."""
        self._accounts.clear()


def _require_unchanged(was: Form, now: Form) -> None:
    # What is sent does not depend on the layout.
    for field in ("shape", "dtype"):
        if getattr(was, field) != getattr(now, field):
            raise ValueError(
                f"the {field} of the gradient was {getattr(was, field)} and is {getattr(now, field)} now; give every "
                "tensor a name= of its own"
            )
