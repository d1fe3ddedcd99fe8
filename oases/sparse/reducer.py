"""`S2Reducer`: the mean over ranks of gradients of which few rows are not zero.

After S2 Reducer (arXiv 2110.02140): a bitmap says which rows are used, and these alone are sent, squeezed into a
count sketch. Beside the paper's sketch there are two modes without its error: `packed` sends the used rows as they
are, and `gather` sends every rank's rows to every rank, which is least where ranks are few and use different rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from oases.reporting import register
from oases.sparse.costs import Costs, measure
from oases.sparse.exchange import MODES, Exchange, ReducerSettings, Steps, TensorState
from oases.sparse.gradient import rows_of
from oases.sparse.wire import Account, Reduction, Report, Wire

SKETCH_ROWS = (1, 3, 5)


class S2Reducer:
    """Averages sparse gradients over the ranks of a process group (None: the default group).

    mode: "dense", "packed", "gather" (all exact), "sketch" (lossy) or "auto", which chooses for each tensor
    in each step, by bytes, the link's rate and the kernels' speed, both measured at its first gradient: among the
    exact ones, and sketch where cells_per_nonzero says how lossy it may be. rows: of the sketch, 1, 3 or 5.
    cells_per_nonzero: cells of the whole sketch for each number in rows that any rank uses, above 0 (None: 0.25);
    from 1 on packed sends less and loses nothing. error_feedback: what a sketch did not send is added to the gradient
    of the next step that uses the same row; costs a float32 copy of the parameter. seed: of the hash functions, the
    same on all ranks; each step draws others from it. measure_error: sends every gradient densely too, to know the
    error.

    Every rank of the group must make one at the same point, with the same arguments, and reduce the same tensors in
    the same order. `last` is what the last reduction cost, `report()` adds up. ValueError for arguments out of range.
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
        """What "auto" chooses by, once it is measured."""
        self._named: dict[str, TensorState] = {}
        self._of_parameters: Any = WeakTensorKeyDictionary()
        self._names: Any = WeakTensorKeyDictionary()
        self._accounts: dict[str, Account] = {}
        self._numbered = 0
        self.jobs: Any = None
        """Of the hook: its thread, from the first bucket on."""
        self.last_bucket: int | None = None
        """Of the hook: the number of the bucket that it was given last."""
        register(self)

    def all_reduce(self, gradient: Tensor | None, *, name: str = "gradient", like: Tensor | None = None) -> Tensor:
        """The mean of the ranks' gradients, stored as the given one; that one is left as it is.

        gradient: dense [rows, ...], or sparse COO with one sparse dimension, of a float dtype. None is one that is
        zero everywhere, of the shape, dtype and layout of `like`. name: tells tensors apart where several go through
        one reducer; error feedback is kept by it. All ranks must give the same layout. Waits for the result.
        """
        if gradient is None:
            if like is None:
                raise ValueError("no gradient: give like=, a parameter or gradient that has its shape")
            gradient = torch.zeros_like(like, requires_grad=False).detach()
        memory = self._named.get(name)
        if memory is None:
            memory = self._named[name] = self._new_memory(name)
        steps, exchange = self.begin(gradient.detach(), memory)
        for _ in range(2):
            next(steps)
        mean = self.end(steps, exchange)
        if gradient.is_cuda:
            torch.cuda.current_stream(gradient.device).synchronize()
        return mean

    def prepare(self, device: torch.device) -> None:
        """Measure what "auto" chooses by, once; a collective call, to be made with nothing on the wire."""
        if self.settings.mode == "auto" and self.costs is None and self.wire.world > 1:
            self.costs = measure(self.wire, device, self.settings.rows)

    def begin(
        self, gradient: Tensor, memory: TensorState, *, in_place: bool = False, if_sparse: bool = False
    ) -> tuple[Steps, Exchange]:
        """The steps of one gradient, none of them taken yet; see `Exchange`."""
        if not gradient.is_floating_point():
            raise ValueError(f"gradients must be of a float dtype, got {gradient.dtype}; convert it")
        if gradient.dim() == 0:
            gradient = gradient.view(1)
        if memory.residual is not None and memory.residual.shape != (gradient.shape[0], gradient.shape[1:].numel()):
            raise ValueError(
                f"{memory.name!r} was {tuple(memory.residual.shape)} and is {tuple(gradient.shape)} now; give every "
                "tensor a name= of its own"
            )
        self.prepare(gradient.device)
        rows = rows_of(gradient, in_place)
        exchange = Exchange(self.wire, self.settings, self.costs, rows, memory, if_sparse=if_sparse)
        return self._with_error(exchange) if self.measure_error else exchange.steps(), exchange

    def _with_error(self, exchange: Exchange) -> Steps:
        """The same, with the error of what comes out."""
        exact = exchange.rows.dense().clone().double()
        self.wire.sum(exact, Reduction("", "")).wait()
        exact /= self.wire.world
        mean = yield from exchange.steps()
        found = (mean.to_dense() if mean.is_sparse else mean).reshape(exact.shape).double()
        scale = float(exact.norm())
        exchange.found.error = float((found - exact).norm()) / scale if scale else float(found.norm())
        return mean

    def end(self, steps: Steps, exchange: Exchange) -> Tensor:
        """Take the last of the steps, book what they cost, and return the mean."""
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
        """What the hook keeps of a parameter."""
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
        """Have reports call parameters by their names in the model. To be called before the first backward pass."""
        for name, parameter in model.named_parameters():
            self._names[parameter] = name

    def report(self) -> Report:
        """What all reductions so far have cost, by tensor."""
        return Report(list(self._accounts.values()), f"sparse gradients, mode {self.settings.mode}")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of those that reduce together; () without a process group."""
        return self.wire.ranks

    def section(self) -> Report | None:
        """For `oases.report()`."""
        return self.report() if self._accounts else None

    def reset_report(self) -> None:
        """Start counting again."""
        self._accounts.clear()
