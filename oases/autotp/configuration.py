"""Build the model of a transformers configuration file without downloading weights or running remote code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oases.errors import UsageError
from oases.files import read_json
from oases.limits import MOST_LAYERS

LARGEST_FILE = 2**26
"""Maximum size of a configuration file in bytes."""
_HEADS = (
    "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification",
    "AutoModelForSpeechSeq2Seq", "AutoModelForPreTraining", "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification", "AutoModelForQuestionAnswering", "AutoModel",
)  # fmt: skip
"""Auto classes of transformers; the first that supports the model is used if the file does not name one."""

_DECODER = "num_decoder_layers"
_LEFT_OUT = frozenset({
    "auto_map", "custom_pipelines", "quantization_config", "attn_implementation", "_attn_implementation",
    "experts_implementation", "_experts_implementation", "dtype", "torch_dtype",
})  # fmt: skip
"""Fields that name code to load (kernels on the hub included) or the format of weights."""


def read_configuration(path: Path, asked: str, what: str = "a config.json") -> dict[str, Any]:
    """Read the object in a JSON file, or in the config.json of a folder.

    asked: the option that gave the path; what: description of valid files. Both are for the UsageError.
    """
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise UsageError(f"{asked}: {str(path)!r} is not a file; give {what}, or a folder with a config.json")
    data = read_json(path, f"{asked}:", f"give {what}", LARGEST_FILE, strict=False)
    if not isinstance(data, dict):
        raise UsageError(f"{asked}: {str(path)!r} is not a JSON object; give {what}")
    return data


def configuration(data: Mapping[str, Any]) -> Any:
    """Convert the content of a config.json to a transformers configuration.

    Never runs code that the file names. Raises UsageError if transformers is not installed, does not know the
    model, or rejects the values.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "a config.json is read by transformers, which is not installed; pip install transformers"
        ) from error
    kind, known = data.get("model_type"), transformers.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        raise UsageError(
            f"model_type {kind!r} is not one of the {len(list(known))} that transformers {transformers.__version__} "
            "builds without remote code; give a config.json of a supported model"
        )
    _require_few_layers(data)
    try:
        return known[kind].from_dict(_plain(data))
    except Exception as error:  # configuration classes may raise anything
        raise UsageError(f"{kind}: invalid configuration: {_in_a_line(error)}") from error


def with_layers(data: Mapping[str, Any], layers: int, asked: str = "--layers") -> dict[str, Any]:
    """A configuration with another number of layers. UsageError where it says something of each of them."""
    found = configuration(data)
    name = found.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    before = getattr(found, name, None)
    if before == layers:
        return dict(data)
    listed = [key for key, value in data.items() if isinstance(value, list) and len(value) == before]
    if before is None or listed:
        why = f"lists {', '.join(listed)} layer by layer" if listed else f"has no {name}"
        raise UsageError(f"{asked} {layers}: the configuration of {data['model_type']} {why}; change it in the file")
    decoder = {_DECODER: layers} if isinstance(data.get(_DECODER), int) else {}
    return {**data, name: layers, **decoder}


def configured_model(data: Mapping[str, Any], dtype: str = "float32", device: str = "meta") -> nn.Module:
    """Build the model of a config.json's content with parameters of `dtype`: on `meta`, or random on another
    device.

    Raises UsageError as `configuration` does, and if no model can be built.
    """
    config = configuration(data)
    kind = config.model_type
    import transformers

    builder = _builder(transformers, config, data.get("architectures"))
    try:
        with torch.device(device):
            model: nn.Module = builder.from_config(config, trust_remote_code=False, dtype=getattr(torch, dtype))
    except Exception as error:
        raise UsageError(f"{kind}: cannot build a model from its configuration: {_in_a_line(error)}") from error
    return model


def _builder(transformers: Any, config: Any, asked: Any) -> Any:
    names = asked if isinstance(asked, list) else []
    found: dict[str, Any] = {}
    for builder in (getattr(transformers, head) for head in _HEADS if hasattr(transformers, head)):
        if type(config) in builder._model_mapping:
            made = builder._model_mapping[type(config)]
            for each in made if isinstance(made, (list, tuple)) else (made,):
                found.setdefault(each.__name__, builder)
    chosen = next((found[name] for name in names if name in found), None)
    if chosen is None and (names or not found):
        raise UsageError(
            f"{config.model_type}: architectures {names} are not supported; known are {', '.join(found)}"
        )
    return chosen or next(iter(found.values()))


def _plain(data: Any) -> Any:
    """Remove fields that name code, at any depth."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items() if key not in _LEFT_OUT}
    return [_plain(value) for value in data] if isinstance(data, list) else data


def _require_few_layers(data: Mapping[str, Any]) -> None:
    for name, value in data.items():
        if isinstance(value, Mapping):
            _require_few_layers(value)
        elif isinstance(value, int) and "layer" in name and value > MOST_LAYERS:
            raise UsageError(f"{name} must be at most {MOST_LAYERS}, got {value}")


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


SEQUENCE = 1024
"""Default tokens per sample for models with enough positions."""
_OWN = "give its own with inputs=(args, kwargs)"


def sample_inputs(model: nn.Module, batch: int, sequence: int | None) -> dict[str, Any]:
    """Keyword arguments of a forward pass of `batch` samples. Raises UsageError if the inputs cannot be derived."""
    name = type(model).__name__
    config, wanted = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or wanted is None:
        raise UsageError(f"model {name} is not a transformers model, so its inputs are unknown; {_OWN}")
    if batch < 1 or (sequence is not None and sequence < 1):
        raise UsageError(f"batch and sequence must be at least 1, got {batch} and {sequence}")
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    takes = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    tokens = torch.empty(batch, _length(name, config, sequence), dtype=torch.int64, device="meta")
    if wanted == "input_ids":
        found[wanted] = tokens
    elif wanted == "pixel_values":
        found[wanted] = torch.empty(batch, *_image(name, config), dtype=dtype, device="meta")
    elif wanted == "input_features":
        bins, positions = (_size(name, config, each) for each in ("num_mel_bins", "max_source_positions"))
        found[wanted] = torch.empty(batch, bins, 2 * positions, dtype=dtype, device="meta")  # a convolution halves it
    else:
        raise UsageError(f"model {name} takes {wanted}, whose shape its configuration does not give; {_OWN}")
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = torch.empty_like(tokens)
    return found


def _length(name: str, config: Any, sequence: int | None) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = (getattr(text, each, None) for each in ("max_position_embeddings", "max_target_positions"))
    limit = next((each for each in limits if isinstance(each, int) and each > 0), None)
    if sequence is None:
        return min(SEQUENCE, limit or SEQUENCE)
    if limit is not None and sequence > limit:
        raise UsageError(f"sequence {sequence} is longer than the {limit} positions of {name}; give at most {limit}")
    return sequence


def _image(name: str, config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", None)
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    if not isinstance(height, int) or not isinstance(width, int):
        raise UsageError(f"model {name} takes pixel_values, but its configuration has no image_size; {_OWN}")
    return _size(name, config, "num_channels"), height, width


def _size(name: str, config: Any, field: str) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int):
        raise UsageError(f"model {name}: its configuration has no {field}; {_OWN}")
    return value
