"""Training of a model in pipeline stages: `train_step` and `eval_step` of a model that `parallelize` divided."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oases.autotp.export import take_dtypes
from oases.autotp.model_hooks import ModelHooks
from oases.autotp.pipeline.building import PipelineOptions, Stages
from oases.autotp.pipeline.dataflow import Dataflow, dataflow_of
from oases.autotp.pipeline.fsdp import CallsOfShards, require_steps, shard_weights
from oases.autotp.pipeline.stages import Crossings
from oases.autotp.pipeline.units import Pass, StageExit
from oases.autotp.runner import Runner
from oases.core.execution.dtensors import local_of
from oases.core.execution.executor import Context
from oases.core.execution.failure import FailTogether, Samples, alike, is_sampled, monitor_of, samples_of
from oases.core.execution.group import all_gather_objects, group_of
from oases.distributed.collectives import all_reduce
from oases.distributed.expert_groups import averaged_parts
from oases.distributed.fsdp import FsdpUnit, HeldUnit
from oases.distributed.gradient_averaging import GradientAverager
from oases.distributed.messages import StageMessages
from oases.distributed.parameter_hooks import DeferredHooks
from oases.distributed.pipeline import StageRunner
from oases.distributed.replicas import AverageSwitch, average_over
from oases.distributed.sharded_gradients import ShardedGradientAverager
from oases.errors import UsageError
from oases.layers.loss import IGNORED

MicroBatch = tuple[tuple[Any, ...], dict[str, Any]]
_OF_COPIES = 1e-4
"""Share of the rounding of samples by which copies of a weight may differ, which are updated alike."""


class _Copy(NamedTuple):
    """Trained parameter that other stages have, too. number: of all copies. group: of the ranks that have one."""

    number: int
    name: str
    parameter: nn.Parameter
    group: str


class PipelineTraining:
    """Steps of one rank's stage of a model. Collective: all ranks of the run create it together.

    model: this rank's stage, on its device. stages: the model divided. loss: takes the loss from its result. runners:
    of its layers. hooks: around its forward.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        options: PipelineOptions,
        loss: Callable[[Any], Any],
        runners: Sequence[Runner],
        hooks: ModelHooks,
    ) -> None:
        self.mesh, pipeline, degree = options.mesh, options.schedule, options.degree
        """Process groups of this rank's stage."""
        mesh = self.mesh
        self._model, self._twin, self._units, self._names = model, stages.twin, stages.units, stages.names
        self._division, self._loss, self._runners, self._hooks = stages.division, loss, list(runners), hooks
        self._seed = torch.initial_seed()  # of a run whose passes `begin` numbers; inside of a pass it is another
        self._replicas, self._data = mesh.replicas(degree), mesh.data(degree)
        self._flows: dict[Any, tuple[Dataflow, Crossings]] = {}
        self._micro_batches = pipeline.num_sub_batches
        self._degree, self._number, self._gradient_wire = degree, 0, options.gradient_wire
        self._uncut = _uncut(pytree.tree_flatten_with_path(stages.inputs)[0])
        self._form: list[Any] | None = None  # of the last messages
        self._device = next(model.parameters()).device
        self._dtype = options.dtype
        self.messages: StageMessages | None = None
        """Messages to and from other stages; None for a single stage."""
        if pipeline.num_stages > 1:
            degrees = [degree] * (stages.division.parts - 1)
            self.messages = StageMessages(pipeline, mesh, degrees, device=self._device, wire=options.pipeline_wire)
        self._runner = StageRunner(pipeline, mesh.stage, self.messages)
        self.units: list[FsdpUnit] = []
        """Sharded weights, with fsdp."""
        self._outer: HeldUnit | None = None
        self._calls: AverageSwitch | None = None  # of a model of one stage, in a loop of the user's own
        self._average: GradientAverager | ShardedGradientAverager
        for runner in self._runners if pipeline.chunks > 1 else ():
            paths = stages.division.layers
            runner.part = next(part for part, layers in enumerate(paths) if runner.layers[0].path in layers)
        if options.shards:
            self._average, self._outer, self.units = shard_weights(
                model, self._runners, mesh, degree, options.dtype, keep=options.zero,
                gradient_wire=options.gradient_wire,
            )  # fmt: skip
            if mesh.num_stages == 1:
                self._calls = CallsOfShards(model, self._average, self._outer, self.units)
            else:
                require_steps(model, self._outer)
        else:
            self._average = self._averager()
            if mesh.num_stages == 1:
                self._calls = average_over(model, self._data, options.gradient_wire)
        self._parameter_hooks = DeferredHooks(lambda _: None)
        self._tied: dict[str, bool] = {}
        """Parameters of this stage that others have, too, by name: whether they are trained."""
        self._shared, self._trained = self._share(), self._trainable()

    def _share(self) -> list[_Copy]:
        """Trained parameters that other stages have, too."""
        here = dict(self._model.named_parameters(remove_duplicate=False))
        whole = dict(self._twin.named_parameters(remove_duplicate=False))
        numbers: dict[int, int] = {}  # of each parameter by all of its names: stages have it by different ones
        found: dict[int, _Copy] = {}
        for name, stages in sorted(self._division.holders.items()):
            if len(stages) > 1:
                group = self.mesh.peers(sorted(stages))  # collective: on all ranks, in the same order
                number = numbers.setdefault(id(whole[name]), len(numbers))
                if name in here:
                    self._tied[name] = here[name].requires_grad
                if name in here and here[name].requires_grad:
                    found[number] = _Copy(number, name, here[name], group)
        return [found[number] for number in sorted(found)]

    def begin(self, number: int) -> None:
        """Set the number of the next pass in the whole training, from which random numbers are derived."""
        self._hooks.at_call(number * self._division.parts, self._seed)
        for runner in self._runners:
            runner.stack.at_call(number, self._seed)

    @property
    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters of this stage that count in the gradient norm on the first stage that has them."""
        mine = self.mesh.stage
        here = dict(self._model.named_parameters(remove_duplicate=False))
        return [here[name] for name, stages in self._division.holders.items() if name in here and mine != min(stages)]

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward and backward passes of a step; return the mean loss, equal on every rank.

        args, kwargs: of the model's forward for the samples of this rank's replica, equal on all ranks of a replica.
        They are cut into micro-batches along dimension 0. Gradients are those of the mean loss over the samples, or
        over the labels, of all replicas; step an optimizer afterwards. UsageError for samples that do not divide into
        micro-batches, and without gradients.
        """
        if not torch.is_grad_enabled():
            raise UsageError("train_step() in no_grad() or inference_mode() trains nothing; call it outside")
        batches, weights = self._split(args, kwargs)
        try:
            with FailTogether(monitor_of(self.mesh.run), "train_step()"):
                self._follow_trained()  # behind the collectives above: other stages wait in a receive
        except BaseException:
            self.close()  # once they have been told why
            raise
        shared = [copy.parameter for copy in self._shared]
        scalars = getattr(self._average, "scalars", [])
        self._parameter_hooks.take([*shared, *scalars] if self.units else self._model.parameters())
        self._parameter_hooks.begin(shared)
        with self._gathered():
            losses = self._runner.run(self._forward(batches, weights), self._average)
        for _, _, parameter, group in self._shared:
            if parameter.grad is None:  # unused here, but not by its other copies
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            all_reduce(local_of(parameter.grad), group_of(group), "shared parameters")
        self._parameter_hooks.end()
        return self._total(losses)

    def eval_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward passes alone; return the mean loss, equal on every rank. Arguments as in `train_step`."""
        batches, weights = self._split(args, kwargs)
        with self._gathered():
            return self._total(self._runner.evaluate(self._forward(batches, weights)))

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Context in which weights outside of stacks are whole. All are sharded after it."""
        if self._outer is not None:
            self._outer.gather()
        if self._calls is not None:
            self._calls.steps = True
        try:
            yield
        finally:
            if self._calls is not None:
                self._calls.steps = False
            for unit in self.units:
                unit.free()

    def _forward(self, batches: Sequence[MicroBatch], weights: Tensor) -> Any:
        flow, crossings = self._flow_of(batches[0])
        last = self._division.parts - 1

        def forward(part: int, number: int, inputs: Sequence[Tensor], context: Context) -> Sequence[Tensor]:
            values = dict(zip(crossings.received[part], inputs, strict=True))
            current = self._units.current = Pass(part, flow, crossings, values)
            for runner in self._runners:
                runner.context = context
            args, kwargs = batches[number]
            try:
                result = self._model(*args, **kwargs)
            except StageExit:
                return current.outputs()
            finally:
                self._units.current = None
                for runner in self._runners:
                    runner.context = None
            if part != last:
                return current.outputs()
            loss = loss_in(self._loss(result))
            return [loss * weights[number].to(loss.dtype)]

        return forward

    def _flow_of(self, batch: MicroBatch) -> tuple[Dataflow, Crossings]:
        """Dataflow of a pass on inputs like these."""
        found, tree = pytree.tree_flatten(batch)
        form = [(each.dim(), each.dtype) if isinstance(each, Tensor) else repr(each) for each in found]
        dtype = self._dtype or next(self._model.parameters()).dtype
        key = (str(tree), str(form), self._model.training, dtype)
        sizes = (*key, str([each.shape for each in found if isinstance(each, Tensor)]))
        if key not in self._flows and sizes not in self._flows:
            self._twin.train(self._model.training)
            take_dtypes(self._twin, self._model)
            self._units.shapes.clear()
            flow = dataflow_of(self._twin, self._names, batch, lambda result: loss_in(self._loss(result)))
            # transformers' question answering ignores targets of the sequence's length.
            known = sizes if any(each.ignored >= 0 for each in flow.targets) else key
            self._flows[known] = (flow, Crossings.of(flow, self._division))
        return self._flows[key if key in self._flows else sizes]

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[MicroBatch], Tensor]:
        """Micro-batches, and the share of each one's mean loss in the step's."""
        if kwargs.get("num_items_in_batch") is not None:
            raise UsageError(
                "num_items_in_batch makes the loss of a micro-batch a share of the batch's, and train_step() takes "
                "such shares itself, by the labels; leave num_items_in_batch out"
            )
        named, tree = pytree.tree_flatten_with_path((args, dict(kwargs)))
        found = [each for _, each in named]
        self._require_alike([each for each in found if isinstance(each, Tensor)])
        self._uncut |= _uncut(named)
        first = next((each for each in found if isinstance(each, Tensor) and each.dim() > 0), None)
        if first is None:
            raise UsageError("train_step() was given no tensor; pass it the arguments of the model's forward")
        samples, count = len(first), self._micro_batches
        if samples % count or not samples:
            raise UsageError(
                f"{samples} samples do not divide into {count} micro-batches; give a multiple of {count} samples, or "
                "parallelize() other micro_batches"
            )
        cut = [
            each.chunk(count)
            if isinstance(each, Tensor) and each.dim() > 0 and len(each) == samples and path not in self._uncut
            else [each] * count
            for path, each in named
        ]
        batches = [pytree.tree_unflatten([each[number] for each in cut], tree) for number in range(count)]
        flow, crossings = self._flow_of(batches[0])
        kind = self._device.type  # under autocast results of layers have another type
        form = [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), crossings.received]
        form += [(each.shape, each.dtype) for each in found if isinstance(each, Tensor)]
        if self._form not in (None, form) and self.messages is not None:
            self.messages.renew()
        self._form = form
        return batches, self._shares(cut, flow, samples)

    def _follow_trained(self) -> None:
        """Average the gradients of the parameters that are trained now. UsageError where that cannot be."""
        trained = self._trainable()
        if trained == self._trained:
            return
        here, why = dict(self._model.named_parameters(remove_duplicate=False)), ""
        if isinstance(self._average, ShardedGradientAverager):
            why = (
                "which sharded weights and optimizer state cannot follow; do so before it, or leave out fsdp and zero"
            )
        elif changed := [name for name, before in self._tied.items() if here[name].requires_grad != before]:
            why = f"{changed[0]} among them, which other stages have, too; do so before it"
        if why:
            raise UsageError(f"parameters were frozen, unfrozen or replaced after parallelize(), {why}")
        assert isinstance(self._average, GradientAverager), "sharded ones are refused"
        self._average.remove()
        self._average, self._shared, self._trained = self._averager(), self._share(), trained

    def _trainable(self) -> list[Any]:
        """Identities of the trained parameters; their names where they are shards."""
        sharded = bool(self.units)
        named = self._model.named_parameters()
        return [name if sharded else id(parameter) for name, parameter in named if parameter.requires_grad]

    def _averager(self) -> GradientAverager:
        return GradientAverager(averaged_parts(self._model, self._data), wire=self._gradient_wire)

    def _require_alike(self, given: list[Tensor]) -> None:
        """Raise UsageError, on all ranks, where the stages of a replica have different batches or copies of a weight.

        Compared at the calls 1, 2, 4, 8, ..., before any message. The ranks of one stage are compared by the model.
        """
        self._number += 1
        if self.mesh.num_stages == 1 or not is_sampled(self._number):
            return
        copies: list[tuple[int, str, str, Any]] = []
        for number, name, parameter, group in self._shared:
            sample, *_ = samples_of([local_of(parameter)])
            if not isinstance(sample, str):  # numbers, whose rounding may be that of other matmuls
                sample = [sample[0], [_OF_COPIES * each for each in sample[1]]]
            copies.append((number, group, name, [sample]))
        mine = (self.mesh.replica(self._degree), [tuple(each.shape) for each in given], samples_of(given), copies)
        said = all_gather_objects(mine, self.mesh.run)
        first: dict[int, int] = {}
        known: dict[tuple[int, str], tuple[int, str, Samples]] = {}
        for rank, (replica, shapes, samples, held) in enumerate(said):
            for number, group, name, values in held:
                other, its, theirs = known.setdefault((number, group), (rank, name, values))
                if not alike(values, theirs):
                    raise UsageError(
                        f"train_step(): {its} on rank {other} and {name} on rank {rank} are copies of one weight and "
                        "have other values: give both the same settings of the optimizer, by their stage's own "
                        "names, and load both"
                    )
            other = first.setdefault(replica, rank)
            if shapes != said[other][1] or not alike(samples, said[other][2]):
                raise UsageError(
                    f"train_step(): ranks {other} and {rank}, of one replica, were given different batches; give all "
                    "its stages and tensor-parallel ranks the same batch, and vary batches over replicas alone"
                )

    def _shares(self, cut: Sequence[Sequence[Any]], flow: Dataflow, samples: int) -> Tensor:
        """Share of each micro-batch in the mean: by its samples, or by its labels where some are ignored.

        cut: micro-batches of each leaf of the batch. samples: those of this replica, which may have others than the
        rest.
        """
        number = self._micro_batches
        if number * self._replicas == 1:
            return torch.ones(1, dtype=torch.float64)
        self._require_equal_divisors(cut, flow)
        if any(each.weighted for each in flow.targets):
            raise UsageError(
                "the loss is a mean by weights of classes, whose sum in each micro-batch is unknown; take one "
                'micro-batch and replica, or divide a sum (reduction="sum") by a number that is always the same'
            )
        if not flow.targets:
            if self._number == 1:
                warnings.warn(
                    "train_step() takes the loss, which is no mean of a cross entropy, for a mean over samples: over "
                    f"{number} micro-batches and {self._replicas} replicas one that compares samples, or divides by "
                    "a number of the batch, is not that of the batch, as by gradient accumulation in one process",
                    stacklevel=4,
                )
            mine = torch.tensor([samples], dtype=torch.float64, device=self._device)
            share = samples * self._replicas / float(all_reduce(mine, self._data, "samples"))
            return torch.full((number,), share / number, dtype=torch.float64)
        if any(each.leaf < 0 for each in flow.targets):
            raise UsageError(
                "the loss leaves out labels by another input, such as a mask, changes them by their values or reads "
                f"a part of them, so how many each micro-batch has is unknown; give labels of {IGNORED} in their "
                "places, and leave the other input out of the loss"
            )
        counts = torch.tensor(
            [[each.count(part) for part in cut[each.leaf]] for each in flow.targets], dtype=torch.float64
        )  # [losses, micro-batches]
        total = torch.cat([counts.sum(1), (counts == 0).sum()[None].double()]).to(self._device)
        total = all_reduce(total, self._data, "labels").cpu()
        if total[-1]:
            raise UsageError(
                f"{int(total[-1])} micro-batches have no label but {flow.targets[0].ignored}, so they have no mean "
                "loss; leave such samples out, or take fewer micro_batches"
            )
        shares = counts * self._replicas / total[:-1, None]
        means = flow.mean is not None and flow.mean <= {each.leaf for each in flow.targets}
        wanted = shares[:1] if means else torch.full((1, 1), 1 / number, dtype=torch.float64)
        apart = (shares - wanted).abs().max().to(self._device)
        if (len(shares) > 1 or not means) and all_reduce(apart, self._data, "labels", largest=True) > 1e-9:
            what = f"is a sum of {len(shares)} cross entropies"
            raise UsageError(
                f"the loss {what if means else 'has other terms than the mean of a cross entropy'}, and "
                "micro-batches, or replicas, have other numbers of labels: here "
                f"{counts.long().tolist()}; give each as many that are not {flow.targets[0].ignored}, or take one "
                "micro-batch and replica"
            )
        return shares[0]

    def _require_equal_divisors(self, cut: Sequence[Sequence[Any]], flow: Dataflow) -> None:
        """Raise UsageError where the loss is divided by a number that micro-batches, or replicas, have other ones of.

        Known are sums of masks, of zeros and ones. Those of targets are counted by `_shares`.
        """
        divisors = flow.divisors - {each.leaf for each in flow.targets if each.leaf >= 0}
        if not divisors:
            return
        masks = [cut[leaf] for leaf in sorted(divisors) if leaf >= 0]
        parts = [part for mask in masks for part in mask]
        known = len(masks) == len(divisors) and all(bool(((part == 0) | (part == 1)).all()) for part in parts)
        # Of as many numbers on all ranks, whatever their values.
        sums = torch.zeros(max(1, len(masks)), self._micro_batches, dtype=torch.float64)
        if known:
            sums = torch.tensor([[int(part.sum()) for part in mask] for mask in masks], dtype=torch.float64)
        mean = all_reduce(sums.mean(1).to(self._device), self._data, "labels").cpu() / self._replicas
        apart = (sums - mean[:, None]).abs().max() + (not known)
        if all_reduce(apart.to(self._device), self._data, "labels", largest=True) > 1e-9:
            here = f": here {sums.long().tolist()}" if known else ""
            raise UsageError(
                "the loss is divided by a number that is computed from an input, such as the sum of a mask, and "
                f"micro-batches, or replicas, may have others{here}; make it the mean of a cross entropy with labels "
                f"of {IGNORED} where there is no loss, or take one micro-batch and replica"
            )

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        """Sum of the last part's losses, averaged over replicas, on every rank."""
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss
        group = self.mesh.run
        return (all_reduce(total, group, "loss") / self.mesh.ranks)[0]

    def close(self) -> None:
        """Close the messages between stages."""
        if self.messages is not None:
            self.messages.close()


def _uncut(named: Iterable[tuple[Any, Any]]) -> set[Any]:
    """Paths of the inputs that have no row for each sample, as another length than the first one's shows."""
    long = [(path, len(each)) for path, each in named if isinstance(each, Tensor) and each.dim() > 0]
    return {path for path, length in long if length not in (1, long[0][1])}


def loss_in(result: Any) -> Tensor:
    """Loss in a model's result: itself if it is one number, else its `loss` or its first element.

    UsageError for a result without a loss.
    """
    found = result
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif not isinstance(result, Tensor):
        found = getattr(result, "loss", None)
        if found is None and isinstance(result, (tuple, list)) and result:
            found = result[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise UsageError(
            f"train_step() got {type(result).__name__} from the model and found no loss of one number in it; pass "
            "labels, or give spec=ParallelSpec(loss=function of the model's result)"
        )
    return found.reshape(())
