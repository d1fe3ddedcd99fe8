"""Pipeline stage of a training run of a transformers model, built from its configuration and its weights, if any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oases.autotp import parallelize
from oases.autotp.configuration import configuration, configured_model, read_configuration
from oases.core.execution.group import ProcessGroup
from oases.distributed.mesh import Mesh
from oases.distributed.messages import StageMessages
from oases.errors import UsageError
from oases.layers.loss import IGNORED
from oases.plans.plan import Plan
from oases_train.adapters import add_adapters

_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 3e-4}
"""Largest relative difference of a loss from rounding, by the type of weights."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' classes that predict the next token."""
_ENDS = ("decoder_start_token_id", "pad_token_id")
"""Tokens that an encoder-decoder makes its decoder's input of labels with."""
_BY_PADDING = ("mbart", "plbart")
"""Kinds that do so without the first of them."""
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def trained_configuration(path: str) -> Any:
    """Configuration of a model that predicts the next token, or a text from another; of a config.json or its folder.

    A decoder alone, or with an encoder of text. UsageError for a file that is not one, and for other kinds of models:
    where the file says so, before transformers, which takes seconds, is imported.
    """
    data = read_configuration(Path(path), "--model")
    named = data.get("architectures") or []
    names = [str(name) for name in named] if isinstance(named, (list, tuple)) else []
    causal = not names or any(name.endswith(_CAUSAL) for name in names)
    if causal or any(name.endswith(("Generation", "MTModel")) for name in names):
        found = configuration(data)
        if found.is_encoder_decoder and _translates(found, names):
            unknown = [name for name in _SIZES if not isinstance(getattr(found, name, None), int)]
            if unknown:
                raise UsageError(
                    f"--model {path!r} has no {unknown[0]}, but sizes of its encoder and decoder apart; train it by "
                    "oases.parallelize(model, mesh=...) in a custom training loop"
                )
            ends = _ENDS[1:] if found.model_type in _BY_PADDING else _ENDS
            missing = [name for name in ends if getattr(found, name, None) is None]
            if missing:
                raise UsageError(
                    f"--model {path!r} has no {missing[0]}, from which a decoder's inputs are made; set it in its "
                    "config.json"
                )
            return found
        if causal and not found.is_encoder_decoder:
            return found
    kind = data.get("model_type")
    what = f"{kind} of {named}" if named else kind
    raise UsageError(
        f"--model {path!r} is {what}; oases train trains models that predict the next token, or a text from another; "
        "train others by oases.parallelize(model, mesh=...) in a custom training loop, with what the model takes"
    )


def _translates(found: Any, names: Sequence[str]) -> bool:
    """Whether the model of these names, or of its kind where there are none, predicts a text from another."""
    import transformers

    mapping: Any = transformers.AutoModelForSeq2SeqLM._model_mapping  # type: ignore[attr-defined]
    return type(found) in mapping and (not names or mapping[type(found)].__name__ in names)


def num_layers(found: Any) -> int:
    """Layers of a configuration, of its encoder and its decoder."""
    layers: int = found.num_hidden_layers
    if not found.is_encoder_decoder:
        return layers
    encoder = getattr(found, "encoder_layers", getattr(found, "num_encoder_layers", layers))
    decoder = getattr(found, "decoder_layers", getattr(found, "num_decoder_layers", layers))
    return int(encoder) + int(decoder)


def build_model(
    path: str, seed: int, plan: Plan, mesh: Mesh, *, lora: Any = None, device: torch.device, **options: Any
) -> nn.Module:
    """Model of a run on its ranks: with the weights of the folder where it has any, else with random ones.

    Random weights depend on the seed alone. lora: LoraConfig of adapters, which alone are trained then; None for
    none. options: of `parallelize`. Collective over all ranks.
    """
    weights = weights_of(path)
    torch.manual_seed(seed)
    data = read_configuration(Path(path), "--model")
    model = configured_model(data, device="cpu" if weights is None else "meta").train()
    if lora is not None:
        model = add_adapters(model, lora, device)
    options |= {"weights": weights, "device": device, "micro_batches": plan.micro_batches}
    return parallelize(model, mesh=mesh, plan=plan, **options)


def weights_of(path: str) -> str | None:
    """Folder of the safetensors beside a model's configuration; None where there are none."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return str(folder) if any(folder.glob("*.safetensors")) else None


class ModelStage:
    """A stage of a model that `build_model` made."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = model
        training: Any = model.oases_pipeline
        self._training = training
        self.messages: StageMessages | None = training.messages
        self.tensor_parallel = plan.uniform_tp or 1

    @property
    def counted_elsewhere(self) -> Sequence[nn.Parameter]:
        """Tied parameters that an earlier stage counts in the gradient norm."""
        found: Sequence[nn.Parameter] = self._training.counted_elsewhere
        return found

    def parts(self) -> Iterable[tuple[list[nn.Parameter], ProcessGroup | None]]:
        """All trained parameters with their data-parallel group."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return [(trained, self._training.mesh.data(self.tensor_parallel))]

    def prepare(self, dtype: torch.dtype) -> None:
        """Do nothing: the model shards its weights and averages its gradients itself."""

    def begin(self, number: int) -> None:
        """Set the number of the next pass in the whole training, from which random numbers are derived."""
        self._training.begin(number)

    def backward(self, samples: dict[str, Tensor]) -> float:
        """Run a step's forward and backward passes; returns the loss. Gradients are of the whole batch."""
        return float(self._training.train_step(**samples))

    def evaluate(self, batches: Sequence[dict[str, Tensor]]) -> float:
        """Run forward passes only; returns the mean loss of the batches."""
        return sum(float(self._training.eval_step(**samples)) for samples in batches) / len(batches)

    def require_packable(self, samples: dict[str, Tensor], vocabulary: int) -> None:
        """Raise UsageError, on all ranks, where a packed example attends to the one before it in its row.

        samples: rows of this rank, of which the tokens are taken. Positions alone separate packed examples, and some
        models build no mask from them. Two batches that differ in the first example of each row must have the same
        loss on the second one; up to rounding, as a mixture of experts multiplies other tokens together.
        """
        tokens = samples["input_ids"]
        half, sequence = tokens.shape[1] // 2, tokens.shape[1]
        if sequence < 3:  # no room for two
            return
        places = torch.arange(sequence, device=tokens.device)
        labels, other = tokens.clone(), tokens.clone()
        labels[:, : half + 1] = labels[:, half + 5 :] = IGNORED  # by those near the border, which a leak changes most
        other[:, :half] = other[:, :half] % (vocabulary - 1) + 1
        given = {
            "labels": labels,
            "position_ids": torch.where(places < half, places, places - half).expand_as(tokens),
        }
        self._model.eval()
        try:
            one, two = (self.evaluate([{"input_ids": each, **given}]) for each in (tokens, other))
        finally:
            self._model.train()
        if abs(one - two) > _ROUNDING[next(self._model.parameters()).dtype] * abs(one):
            raise UsageError(
                f"instruction data: {type(self._model).__name__} does not separate the examples of a row by "
                f"position_ids: the loss of one changes from {one:.6f} to {two:.6f} with the one before it; train it "
                "on text, or by oases.parallelize(model, mesh=...) in a custom training loop, one example in each row"
            )

    def close(self) -> None:
        """Close the messages."""
        self._training.close()
