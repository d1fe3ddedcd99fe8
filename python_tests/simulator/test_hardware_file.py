"""Profiles as files: what is written is read back, and every mistake is named with its remedy."""

import json
import os

import pytest

from oases.errors import UsageError
from oases.plans.gpt import kind_called, model_called
from oases.simulator.cluster import cluster_called, known_clusters
from oases.simulator.cost import BlockTimes
from oases.simulator.hardware import Device, Hardware, MeasuredBlock, MeasuredOverhead
from oases.simulator.hardware_file import read_hardware, to_json, write
from oases.simulator.links import LinkModel, Sample
from oases.simulator.program import Contention

TIMES = BlockTimes(0.01, 0.009, 0.001, 0.008, 0.0095, 0.0005, 0.02, 0.015)
HARDWARE = Hardware(
    name="two boxes",
    device=Device("box", 16 << 30, {"float32": 1e12}, 1e11, 5e-6, packing_bytes_per_second=2e9),
    ranks_per_node=2,
    node=LinkModel(1e-5, 1e10),
    cluster=LinkModel(5e-5, 1e9, Contention(1.1, 1.3), (Sample("all_reduce", 4, 1 << 20, 0.002),)),
    blocks=(
        MeasuredBlock("attention", 64, 4, 32, "float32", 2, 1.0, TIMES),
        MeasuredBlock("mlp", 64, 4, 32, "float32", 2, 1.0, TIMES.scaled(2)),
    ),
    about="made up",
    date="2026-01-01",
    overheads=(MeasuredOverhead(64, 4, 32, "float32", 2, 3, 4.0, 2, 1e-3, 2e-3),),
)


def data():
    return json.loads(to_json(HARDWARE))


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "h.json"
    write(HARDWARE, path)
    assert read_hardware(path) == HARDWARE
    assert read_hardware(str(path)) == HARDWARE
    assert read_hardware(path.read_text()) == HARDWARE
    assert os.listdir(tmp_path) == ["h.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "h.json"
    path.write_text("precious")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(HARDWARE, path)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["h.json"]


def test_what_may_miss():
    body = data()
    for name in ("about", "date", "blocks", "overheads"):
        del body[name]
    del body["device"]["launch_seconds"]
    del body["links"]["node"]["contention"], body["links"]["node"]["samples"]
    read = read_hardware(json.dumps(body))
    assert read.blocks == ()
    assert read.node == HARDWARE.node
    assert read.device.launch_seconds == 0


@pytest.mark.parametrize(
    ("rates", "rate"), [({"int8": 3e9, "fp8": 2e9, "int4": 1e9}, 3e9), ({"int4": 1e9}, 0), ({}, 0)]
)
def test_rates_of_former_codes_are_read_and_dropped(rates, rate):
    read = read_hardware(changed(("device", "packing_bytes_per_second"), rates))
    assert read.device.packing_bytes_per_second == rate
    assert "int4" not in to_json(read)
    assert read_hardware(to_json(read)) == read


DELETE = object()


def changed(path, value):
    body = data()
    *way, last = path
    at = body
    for step in way:
        at = at[step]
    if value is DELETE:
        del at[last]
    else:
        at[last] = value
    return json.dumps(body)


BLOCK = ("blocks", 0)
CLUSTER = ("links", "cluster")


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        (("version",), 2, ["version 2", "reads version 1", "oases profile"]),
        (("format",), "oases plan", ["not a hardware profile", "oases profile --json"]),
        (("device",), DELETE, ["'device' is missing"]),
        (("device",), [], ["device must be an object"]),
        (("device", "memory_bytes"), 24, ["memory_bytes", "the unit is bytes"]),
        (("device", "memory_bytes"), 24.5e9, ["memory_bytes", "whole number of bytes"]),
        (("device", "memory_gib"), 24, ["unknown field 'memory_gib'", "'memory_bytes'"]),
        (("device", "flops_per_second"), {}, ["flops_per_second must be an object"]),
        (("device", "flops_per_second"), {"float32": 35.6}, ["float32 is 35.6", "not TFLOP/s"]),
        (("device", "flops_per_second"), {"fp32": 1e12}, ["'fp32'", "bfloat16"]),
        (("device", "packing_bytes_per_second"), 3.5, ["packing_bytes_per_second is 3.5", "not GB/s"]),
        (("device", "packing_bytes_per_second"), {"int2": 1e9}, ["'int2'", "known are int8, fp8, int4"]),
        (("ranks_per_node",), 0, ["ranks_per_node", "at least 1, got 0"]),
        (("ranks_per_node",), True, ["ranks_per_node", "got True"]),
        (("name",), 3, ["name must be a text"]),
        (("link",), {}, ["unknown field 'link'", "did you mean 'links'"]),
        (("links", "cluster"), DELETE, ["links: field 'cluster' is missing"]),
        ((*CLUSTER, "bytes_per_second"), 12.5, ["bytes_per_second is 12.5", "not GB/s"]),
        ((*CLUSTER, "bytes_per_second"), 0, ["must be above 0"]),
        ((*CLUSTER, "bytes_per_second"), -1e9, ["must be above 0"]),
        ((*CLUSTER, "bytes_per_second"), float("inf"), ["links: cluster: bytes_per_second must be finite, got inf"]),
        ((*CLUSTER, "bytes_per_second"), 10**400, ["must be finite"]),
        ((*CLUSTER, "startup_seconds"), -1e-6, ["startup_seconds must be at least 0"]),
        ((*CLUSTER, "contention"), {"compute_slowdown": 0.9}, ["at least 1", "0.9"]),
        ((*CLUSTER, "samples"), {}, ["samples must be a list"]),
        ((*CLUSTER, "samples", 0, "collective"), "allreduce", ["'allreduce'", "all_reduce"]),
        ((*CLUSTER, "samples", 0, "ranks"), 1, ["samples[0]: ranks", "at least 2"]),
        ((*CLUSTER, "samples", 0, "seconds"), 0, ["samples[0]: seconds must be above 0"]),
        ((*BLOCK, "kind"), "moe", ["blocks[0]: kind", "attention, mlp"]),
        ((*BLOCK, "forward_seconds"), DELETE, ["blocks[0]", "'forward_seconds' is missing"]),
        ((*BLOCK, "forward_seconds"), "3 ms", ["blocks[0]: forward_seconds must be a number of seconds", "'3 ms'"]),
        ((*BLOCK, "forward_seconds"), 4000, ["forward_seconds is 4000", "seconds, not milliseconds"]),
        ((*BLOCK, "forward_seconds"), 0, ["must be above 0"]),
        ((*BLOCK, "forward_seconds"), -0.1, ["must be above 0"]),
        ((*BLOCK, "forward_seconds"), float("nan"), ["forward_seconds must be finite, got nan"]),
        ((*BLOCK, "forward_seconds"), True, ["got True"]),
        ((*BLOCK, "forward_seconds"), None, ["got None"]),
        ((*BLOCK, "forward_ms"), 3, ["unknown field 'forward_ms'", "'forward_seconds'", "in seconds"]),
        ((*BLOCK, "sample"), 3, ["unknown field 'sample'", "'samples'"]),
        ((*BLOCK, "samples"), 0, ["samples must be above 0"]),
        ((*BLOCK, "tp"), 3, ["hidden 64 in 4 heads over tp 3"]),
        ((*BLOCK, "kind"), "mlp", ["two mlp blocks of hidden 64"]),
        (("blocks",), {}, ["blocks must be a list"]),
        (("overheads",), 2 * data()["overheads"], ["overheads has two of hidden 64", "4 samples in 2 sub-batches"]),
        (("overheads", 0, "layers"), 1.5, ["overheads[0]: layers"]),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_mistakes(path, value, parts):
    with pytest.raises(UsageError) as caught:
        read_hardware(changed(path, value))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a hardware profile"),
        ("", "cannot be read: No such file"),
        ("/nowhere.json", "'/nowhere.json' cannot be read: No such file"),
    ],
)
def test_no_profile_at_all(text, message):
    with pytest.raises(UsageError, match=message):
        read_hardware(text)


def test_text_that_is_none(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_hardware(path)


def test_a_table_of_published_times_is_refused_with_what_converts_it():
    with pytest.raises(UsageError, match="--table FILE --profile-to FILE"):
        read_hardware('{"sequence": 256, "rows": []}')


# --- clusters by name ---


@pytest.mark.parametrize("name", known_clusters())
def test_every_shipped_profile_can_be_read(name):
    hardware, world = cluster_called(f"16x{name}")
    assert world == 16
    assert "data sheets, not measured" in hardware.about
    model = model_called("gpt-1.3b")
    times = hardware.block_times(model, kind_called("mlp"), 2, 1)
    assert 1e-4 < times.forward < 1
    assert hardware.cluster.bytes_per_second <= hardware.node.bytes_per_second


def test_small_clusters_and_names():
    assert cluster_called("3x3090")[1] == 3
    assert cluster_called(" 8xA100 ")[1] == 8
    hardware, world = cluster_called("2x8x3090")
    assert (hardware.ranks_per_node, world) == (8, 16)
    assert cluster_called("2x8x3090", 8) == (hardware, world)
    with pytest.raises(UsageError, match="nodes of 8; leave out --ranks-per-node 4, or give 16x3090"):
        cluster_called("2x8x3090", 4)
    for name, parts in {
        "64x5090": ["'5090'", "3090, 4090, a10, a100"],
        "3090": ["COUNTxNAME", "64x3090"],
        "0xt4": ["COUNTxNAME"],
        "0x8xt4": ["NODESxCOUNTxNAME", "2x8x3090"],
        "2x8x5090": ["'5090'", "3090, 4090, a10, a100"],
        "66x3090": ["nodes of 4", "64x3090", "68x3090"],
    }.items():
        with pytest.raises(UsageError) as caught:
            cluster_called(name)
        for part in parts:
            assert part in str(caught.value)


def test_what_is_nested_too_deep_or_too_large_is_named():
    with pytest.raises(UsageError, match="is not JSON: it is nested too deeply"):
        read_hardware("[" * 200_000)
    body = data()
    body["device"]["memory_bytes"] = 10**400
    with pytest.raises(UsageError, match="memory_bytes must be below 2"):
        read_hardware(json.dumps(body))
