"""Weights of partitioned models: from files to ranks, from ranks to files, equal to the last bit."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from autotp.partitioned import KINDS, Mixed, build, message, partition, same
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from oases.autotp.gathering import full_state_dict, gather_state
from oases.autotp.pretrained import save_pretrained
from oases.autotp.weights import load_full_state_dict, load_weights
from oases.core.blocks.sharding import cuts
from oases.errors import UsageError


def _pass_on(kind, more, source, target, max_shard_bytes):
    model = build(kind, **more)
    load_weights(model, source)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    save_pretrained(model, target, max_shard_bytes=max_shard_bytes)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("gpt2", {}), ("gpt2", {"tie_word_embeddings": False}), ("llama", {}), ("llama", {"tie_word_embeddings": True})],
)
def test_from_transformers_over_two_and_four_ranks_back_to_transformers(kind, more, two_ranks, four_ranks, tmp_path):
    model = KINDS[kind](**more)
    model.save_pretrained(tmp_path / "one")
    parts = two_ranks.run(_pass_on, kind, more, tmp_path / "one", tmp_path / "two", 4096)
    four_ranks.run(_pass_on, kind, more, tmp_path / "two", tmp_path / "four", 10**9)
    assert (tmp_path / "two" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "four" / "model.safetensors").is_file()
    for folder in ("two", "four"):
        same(AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict(), model.state_dict())
    how = build(kind, **more)
    for name, whole in model.named_parameters():
        cut = cuts(how).get(id(how.get_parameter(name)))
        for rank, part in enumerate(parts):
            expected = whole if cut is None else cut.take(whole, rank, 2)
            assert torch.equal(part[name], expected), name


def _mixed(source, target):
    model = build("mixed")
    load_weights(model, source)
    assert model.head.weight is model.table.weight
    save_pretrained(model, target)
    gathered = list(gather_state(model))
    assert sorted(name for name, _ in gathered) == sorted(model.state_dict())
    first = dist.get_rank() == 0
    assert all((tensor is not None) == first for _, tensor in gathered)
    state = full_state_dict(model)
    assert bool(state) == first
    again = build("mixed", "cpu")
    kept = dict(again.named_parameters())
    load_full_state_dict(again, state)
    assert all(parameter is kept[name] for name, parameter in again.named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    fresh = build("mixed")
    load_full_state_dict(fresh, state)
    same(full_state_dict(fresh), state)
    return state


@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
def test_segments_uneven_parts_ties_and_every_type(pool, request, tmp_path):
    model = Mixed()
    state = model.state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "whole.safetensors")
    found = request.getfixturevalue(pool).run(_mixed, tmp_path / "whole.safetensors", tmp_path / "saved")[0]
    same(found, model.state_dict())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(state)
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def _small_blocks(kind, source, target):
    import oases.distributed.shard_map as shard_map
    import oases.safetensors_files as files

    before = shard_map.BLOCK_BYTES, files.MAPPED_BYTES
    shard_map.BLOCK_BYTES, files.MAPPED_BYTES = 100, 300
    try:
        model = build(kind)
        load_weights(model, source)
        save_pretrained(model, target)
        again = build(kind)
        load_full_state_dict(again, full_state_dict(model))
        return full_state_dict(again)
    finally:
        shard_map.BLOCK_BYTES, files.MAPPED_BYTES = before


@pytest.mark.parametrize("kind", ["mixed", "gpt2"])
def test_tensors_of_many_blocks(kind, two_ranks, tmp_path):
    model = KINDS[kind]()
    save_pretrained(partition(model, None, device="cpu"), tmp_path / "whole")
    same(two_ranks.run(_small_blocks, kind, tmp_path / "whole", tmp_path / "saved")[0], model.state_dict())
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], model.state_dict()[name]) for name in saved)


def test_prefix_of_the_base_model_both_ways(tmp_path):
    base, headed = KINDS["gpt2 base"](), KINDS["gpt2"]()
    base.save_pretrained(tmp_path / "base")
    headed.save_pretrained(tmp_path / "headed")
    published = load_file(tmp_path / "base" / "model.safetensors")
    published["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # the mask that GPT-2's first files hold
    save_file(published, tmp_path / "base" / "model.safetensors")
    model = build("gpt2")
    load_weights(model, tmp_path / "base")
    same(model.transformer.state_dict(), base.state_dict())
    assert model.lm_head.weight is model.transformer.wte.weight
    model = build("gpt2 base")
    load_weights(model, tmp_path / "headed")
    same(model.state_dict(), headed.transformer.state_dict())


def test_old_names_are_renamed_and_old_buffers_left_out():
    model = KINDS["bert"]()
    state = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): t for name, t in model.state_dict().items()}
    assert list(state) != list(model.state_dict())
    state["embeddings.position_ids"] = torch.arange(512)
    other = build("bert")
    load_weights(other, state)
    same(other.state_dict(), model.state_dict())


def test_a_tied_parameter_stays_one_with_what_its_author_set():
    model = build("gpt2")
    model.transformer.wte.weight.requires_grad_(False)
    model.transformer.wte.weight.note = "mine"
    load_weights(model, KINDS["gpt2"]().state_dict(), dtype=torch.bfloat16)
    weight = model.lm_head.weight
    assert weight is model.transformer.wte.weight
    assert (weight.requires_grad, weight.note, weight.dtype) == (False, "mine", torch.bfloat16)
    assert len({id(parameter) for parameter in model.parameters()}) == len(list(model.parameters()))


def test_real_parameters_are_filled_in_place_in_the_type_asked_for():
    whole = KINDS["llama"]()
    model = build("llama", "cpu")
    kept = dict(model.named_parameters())
    load_weights(model, whole.state_dict(), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        assert parameter is kept[name]
        assert torch.equal(parameter, whole.get_parameter(name).double())


@pytest.fixture
def saved(tmp_path):
    """A folder of several files of an ordinary model."""
    save_pretrained(nn.Linear(4, 6), tmp_path / "saved", max_shard_bytes=1)
    return tmp_path / "saved"


def _second(saved):
    return saved / "model-00002-of-00002.safetensors"


def _truncate(saved):
    data = _second(saved).read_bytes()
    _second(saved).write_bytes(data[:-3])


def _with(tensors, *removed):
    def change(saved):
        for file in saved.iterdir():
            file.unlink()
        state = {"weight": torch.zeros(6, 4), "bias": torch.zeros(6), **tensors}
        save_file({name: t for name, t in state.items() if name not in removed}, saved / "model.safetensors")

    return change


def _point_at(file):
    def change(saved):
        index = json.loads((saved / "model.safetensors.index.json").read_text())
        index["weight_map"]["bias"] = file
        (saved / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def _pickle(saved):
    for file in saved.iterdir():
        file.unlink()
    torch.save({}, saved / "pytorch_model.bin")


def _twice(saved):
    (saved / "model.safetensors.index.json").unlink()
    shutil.copy(_second(saved), saved / "more.safetensors")


def _pipe(name):
    def change(saved):
        (saved / name).unlink()
        os.mkfifo(saved / name)

    return change


FAULTS = {
    "pipe": (_pipe("model-00002-of-00002.safetensors"), r"names 'model-00002-.*' for 1 tensors, but there"),
    "pipe for an index": (_pipe("model.safetensors.index.json"), r"index.json' is not a file but a pipe"),
    "truncated": (_truncate, r"00002-of-00002.* is not a complete safetensors file: .*truncated.*download it again"),
    "corrupt": (lambda saved: _second(saved).write_bytes(b"version https://git-lfs"), r"Git LFS.*download it again"),
    "no shard": (
        lambda saved: _second(saved).unlink(),
        r"names 'model-00002-.*' for 1 tensors, but there is no such",
    ),
    "other index": (_point_at("model-00001-of-00002.safetensors"), r"'bias' is in 'model-00001-.*', which lacks it"),
    "outside": (_point_at("../bias.safetensors"), r"names '../bias.safetensors' outside its folder"),
    "no map": (lambda saved: (saved / "model.safetensors.index.json").write_text("{}"), r"no 'weight_map'"),
    "no JSON": (lambda saved: (saved / "model.safetensors.index.json").write_text("{"), r"is not JSON"),
    "twice": (_twice, r"tensor 'bias' is in .*00002-of-00002.* and in .*more.safetensors'; leave one"),
    "pickle": (_pickle, r"pytorch_model.bin' is a pickle.*weights_only=True"),
    "nothing": (lambda saved: [file.unlink() for file in saved.iterdir()], r"holds no \*.safetensors"),
    "missing": (_with({}, "bias"), r"lacks 1 tensors that Linear needs: 'bias'; give"),
    "extra": (
        _with({"more": torch.zeros(1)}),
        r"holds 1 tensors that Linear has no place for: 'more'; .*strict=False",
    ),
    "shape": (_with({"bias": torch.zeros(5)}), r"'bias' has shape \(5,\) in .* and \(6,\) in Linear"),
    "int8": (_with({"weight": torch.zeros(6, 4, dtype=torch.int8)}), r"is quantised: 'weight \(torch.int8\)'"),
    "fp8": (
        _with({"weight": torch.zeros(6, 4).to(torch.float8_e4m3fn)}),
        r"quantised: 'weight \(torch.float8_e4m3fn",
    ),
    "gptq": (_with({"qweight": torch.zeros(6), "0.qweight": torch.zeros(6)}, "weight"), r"quantised: '0.qweight'"),
    "config": (
        lambda saved: (saved / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'),
        r"config.json has a quantization_config of gptq",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_files_is_named_before_anything_is_filled(fault, saved):
    change, message = FAULTS[fault]
    load_weights(nn.Linear(4, 6), saved)
    change(saved)
    model = nn.Linear(4, 6)
    before = model.weight.clone()
    with pytest.raises(UsageError, match=f"(?s){message}"):
        load_weights(model, saved)
    assert torch.equal(model.weight, before)


def test_other_places_are_refused_and_extra_tensors_passed_over_on_demand(saved):
    with pytest.raises(UsageError, match=r"'meta/llama' is neither a file nor a folder.*snapshot_download"):
        load_weights(nn.Linear(4, 6), "meta/llama")
    state = {"weight": torch.zeros(6, 4), "bias": torch.zeros(6), "more": torch.zeros(1)}
    assert load_weights(nn.Linear(4, 6), state, strict=False) == ["more"]
    index = saved / "model.safetensors.index.json"
    assert load_weights(nn.Linear(4, 6), index) == []


def test_another_type_of_what_is_no_float_is_refused():
    state = Mixed().state_dict()
    state["mask"] = state["mask"].to(torch.int64)
    with pytest.raises(UsageError, match=r"'mask' is of torch.int64 in 'the mapping' and of torch.bool in Mixed"):
        load_weights(build("mixed"), state)


def test_two_values_for_a_tied_parameter_are_refused():
    state = KINDS["gpt2"]().state_dict()
    load_weights(build("gpt2"), state)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(UsageError, match=r"2 tensors for 'transformer.wte.weight', .*tie_word_embeddings=False"):
        load_weights(build("gpt2"), state)


def test_an_architecture_whose_weights_are_computed_from_the_files_is_named(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
        "vocab_size": 9,
    }
    config = MixtralConfig(num_attention_heads=2, num_key_value_heads=2, bos_token_id=0, eos_token_id=1, **sizes)
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        other = MixtralForCausalLM(config)
    with pytest.raises(UsageError, match=r"layout of the original mixtral, but MixtralForCausalLM computes"):
        load_weights(other, tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours", save_original_format=False)
    load_weights(other, tmp_path / "ours")
    same(other.state_dict(), model.state_dict())
    save_pretrained(other, tmp_path / "again")
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict(), model.state_dict())


def _own_folders(folders):
    model = build("mixed", "cpu")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    said = message(load_weights, model, folders[dist.get_rank()])
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    dist.barrier()  # the group is as it was
    return said


def test_what_one_rank_cannot_read_is_raised_on_all(two_ranks, tmp_path):
    save_pretrained(Mixed(), tmp_path / "whole")
    first, second = two_ranks.run(_own_folders, [tmp_path / "whole", tmp_path / "lost"])
    assert first.startswith("UsageError: rank 1: UsageError: '")
    assert "neither a file nor a folder" in second
    assert second in first
