"""Ops of tensor-parallel blocks on tensors: F, C, R, RC, BC, B and W, and their collectives.

Every (block, sub-batch) has pieces of the autograd graph of its own, detached at the collectives, so the backward
pass runs in schedule order instead of autograd's. With recomputation, a block keeps its input alone.

Names: x = a block's input; h = the input of F: x itself, or with sequence parallelism the gathered x; y = F's partial
sums and, after the wait, their sum; out = combine(x, y), the next block's x. In the backward pass g = gradient of h,
a partial sum until its collective has completed, then the gradient of x through F.

Between two blocks, on what all ranks hold, run `combine` after a block's sum, and of the next block `prepare`, the
half of `partial` in front of a gather, and `prologue`, work that every rank does in full (an attention that cannot be
sharded), whose result the block's other methods get in place of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from oases.core.blocks.attention import KeyValuePrefix
from oases.core.blocks.batch import CallInputs
from oases.core.blocks.program import BlockProgram
from oases.core.blocks.randomness import MethodName, Randomness
from oases.core.execution.communication import PendingCollective, Wire
from oases.core.execution.executor import Place, Step
from oases.core.execution.piece import (
    DeferredGradients,
    Leaves,
    Piece,
    deferral,
    deferring,
    in_piece,
    method_of,
    own_memory,
    read_only,
    recorded,
    tensor_of,
)  # fmt: skip

_NO_CHANGE = nullcontext()


class BlockWork:
    """Tensors of one call between ops, and the implementation of each op.

    inputs: of the blocks besides `x`, and the sub-batches. leaves: the stand-ins of each block's parameters.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], program: BlockProgram, wire: Wire, x: Tensor, leaves: list[Leaves], *,
        differentiable: bool, randomness: Randomness, inputs: CallInputs,
    ) -> None:  # fmt: skip
        cut = inputs.cut
        self._program, self._wire, self._cut, self.inputs = program, wire, cut, inputs
        self._differentiable, self.randomness, self.device = differentiable, randomness, x.device
        self._last, self._joint = program.schedule.num_blocks - 1, program.schedule.joint
        self._keys = {b: KeyValuePrefix(b, cut.number) for b in range(len(blocks))
                      if cut.along == "sequence" and b not in self._joint}  # fmt: skip
        self._whole = cut.ranks == 1
        """Whether gradients after an all-reduce are equal on all ranks; else each rank has its own tokens."""
        both = list(zip(blocks, program.halved, strict=True))
        self._blocks: Sequence[Any] = blocks
        self._partial = [method_of(block, "product" if halved else "partial") for block, halved in both]
        self._traced = [block if hasattr(block, "_orig_mod") else None for block in blocks]
        """By block, the block where it is compiled."""
        self._methods: dict[tuple[str, int], Callable[..., Tensor]] = {}
        for name, of in (
            ("combine", [True] * len(blocks)), ("prepare", program.halved), ("prologue", program.prologues),
        ):  # fmt: skip
            self._methods |= {(name, b): method_of(block, name) for b, block in enumerate(blocks) if of[b]}
        self.leaves = leaves
        # Tensors between ops.
        self._x: dict[Place, Tensor] = {}
        self._h: dict[Place, Tensor] = {}
        self._y: dict[Place, Tensor] = {}
        self._to_gather: dict[Any, Tensor] = {}  # parts of a sequence, by the op that made them
        self._flights: dict[Any, PendingCollective] = {}
        self._outputs: dict[int, Tensor] = {}  # of the last block, by sub-batch
        self._g: dict[Place, Tensor] = {}
        self._grad_y: dict[Place, Tensor] = {}
        self._residual: dict[Place, Tensor] = {}  # gradient of x through combine
        senders: list[Any] = [blocks[b] for b, _ in program.dispatched]
        self._tokens: Any = None
        """Ops of blocks that send tokens to experts, which such a block's `token_work` makes."""
        if senders:
            self._tokens = senders[0].token_work(leaves, inputs.leaves, differentiable=differentiable)
        # State of the backward pass.
        self._pieces: dict[tuple[str, int, int], Piece] = {}  # of methods between blocks
        self._before: dict[Place, Tensor] = {}  # inputs of prologues that are recomputed
        self._partial_pieces: dict[Place, Piece] = {}
        self._joined_pieces: dict[Place, Any] = {}
        self.deferred: dict[Place, DeferredGradients] = {}
        self.keep_deferred = False
        """Whether the backward pass skips W, for `weights_of`."""
        self._left_out: list[Place] = []
        for s, part in enumerate(cut.split(x.detach())):
            self._h[0, s], self._x[0, s] = part, cut.tokens(part)

    def handlers(self) -> dict[str, Callable[[Step], None]]:
        """Implementation of each op, by `Step.key`."""
        return {
            "F": self._do_F, "C": self._do_C, "R": self._do_R, "RC": self._do_RC,
            "BC": self._do_BC, "B": self._do_B, "W": self._do_W, "D": self._do_D, "BF": self._do_BF,
            **({} if self._tokens is None else self._tokens.handlers()),
            **dict.fromkeys((f"wait {kind}" for kind in ("F", "R", "B", "BC", "C", "RC")), self._wait),
            **dict.fromkeys((f"all_reduce {kind}" for kind in "FRB"), self._reduce),
            **dict.fromkeys((f"reduce_scatter {kind}" for kind in "FRB"), self._scatter),
            **dict.fromkeys((f"all_gather {kind}" for kind in ("C", "RC", "BC")), self._gather),
        }  # fmt: skip

    def output(self) -> Tensor:
        """The output [batch, ...], in the order of the input, after the last op of the forward pass."""
        self.randomness.end()
        return self._cut.join([self._outputs.pop(s) for s in range(self._cut.number)])

    def versions(self) -> list[int]:
        """Versions of tensors of the caller that recomputation reads, which changes in place increase."""
        held = [x._version for tensors in (self._x, self._h) for (block, _), x in tensors.items() if block == 0]
        return held + self.inputs.versions()

    def begin_backward(self, grad: Tensor) -> None:
        """Set the gradient of the output."""
        for s, part in enumerate(self._cut.split(grad)):
            self._g[self._last + 1, s] = self._cut.tokens(part)

    def input_gradient(self) -> Tensor:
        """Gradient of the input, after the last op."""
        grad = self._cut.join([self._total_gradient(0, s) for s in range(self._cut.number)])
        if self._whole:
            return grad
        return self._wire.wait(self._wire.all_gather(grad, "gradient of the input"))

    def gradients_of(self, block: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of a block by parameter index: partial sums over the ranks, and complete ones; taken once."""
        leaves = self.leaves[block]
        return leaves.take(False), leaves.take(True)

    def weights_of(self, block: int) -> list[Tensor | None]:
        """Deferred weight gradients of a block, by parameter index."""
        for place in [place for place in self._left_out if place[0] == block]:
            self.deferred.pop(place).compute()
        return self.leaves[block].take(False)

    def forget(self) -> None:
        """Release every tensor; the scheduler keeps those that backends still write to."""
        for held in (
            self._x, self._h, self._y, self._to_gather, self._flights, self._outputs, self._g, self._grad_y,
            self._residual, self._pieces, self._before, self._partial_pieces, self._joined_pieces, self.deferred,
            self.leaves,
        ):  # fmt: skip
            held.clear()
        if self._tokens is not None:
            self._tokens.clear()
        self.inputs.forget()

    # --- collectives ---

    def _reduce(self, step: Step) -> None:
        held = self._g if step.op.of == "B" else self._y
        self._flights[step.carried] = self._wire.all_reduce(held.pop(step.place), step.label)

    def _scatter(self, step: Step) -> None:
        held = self._g if step.op.of == "B" else self._y
        self._flights[step.carried] = self._wire.reduce_scatter(held.pop(step.place), step.label)

    def _gather(self, step: Step) -> None:
        part = self._to_gather.pop(step.carried)
        self._flights[step.carried] = self._wire.all_gather(part, step.label)

    def _wait(self, step: Step) -> None:
        place, of = step.place, step.op.of
        result = self._wire.wait(self._flights.pop(step.carried))
        if of in ("C", "RC"):
            self._pass_on(place, result)
        else:
            (self._g if of == "B" else self._grad_y if of == "BC" else self._y)[place] = result

    def _pass_on(self, place: Place, out: Tensor) -> None:
        """Give what a block has made to the next one, or to the output."""
        block, s = place
        if block == self._last:
            self._outputs[s] = out
        else:
            self._h[block + 1, s] = out

    # --- a block up to its row-parallel matmul ---

    def _do_D(self, step: Step) -> None:  # noqa: N802
        exchange = self._blocks[step.block].exchange(self._program.order, *self.inputs.values(*step.place))
        self._tokens.do_D(step.place, exchange, self._h.pop(step.place))

    def _do_F(self, step: Step) -> None:  # noqa: N802
        place = step.place
        method = self._partial[step.block]
        if place in self._program.dispatched:
            method, given = self._tokens.arrived(place)
        else:
            given = (self._take_parts(self._h, place),)
        again = place in self._program.recomputed
        deferred = None
        if self._differentiable:
            compiled = self._traced[step.block] is not None
            deferred = self.deferred[place] = deferral(self.leaves[step.block], compiled=compiled)
        graph = deferred is not None and not again
        y = self._run_partial(place, method, given, deferred, self.randomness.run, graph=graph)
        if deferred is not None:
            # R records the graph again; it must know whether y is the result of a matmul without other readers.
            deferred.end(y if again else None)
            if again and place not in self._program.recomputed_inputs and place not in self._before:
                (self._h[place],) = given
        self._set_parts(self._y, place, y)

    def _do_R(self, step: Step) -> None:  # noqa: N802
        place = step.place
        deferred, whole = self.deferred[place], place in self._program.summed_again
        method = self._partial[step.block]
        if place in self._before:
            h = self._run_between("prologue", place, (self._before.pop(place),), again=True, graph=True)
        else:
            h = self._h.pop(place)
        y = self._run_partial(place, method, (h,), deferred, self.randomness.again, graph=True, skip_last=not whole)
        deferred.end()
        if whole:
            self._set_parts(self._y, place, y)

    def _run_partial(
        self, place: Place, method: Callable[..., Tensor], given: tuple[Tensor, ...],
        deferred: DeferredGradients | None, draw: Callable[..., Tensor], *, graph: bool, skip_last: bool = False,
    ) -> Tensor:  # fmt: skip
        block, s = place
        traced = self._traced[block]
        values = self.inputs.values(block, s, whole=block in self._joint)
        name: MethodName = "product" if self._program.halved[block] else "partial"
        keys = self._keys.get(block)

        def run() -> Tensor:
            if deferred is None:
                return own_memory(tensor_of(method, *given, *values), (*given, *values))
            deferred.begin(skip_last)
            token, in_piece[0] = deferring.set(deferred), traced is not None
            try:
                if not graph:
                    read = (*given, *values)
                    return own_memory(read_only(method, read, lambda: tensor_of(method, *read)), read)
                # The all-reduce overwrites y. If a graph has saved y itself, autograd raises.
                y, self._partial_pieces[place] = recorded(
                    method, given, values, [self.leaves[block], *self.inputs.leaves], overwritten=True,
                    begun=None if keys is None else keys.record,
                )  # fmt: skip
                return y
            finally:
                deferring.reset(token)
                in_piece[0] = False

        extent = self._cut.whole_extent if block in self._joint else self._cut.extent
        with _NO_CHANGE if graph else torch.no_grad():
            if skip_last and traced is not None and deferred is not None and hasattr(deferred, "leave_out"):
                deferred.leave_out(
                    traced, name, lambda plain: draw(name, block, s, extent, lambda: plain(*given, *values))
                )
            if keys is None:
                return draw(name, block, s, extent, run)
            y = draw(name, block, s, extent, lambda: keys.around(s, run))
        keys.end(s)
        return y

    def _take_parts(self, parts: dict[Place, Tensor], place: Place) -> Tensor:
        """The tensor at `place`; for a joint block, whose ops run once, of all sub-batches."""
        if place[0] not in self._joint:
            return parts.pop(place)
        return self._cut.join([parts.pop((place[0], s)) for s in range(self._cut.number)])

    def _set_parts(self, parts: dict[Place, Tensor], place: Place, whole: Tensor) -> None:
        """Inverse of `_take_parts`."""
        if place[0] not in self._joint:
            parts[place] = whole
            return
        for s, part in enumerate(self._cut.split(whole)):
            parts[place[0], s] = part

    # --- after the all-reduce ---

    def _do_C(self, step: Step) -> None:  # noqa: N802
        place = step.place
        again = place in self._program.combined_again
        keep = self._differentiable and again and place not in self._program.recomputed_inputs
        x = self._x[place] if keep else self._x.pop(place)
        self._combined(step, x, graph=self._differentiable and not again)

    def _do_RC(self, step: Step) -> None:  # noqa: N802
        self._combined(step, self._x.pop(step.place), graph=True)

    def _combined(self, step: Step, x: Tensor, *, graph: bool) -> None:
        """Run combine and pass its result to the next block, or to the output."""
        block, s = place = step.place
        again = step.key == "RC"
        y, following = self._y.pop(place), (block + 1, s)
        recomputed = following in self._program.recomputed_inputs
        graph_above = self._differentiable and (again or not recomputed)
        joined = None
        if block < self._last and graph == graph_above and (not again or recomputed):
            joined = self._program.joined[block + 1]
        if joined is not None and joined.takes(x, y):
            self._x[following], out, kept = joined.run(x, y)
            if graph:
                self._joined_pieces[place] = joined.piece(kept, self.leaves[block : block + 2], whole=self._whole)
        else:
            out = self._run_between("combine", place, (x, y), again=again, graph=graph)
            if again and not recomputed:
                return
            if block < self._last:
                self._x[following], out = self._enter(following, out, again=again, graph=graph_above)
        if (step.key, block, s) in self._program.gathered:
            self._to_gather[step.key, block, s] = out
        else:
            self._pass_on(place, out)

    def _enter(self, place: Place, x: Tensor, *, again: bool, graph: bool) -> tuple[Tensor, Tensor]:
        """A block's input -> what its `combine` and what its `partial`, or a gather in front of that, are given."""
        if self._program.prologues[place[0]]:
            if graph and not again and place in self._program.recomputed and self._whole:
                self._before[place], graph = x, False  # of a part of a sequence the gathered result is kept
            h = self._run_between("prologue", place, (x,), again=again, graph=graph)
            return h, h
        if self._program.halved[place[0]]:
            return x, self._run_between("prepare", place, (x,), again=again, graph=graph)
        return x, x

    def _run_between(
        self, name: MethodName, place: Place, given: tuple[Tensor, ...], *, again: bool, graph: bool
    ) -> Tensor:
        """Run a method between blocks on a sub-batch. again: in a recomputation."""
        block, s = place
        method, values = self._methods[name, block], self.inputs.values(block, s)

        def call() -> Tensor:
            if not graph:
                return tensor_of(method, *given, *values)
            out, self._pieces[name, block, s] = recorded(
                method, given, values, [self.leaves[block], *self.inputs.leaves], whole=self._whole
            )
            return out

        draw = self.randomness.again if again else self.randomness.run
        repeated = place in self._program.recomputed or place in self._program.combined_again
        with _NO_CHANGE if graph else torch.no_grad():
            if self._differentiable and repeated:
                return read_only(method, given, lambda: draw(name, block, s, self._cut.extent_between, call))
            return draw(name, block, s, self._cut.extent_between, call)

    # --- backward ---

    def _do_BC(self, step: Step) -> None:  # noqa: N802
        block, s = place = step.place
        joined, following = self._joined_pieces.pop(place, None), (block + 1, s)
        if joined is not None:
            residual, grad_y = joined.backward([self._residual.pop(following), self._g.pop(following)])
        else:
            residual, grad_y = self._pieces.pop(("combine", *place)).backward([self._total_gradient(*following)])
        if residual is not None:
            self._residual[place] = residual
        if grad_y is None:
            raise RuntimeError(f"block {block}: combine(x, y) does not depend on y; return a value that uses it")
        if ("BC", block, s) in self._program.gathered:
            self._to_gather["BC", block, s] = grad_y
        else:
            self._grad_y[place] = grad_y

    def _do_BF(self, step: Step) -> None:  # noqa: N802
        place = step.place
        if place not in self._program.apart:
            self._do_BC(step)
        self._tokens.gathered_backward(place, self._partial_pieces.pop(place).backward([self._grad_y.pop(place)]))

    def _do_B(self, step: Step) -> None:  # noqa: N802
        place = step.place
        if place in self._program.dispatched:
            self._g[place] = self._tokens.gradient_of_input(place)
        else:
            self._through_partial(step)
        if place not in self._program.deferred:
            self._do_W(step)

    def _through_partial(self, step: Step) -> None:
        place = step.place
        if place not in self._program.apart:
            self._do_BC(step)
        # The all-reduce overwrites g, so g must not share memory with tensors that are still read.
        piece, keys = self._partial_pieces.pop(place), self._keys.get(step.block)
        grad_y = self._take_parts(self._grad_y, place)
        others = [] if keys is None else keys.gradients(step.sub_batch)
        g, *earlier = piece.backward([*others, grad_y], fresh=True)
        if keys is not None:
            keys.add(earlier)
        if g is None:
            raise RuntimeError(f"block {step.block}: partial(x) does not depend on x; it must be differentiable in x")
        self._set_parts(self._g, place, g)

    def _do_W(self, step: Step) -> None:  # noqa: N802
        if self.keep_deferred:
            self._left_out.append(step.place)  # keep the order, so that sums are equal to the bit
        else:
            self.deferred.pop(step.place).compute()

    def _total_gradient(self, block: int, sub_batch: int) -> Tensor:
        """Gradient of the block's input: the reduced one through the block, plus the residual."""
        place = (block, sub_batch)
        g, residual = self._g.pop(place), self._residual.pop(place, None)
        prologue = self._pieces.pop(("prologue", *place), None)
        piece = prologue or self._pieces.pop(("prepare", *place), None)
        if residual is not None and (prologue is not None or piece is None):
            g, residual = g.add_(residual), None
        if piece is None:
            return g
        (through,) = piece.backward([g])
        if through is None:
            name = "prepare" if prologue is None else "prologue"
            raise RuntimeError(f"block {block}: {name}(x) does not depend on x; it must be differentiable in x")
        return through if residual is None else through + residual
