"""Partitioned models saved: what they cost, what is refused, what else is in the folder."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from autotp.partitioned import KINDS, Mixed, build, message, partition, same
from autotp.weights_memory import peaks
from safetensors.torch import load_file

from oases.autotp.gathering import full_state_dict, gather_state
from oases.autotp.pretrained import save_pretrained
from oases.autotp.weights import load_weights
from oases.errors import UsageError


def _refused_saves(folder):
    return [
        message(save_pretrained, build("mixed"), folder / "new"),
        message(save_pretrained, build("mixed", "cpu"), folder / "others"),
        message(save_pretrained, build("mixed", "cpu"), folder / "others" / "notes.txt"),
    ]


def test_saves_that_cannot_be_are_refused_on_all_ranks(two_ranks, tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_text("mine")
    for meta, others, file in two_ranks.run(_refused_saves, tmp_path):
        assert "is on meta and has no value to save; load weights first" in meta
        assert "holds other files but no saved model" in others
        assert "is a file; give the path of a folder" in file
    assert (tmp_path / "others" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "new").exists()


def _full_disk(folder):
    import oases.autotp.pretrained as pretrained

    write, count = pretrained._File._put, [0]

    def fail(self, at, block):
        count[0] += 1
        if count[0] > 2:
            raise OSError(28, "No space left on device")
        write(self, at, block)

    pretrained._File._put = fail
    try:
        said = message(save_pretrained, build("mixed", "cpu"), folder)
    finally:
        pretrained._File._put = write
    dist.barrier()
    return said


def test_a_full_disk_leaves_the_saved_model_and_no_rank_waiting(two_ranks, tmp_path):
    save_pretrained(Mixed(), tmp_path / "saved")
    before = (tmp_path / "saved" / "model.safetensors").read_bytes()
    first, second = two_ranks.run(_full_disk, tmp_path / "saved")
    assert first == "OSError: [Errno 28] No space left on device"
    assert second == "RuntimeError: rank 0: OSError: [Errno 28] No space left on device"
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["saved"]


def test_saving_anew_keeps_what_others_put_there(tmp_path):
    model = KINDS["llama"]()
    save_pretrained(model, tmp_path / "saved", max_shard_bytes=2000)
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    save_pretrained(model, tmp_path / "saved")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert set(os.listdir(tmp_path / "saved")) == names
    (tmp_path / ".saved.old").mkdir()  # as a save leaves it that ends between its renames
    (tmp_path / "saved" / "tokenizer.json").rename(tmp_path / ".saved.old" / "tokenizer.json")
    save_pretrained(model, tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    assert set(os.listdir(tmp_path / "saved")) == names
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_files_are_as_large_as_asked(tmp_path):
    model = KINDS["gpt2"]()
    save_pretrained(model, tmp_path / "saved", max_shard_bytes=4000)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for file in (tmp_path / "saved").glob("*.safetensors"):
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 4000
    with pytest.raises(UsageError, match="max_shard_bytes is 0"):
        save_pretrained(model, tmp_path / "saved", max_shard_bytes=0)


@pytest.mark.long
def test_a_rank_needs_the_memory_of_its_part_to_load_and_to_save(tmp_path):
    runs = []
    for name in "first", "second", "third":  # the kernel counts pages per processor, now and then tens of MB too many
        (tmp_path / name).mkdir()
        size, found = peaks(2, tmp_path / name)
        runs.append(max(peak for pair in found for peak in pair))
        if runs[-1] < 1.2 * size / 2:
            break
    assert min(runs) < 1.2 * size / 2, runs


def _uncuttable():
    model = build("mixed", "cpu")
    model.fused.shard_segments["weight"] = (8, 4, 8)
    wrong = message(lambda: list(gather_state(model)))
    model = build("mixed", "cpu")
    model.fused._group_name = ""
    return wrong, message(lambda: list(gather_state(model)))


def test_cuts_that_do_not_fit_are_named(two_ranks):
    segments, group = two_ranks.run(_uncuttable)[0]
    assert "'fused.weight' of shape (8, 6) has 8 along dimension 0, where rank 0 of 2 holds 10" in segments
    assert "'fused.weight' is sharded over 2 ranks, its group has 1" in group


def _replicas(source, target):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with torch.device("meta"):
        model = partition(Mixed(), pairs[dist.get_rank() // 2])
    load_weights(model, source)
    save_pretrained(model, target)
    return full_state_dict(model), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_replicas_hold_the_same_and_one_of_them_is_saved(four_ranks, tmp_path):
    model = Mixed()
    save_pretrained(partition(model, None, device="cpu"), tmp_path / "whole")
    found = four_ranks.run(_replicas, tmp_path / "whole", tmp_path / "saved")
    same(found[0][0], model.state_dict())
    assert not any(state for state, _ in found[1:])
    same(found[2][1], found[0][1])
    same(found[3][1], found[1][1])
