"""Buffers of models built on meta are recomputed."""

import pytest
import torch
from autotp.partitioned import KINDS, build
from torch import nn

from oases.autotp.gathering import materialize_buffers
from oases.errors import UsageError


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_buffers_in_no_file_are_those_of_a_model_built_for_real(kind):
    reference = KINDS[kind]()
    model = build(kind)
    materialize_buffers(model)
    buffers = dict(reference.named_buffers())
    assert buffers
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in model.parameters())


def test_computing_buffers_leaves_parameters_alone():
    model = KINDS["bert"]()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.embeddings.position_ids = model.embeddings.position_ids.to("meta")
    materialize_buffers(model)
    assert torch.equal(model.embeddings.position_ids, torch.arange(512).expand(1, -1))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_buffer_that_nobody_can_compute_is_named():
    layer = nn.Linear(2, 2)
    layer.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(UsageError, match=r"buffer '0.angles' is on meta, in no checkpoint, and Sequential does not"):
        materialize_buffers(nn.Sequential(layer))
    model = build("llama")
    model.model.norm.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(UsageError, match=r"'model.norm.angles' .* LlamaModel does not initialise it"):
        materialize_buffers(model)
    layer = nn.Linear(2, 2)
    layer.table = torch.empty(3, device="meta")
    with pytest.raises(UsageError, match=r"'table' is on meta and neither a parameter nor a buffer"):
        materialize_buffers(layer)
