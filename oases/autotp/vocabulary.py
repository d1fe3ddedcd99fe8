"""Vocabulary-parallel embeddings and heads of an unedited model, converted in place.

Modules keep their names and options; subclasses of `nn.Embedding` and `nn.Linear` keep their own forward: only
`nn.Embedding.forward` and `nn.Linear.forward` are replaced, to run on this rank's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from oases.autotp.logits import VocabularyLogits
from oases.core.blocks.sharding import Cut, register_shards
from oases.core.execution.group import HoldsGroup, ProcessGroup, group_rank, group_size
from oases.layers.chunks import Chunks, NumChunks
from oases.layers.embedding import look_up
from oases.layers.linear import under_autocast


@dataclass(frozen=True)
class Vocabulary:
    """Modules of a model whose rows are the tokens of its vocabulary, by name.

    rows: number of tokens. tables: input embeddings, several where modules share a parameter. heads: linears that
    give a logit per token.
    """

    rows: int
    tables: dict[str, nn.Embedding]
    heads: dict[str, nn.Linear]

    def held_by(self, model: nn.Module) -> Vocabulary | None:
        """Those modules that a stage of a pipeline still has; None without any."""
        held = set(model.parameters())
        tables = {name: table for name, table in self.tables.items() if table.weight in held}
        heads = {name: head for name, head in self.heads.items() if head.weight in held}
        return Vocabulary(self.rows, tables, heads) if tables or heads else None


def find_vocabulary(model: nn.Module) -> Vocabulary | None:
    """Vocabulary of a model, None for a model without one.

    The table is `model.get_input_embeddings()` where that method exists. Otherwise it is, of the embeddings outside
    layer lists (`nn.ModuleList`), the one with the most rows that has a head, or else the one with the most rows if
    those are at least twice its width: tables of positions and token types are smaller. Heads are the linears that
    share the table's parameter, and those of its shape that are `model.get_output_embeddings()` or in no layer list.
    """
    embeddings = dict(_outside_lists(model, nn.Embedding))
    linears = dict(_outside_lists(model, nn.Linear))
    given = _given(model, "get_input_embeddings")
    if given is not None:
        return _vocabulary(model, given, linears) if isinstance(given, nn.Embedding) else None
    by_rows = sorted(embeddings.values(), key=lambda table: -table.num_embeddings)
    for table in by_rows:
        found = _vocabulary(model, table, linears)
        if found.heads:
            return found
    if by_rows and by_rows[0].num_embeddings >= 2 * by_rows[0].embedding_dim:
        return _vocabulary(model, by_rows[0], linears)
    return None


def _vocabulary(model: nn.Module, table: nn.Embedding, linears: dict[str, nn.Linear]) -> Vocabulary:
    output = _given(model, "get_output_embeddings")
    rows, width = table.num_embeddings, table.embedding_dim
    tables, heads = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and holds_weight(module, table):
            tables[name] = module
        elif isinstance(module, nn.Linear):
            alike = (module.out_features, module.in_features) == (rows, width)
            if holds_weight(module, table) or (alike and (module is output or name in linears)):
                heads[name] = module
    return Vocabulary(rows, tables, heads)


def holds_weight(module: nn.Module, table: nn.Module) -> bool:
    """Whether a module has the weight of a table. A computed one is not read: a power iteration would go on."""
    weight = table._parameters.get("weight")
    return weight is not None and module._parameters.get("weight") is weight


def _given(model: nn.Module, method: str) -> Any:
    """Result of the method; None where there is no such method or it is not implemented."""
    ask = getattr(model, method, None)
    if ask is None:
        return None
    try:
        return ask()
    except NotImplementedError:  # raised by transformers for models without embeddings
        return None


def _outside_lists(module: nn.Module, kind: type[nn.Module], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, kind):
            yield path, child
        if not isinstance(child, nn.ModuleList):
            yield from _outside_lists(child, kind, path)


def shard_vocabulary(model: nn.Module, vocabulary: Vocabulary, process_group: ProcessGroup | None) -> None:
    """Shard all tables and heads of a model in place; shared parameters stay shared.

    A bias that another module also holds (BERT's `cls.predictions.bias`) is replaced there. Meta weights stay on
    meta. A group of one changes nothing. ValueError, with the model unchanged, for modules that cannot be sharded:
    see `shard_embedding` and `shard_head`; also for a table held by any other type of module, which would use its
    rows as the full table.
    """
    if group_size(process_group) == 1:
        return
    assert process_group is not None
    modules: list[nn.Embedding | nn.Linear] = [*vocabulary.tables.values(), *vocabulary.heads.values()]
    for module in modules:
        _require_cuttable(module, process_group)
    _require_no_other_holder(model, modules)
    whole = dict.fromkeys(parameter for module in modules for parameter in module.parameters(recurse=False))
    parts: dict[Any, nn.Parameter] = {parameter: _part_of(parameter, process_group) for parameter in whole}
    for module in modules:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        if isinstance(module, nn.Embedding):
            shard_embedding(module, process_group, parts[weight])
        else:
            shard_head(module, process_group, parts[weight], None if bias is None else parts[bias])
    for holder in model.modules():
        for name, held in holder._parameters.items():
            if held in parts:
                holder._parameters[name] = parts[held]


def _require_no_other_holder(model: nn.Module, modules: list[nn.Embedding | nn.Linear]) -> None:
    weights = {id(module._parameters["weight"]) for module in modules}
    known = {id(module) for module in modules}
    for name, holder in model.named_modules():
        for parameter_name, parameter in holder._parameters.items():
            if id(parameter) in weights and id(holder) not in known:
                raise ValueError(
                    f"{type(holder).__name__} {name!r} holds the vocabulary's table as {parameter_name!r}; only "
                    "nn.Embedding and nn.Linear can be vocabulary-parallel: use the table through one of them"
                )


def shard_embedding(embedding: nn.Embedding, process_group: ProcessGroup, weight: nn.Parameter | None = None) -> None:
    """Make a table vocabulary-parallel in place: tokens [...], equal on every rank -> [..., width], replicated.

    weight: this rank's rows, where another module shares them; else they are taken from the module's table. The
    padding row has no gradient, as in `nn.Embedding`. ValueError for options that need the full table (max_norm,
    sparse, scale_grad_by_freq), for fewer rows than ranks, and for a module that is sharded already.
    """
    _require_cuttable(embedding, process_group)
    _become(embedding, VocabularyEmbedding, nn.Embedding)
    _hold(embedding, process_group, embedding.num_embeddings, weight=weight)


def shard_head(
    head: nn.Linear,
    process_group: ProcessGroup,
    weight: nn.Parameter | None = None,
    bias: nn.Parameter | None = None,
) -> None:
    """Make an output head vocabulary-parallel in place: [..., width], replicated -> `VocabularyLogits`.

    weight, bias: this rank's rows, where other modules share them; else they are taken from the module. ValueError
    for fewer rows than ranks and for a module that is sharded already.
    """
    _require_cuttable(head, process_group)
    _become(head, VocabularyHead, nn.Linear)
    _hold(head, process_group, head.out_features, weight=weight, bias=bias)
    state: Any = head
    # Measured choices are keyed by the weight's shape, which differs between ranks where it does not divide.
    state.num_chunks = 2 if head.out_features % process_group.size() else "auto"
    state._chunks = Chunks("column")


class _Sharded(HoldsGroup):
    """Common state of tables and heads: their sharding, and whether a subclass's forward called ours."""

    shard_dims: dict[str, int]
    shard_segments: dict[str, tuple[int, ...]]
    _reached = False

    def _group(self) -> ProcessGroup:
        self._reached = True
        group = self.process_group
        assert group is not None
        return group


class VocabularyEmbedding(_Sharded, nn.Embedding):
    """An `nn.Embedding` after `shard_embedding`. weight: this rank's rows; num_embeddings: of the full table."""

    def forward(self, input: Tensor) -> Tensor:
        """Tokens [...] -> [..., width]."""
        return look_up(input, self.weight, self.num_embeddings, self._group(), self.padding_idx)

    def extra_repr(self) -> str:
        """Full sizes, then the sharding."""
        return f"{super().extra_repr()}, tensor_parallel={self.tensor_parallel}"


class VocabularyHead(_Sharded, nn.Linear):
    """An `nn.Linear` after `shard_head`. weight and bias: this rank's rows; out_features: of the full head.

    The backward pass overlaps the input gradient's all-reduce with the weight gradient.
    """

    num_chunks: NumChunks
    _chunks: Chunks

    def forward(self, input: Tensor) -> Tensor:
        """[..., width] -> logits [..., vocabulary]."""
        group = self._group()
        x, weight, bias = under_autocast(input, self.weight, self.bias)
        part = self._chunks.linear(self.num_chunks, x, weight, bias, self._group_name, False)
        return VocabularyLogits.of(part, self.out_features, group)

    def extra_repr(self) -> str:
        """Full sizes, then the sharding."""
        return f"{super().extra_repr()}, tensor_parallel={self.tensor_parallel}"


def _require_cuttable(module: nn.Module, process_group: ProcessGroup) -> None:
    """Raise ValueError, with the module unchanged, for a module that cannot be vocabulary-parallel."""
    what = type(module).__name__
    if isinstance(module, _Sharded):
        raise ValueError(f"{what} is vocabulary-parallel already; start from the original module")
    if isinstance(module, nn.Embedding):
        refused = {
            "max_norm": module.max_norm is not None,
            "scale_grad_by_freq": module.scale_grad_by_freq,
            "sparse": module.sparse,
        }
        for option in (option for option, given in refused.items() if given):
            raise ValueError(
                f"{what} with {option}={getattr(module, option)} cannot be vocabulary-parallel: "
                f"it needs the full table; leave {option} out"
            )
    if "forward" in vars(module):
        raise ValueError(
            f"the forward of this {what} was replaced on the object (by a hook of accelerate?), so it would not run "
            "on this rank's rows: remove the hook, or shard the model before adding it"
        )
    rows = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
    weight = module._parameters.get("weight")
    if weight is None or weight.shape[0] != rows:
        held = "no parameter 'weight'" if weight is None else f"a weight of shape {tuple(weight.shape)}"
        raise ValueError(f"{what} of {rows} rows has {held}; quantised and parametrised weights cannot be sharded")
    ranks = group_size(process_group)
    if -(-rows // ranks) * (ranks - 1) >= rows:  # by torch.chunk, the last rank would have none
        raise ValueError(
            f"{what} has {rows} rows, too few for the tensor-parallel degree {group_size(process_group)}; "
            "use a smaller degree, or replicate the module"
        )


def _become(module: nn.Module, ours: type[_Sharded], plain: type[nn.Module]) -> None:
    """Set the class to `ours`; a subclass keeps its forward, whose super() becomes `ours`."""
    theirs = type(module)
    module.__class__ = ours if theirs is plain else _mixed(theirs, ours)


_mixtures: dict[tuple[type, type], type] = {}


def _mixed(theirs: type, ours: type) -> type:
    """Subclass of the model's class and `ours`, under the model's name."""
    if (theirs, ours) not in _mixtures:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._reached = False
            result = super(mixture, self).forward(*args, **kwargs)
            if not self._reached:
                raise RuntimeError(
                    f"the forward of {theirs.__module__}.{theirs.__qualname__} does not call super().forward, so it "
                    "ran on this rank's rows as if they were all: replicate this module"
                )
            return result

        def reduce(self: Any, protocol: Any) -> Any:  # pickle cannot find this class by name
            return _blank, (theirs, ours), self.__dict__

        body = {"forward": forward, "__reduce_ex__": reduce, "__module__": theirs.__module__}
        mixture: Any = type(theirs.__name__, (theirs, ours), body)
        _mixtures[theirs, ours] = mixture
    return _mixtures[theirs, ours]


def _blank(theirs: type, ours: type) -> Any:
    """A module without attributes, for pickle and copy to fill."""
    mixture: Any = _mixed(theirs, ours)
    return mixture.__new__(mixture)


def _part_of(whole: nn.Parameter, process_group: ProcessGroup) -> nn.Parameter:
    """This rank's rows, a copy so that the full tensor can be freed."""
    cut = Cut(0, (whole.shape[0],))
    part = cut.take(whole.detach(), group_rank(process_group), group_size(process_group)).clone()
    parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
    # Attributes set by others, such as marks for optimizer groups and of transformers' initialisation.
    parameter.__dict__.update(whole.__dict__)
    return parameter


def _hold(module: Any, process_group: ProcessGroup, rows: int, **given: nn.Parameter | None) -> None:
    names = [name for name in given if module._parameters.get(name) is not None]
    for name in names:
        part = given[name]
        module._parameters[name] = _part_of(module._parameters[name], process_group) if part is None else part
    module.process_group = process_group
    module.shard_dims = dict.fromkeys(names, 0)
    module.shard_segments = dict.fromkeys(names, (rows,))
    register_shards(module)
