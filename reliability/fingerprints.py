"""Fingerprints of training runs: losses per step and SHA-256 of the final weights, to compare two trees.

    PYTHONPATH=TREE python reliability/fingerprints.py --json FILE [--all] [--only PATTERN] [--skip PATTERN]
    python reliability/fingerprints.py --compare BEFORE.json AFTER.json [--gone PATTERN]

Uses public names of oases only, so that one copy of this file runs against any tree. Ranks are started once for each
world size; a case that fails is recorded with its error, and its ranks are started again. Schedules are named, never
measured.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import queue
import random
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

HELPERS = Path(__file__).resolve().parents[1] / "python_tests"
sys.path.append(str(HELPERS))
os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

Record = dict[str, Any]
STEPS = 3
RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")
CASE_SECONDS = 600.0
"""Time limit of a case, and of the ranks that are left after one of them failed."""
LEFT_SECONDS = 20.0

GATED = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90, "intermediate_size": 64,
    "num_key_value_heads": 2,
}  # fmt: skip
PLAIN = {name: size for name, size in GATED.items() if name != "num_key_value_heads"}
MORE_MODELS = {
    "llama_mha": ("LlamaForCausalLM", PLAIN),
    "olmo": ("OlmoForCausalLM", {**GATED, "pad_token_id": 0, "eos_token_id": 0}),
    "granite": ("GraniteForCausalLM", GATED),
    "starcoder2": ("Starcoder2ForCausalLM", {**GATED, "bos_token_id": 0, "eos_token_id": 0}),
    "stablelm": ("StableLmForCausalLM", GATED),
    "glm": ("GlmForCausalLM", {**GATED, "head_dim": 8, "pad_token_id": 0}),
    "roberta": ("RobertaForMaskedLM", {**PLAIN, "pad_token_id": 0}),
    "electra": ("ElectraForMaskedLM", {**PLAIN, "embedding_size": 32}),
}
"""Beside those of python_tests/autotp/zoo.py."""
UNSHARDED = ("phimoe",)
"""Models of the zoo whose tests are not of this way to shard them."""

FACTORS = {
    "pipeline": (
        "gpipe", "one_f_one_b", "pre_recompute", "last_no_recompute", "shifted_critical_path", "interleaved", "zb_h1",
        "zb_v",
    ),
    "schedule": (
        "sync", "fine_grained", "cross_pass", "oases", "sub_pipelined", "sub_pipelined_1", "sub_pipelined_2",
    ),
    "recompute": ("none", "by stage", "full"),
    "replicas": ("average", "zero", "fsdp"),
    "micro_batches": ("2", "4"),
    "sequence": ("whole", "parallel"),
    "compile": ("none", "aot_eager"),
}  # fmt: skip
"""Those of python_tests/train/pairs.py, written down: a tree without one of them fails its rows."""
EVERY = 5
"""The default set has every fifth row of the covering array."""


MEASURED = ("experts prophet *", "experts faster_moe *", "* balanced, prophet")
"""Cases that place experts by costs that are measured in the run: sums in another order differ in last bits."""
CLOSE = 1e-6
"""Relative difference of their losses."""


class Case(NamedTuple):
    """A run on `world` ranks. make: called on each of them with a folder; rank 0 returns the record."""

    name: str
    world: int
    make: Callable[[Path], Record | None]


def sub_batches_of(schedule: str) -> Record:
    """Sub-batches of a schedule as an option."""
    return {"sub_batches": 1 if schedule in ("sync", "fine_grained", "layers") else 2}


# Fingerprints


def digest(tensors: dict[str, torch.Tensor]) -> Record:
    """SHA-256 of weights by their values, and of their names: a rename alone differs in the second only."""
    each = []
    for tensor in tensors.values():
        plain = tensor.detach().cpu().contiguous()
        bits = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        each.append(hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode() + bits).hexdigest())
    return {
        "weights": hashlib.sha256(" ".join(sorted(each)).encode()).hexdigest(),
        "names": hashlib.sha256(" ".join(sorted(tensors)).encode()).hexdigest(),
    }


def digest_of_files(paths: Iterable[Path]) -> Record:
    """The same of safetensors files."""
    from safetensors.torch import load_file

    return digest({name: tensor for path in sorted(paths) for name, tensor in load_file(path).items()})


def exported(checkpoint: Path) -> Record:
    """Fingerprint of a checkpoint's weights, by `oases export`."""
    file = checkpoint.with_name(f"{checkpoint.name}.safetensors")
    sys.argv = ["oases", "export", str(checkpoint), str(file)]
    with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing):
        try:
            runpy.run_module("oases", run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"oases export ended with {end.code}") from end
    return digest_of_files([file])


# Unedited models


def mesh_of(**degrees: int) -> Any:
    """A DeviceMesh of the CPU over the default group."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def parallel_model(name: str, mesh: Any, changes: Record, **options: Any) -> tuple[torch.nn.Module, Any]:
    """A small model of transformers, parallelized, and its optimizer."""
    from autotp import zoo

    import oases

    zoo.ALL.update(MORE_MODELS)
    chosen: Record = {"schedule": "oases", "sub_batches": 2} | options
    torch.compiler.reset()  # what other cases compiled counts towards a limit
    model = oases.parallelize(zoo.build(name, **changes), mesh=mesh, **chosen)
    return model, oases.make_optimizer(model, torch.optim.AdamW, lr=1e-3)


def train_model(name: str, model: Any, optimizer: Any, mesh: Any, steps: range) -> Record:
    """Steps with clipping; the losses and norms."""
    from autotp import zoo

    import oases

    dims = mesh.mesh_dim_names
    replica = mesh.get_local_rank("dp") if "dp" in dims else 0
    losses, norms = [], []
    for step in steps:
        data = zoo.batch(name, samples=8, seed=100 * step + replica)
        if "pp" in dims:
            loss = model.train_step(**data)
        else:
            loss = model(**data).loss
            loss.backward()
        norms.append(float(oases.clip_grad_norm(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms}


def weights_of(model: Any, folder: Path) -> Record:
    """Fingerprint of a parallelized model's full weights. Collective."""
    import oases

    oases.save_pretrained(model, folder)
    dist.barrier()
    return digest_of_files(folder.glob("*.safetensors")) if dist.get_rank() == 0 else {}


def run_model(
    name: str, degrees: dict[str, int], options: Record, changes: Record, folder: Path, dtype: str = "float32"
) -> Record:
    """Train a model of the zoo over a mesh."""
    mesh = mesh_of(**degrees)
    if dtype != "float32":
        options = options | {"dtype": getattr(torch, dtype)}
    model, optimizer = parallel_model(name, mesh, changes, **options)
    record = train_model(name, model, optimizer, mesh, range(STEPS))
    return record | weights_of(model, folder / "model")


def run_resumed_model(name: str, first: dict[str, int], then: dict[str, int], folder: Path) -> Record:
    """Two steps over a mesh, a checkpoint, and two steps of a new model over another."""
    import oases

    changes = {"num_hidden_layers": 4}
    mesh = mesh_of(**first)
    model, optimizer = parallel_model(name, mesh, changes)
    record = train_model(name, model, optimizer, mesh, range(2))
    oases.save_checkpoint(str(folder / "run"), model, optimizer, step=2)
    mesh = mesh_of(**then)
    model, optimizer = parallel_model(name, mesh, changes)
    step = oases.load_checkpoint(str(folder / "run"), model, optimizer)
    later = train_model(name, model, optimizer, mesh, range(int(step), 4))
    return {key: record[key] + later[key] for key in record} | weights_of(model, folder / "model")


# A stack of own blocks


def run_stack(schedule: str, recompute: Literal["none", "full"], folder: Path) -> Record:
    """Three steps of an OverlappedStack of plain blocks."""
    import oases

    class Block(torch.nn.Module):
        """Norm, column-parallel linear, GELU, row-parallel linear."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(32)
            self.up = oases.OverlappedColumnLinear(32, 64)
            self.down = oases.OverlappedRowLinear(64, 32)

        def partial(self, x: torch.Tensor) -> torch.Tensor:
            """Compute up to the sum over the ranks."""
            return self.down.partial(torch.nn.functional.gelu(self.up.partial(self.norm(x))))

        def combine(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            """Add the sum."""
            assert self.down.bias is not None
            return x + y + self.down.bias

    torch.manual_seed(dist.get_rank())
    blocks = [Block() for _ in range(4)]
    stack = oases.OverlappedStack(blocks, schedule=schedule, recompute=recompute, **sub_batches_of(schedule))
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(step))
        loss = stack(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, digest(dict(stack.named_parameters())))
    return {"losses": losses, "norms": [], **{key: " ".join(part[key] for part in parts) for key in parts[0]}}


# The built-in GPT and its trainer


@functools.cache
def corpus(folder: Path) -> Path:
    """A text of words drawn at random, the same each time."""
    file = folder / "corpus.txt"
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(500)]
    file.write_text(" ".join(draw.choices(words, k=30_000)) + "\n", encoding="utf-8")
    return file


SIZES = {"hidden": 32, "layers": 4, "heads": 4, "sequence": 32}
COMMON = {"steps": STEPS, "warmup": 1, "learning_rate": 2e-3, "validation_batches": 1}
BATCH = 16


def run_trainer(options: Record, plan: Record | None, folder: Path) -> Record | None:
    """Steps of `oases.Trainer` by a configuration; the weights by `oases export`."""
    import oases

    torch.compiler.reset()
    data = corpus(folder)
    values = {**COMMON, "data": str(data), **options}
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        values["plan"] = str(folder / "plan.json")
    else:
        values = {**SIZES, "batch": BATCH, "schedule": "oases@2", **values}
    file = folder / "config.yaml"  # of which JSON is a part
    if dist.get_rank() == 0:
        file.write_text(json.dumps(values), encoding="utf-8")
    dist.barrier()
    trainer = oases.Trainer(oases.TrainConfig.from_yaml(str(file)))
    record: Record = {"losses": [], "norms": []}
    for _ in range(STEPS):
        record["losses"].append(trainer.step())
        record["norms"].append(trainer.gradient_norm)
    trainer.save(str(folder / "checkpoint"))
    trainer.close()
    dist.barrier()
    return record | exported(folder / "checkpoint") if dist.get_rank() == 0 else None


def plan_of_row(row: dict[str, str]) -> Record:
    """Plan file of a row: two stages of two replicas of two ranks. "by stage": the first stage recomputes alone."""
    chunks = 2 if row["pipeline"] in ("interleaved", "zb_v") else 1
    layers = 2 // chunks
    stages = []
    for stage in range(2):
        segment = {
            "num_blocks": 2 * layers,
            "tp": 2,
            "schedule": row["schedule"],
            **sub_batches_of(row["schedule"]),
            "recomputed_layers": {"none": 0, "full": layers, "by stage": layers * (1 - stage)}[row["recompute"]],
            "sequence_parallel": row["sequence"] == "parallel",
        }
        stages.append({"segments": [segment] * chunks})
    model = {**SIZES, "vocabulary": 256, "dtype": "float32", "name": "gpt", "head_size": 0, "kv_heads": 0,
             "intermediate": 0, "gated": False, "tied": True}  # fmt: skip
    return {
        "format": "oases plan", "version": 1, "model": model, "world": 8, "ranks_per_node": 8, "global_batch": BATCH,
        "micro_batches": int(row["micro_batches"]), "stages": stages, "zero": row["replicas"] == "zero",
        "pipeline": row["pipeline"], "prediction": None, "fsdp": row["replicas"] == "fsdp", "experts": None,
        "wire": "none",
    }  # fmt: skip


def run_row(row: dict[str, str], folder: Path) -> Record | None:
    """A row of the covering array."""
    return run_trainer({"compile": row["compile"]}, plan_of_row(row), folder)


# The command line


def oases_command(*arguments: str) -> None:
    """Run `python -m oases`. RuntimeError with its output where it fails."""
    command = [sys.executable, "-m", "oases", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"oases {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-600:]}")


def run_commands(runs: list[list[str]], folder: Path) -> Record:
    """Runs of `oases train` one after another over one folder of checkpoints."""
    from transformers import Qwen2Config

    data = corpus(folder)
    sizes: Record = GATED | {"vocab_size": 256}
    Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder / "qwen2")
    (folder / "plan.json").write_text(json.dumps(four_rank_plan()), encoding="utf-8")
    losses = []
    for number, run in enumerate(runs):
        file = folder / f"{number}.json"
        common = [f"--{name.replace('_', '-')}={value}" for name, value in COMMON.items() if name != "steps"]
        named = [argument.replace("FOLDER", str(folder)) for argument in run]
        where = [f"--data={data}", f"--checkpoint={folder / 'run'}", f"--json={file}"]
        oases_command("train", *common, *where, *named)
        losses += json.loads(file.read_text(encoding="utf-8"))["losses"]
    return {"losses": losses, "norms": [], **exported(folder / "run")}


def four_rank_plan() -> Record:
    """Two stages of two tensor-parallel ranks, the first with other schedules than the second."""
    row = {name: choices[0] for name, choices in FACTORS.items()} | {"schedule": "oases", "pipeline": "one_f_one_b"}
    plan = plan_of_row(row) | {"world": 4, "ranks_per_node": 4}
    second = {**plan["stages"][1]["segments"][0], "schedule": "cross_pass", "recomputed_layers": 2}
    return plan | {"stages": [plan["stages"][0], {"segments": [second]}]}


# Cases


def cases(*, everything: bool) -> Iterator[Case]:
    """All cases, those of one world size together."""
    yield from (
        Case(f"command {name}", 1, functools.partial(run_commands, runs)) for name, runs in command_lines().items()
    )
    for schedule in (*FACTORS["schedule"],):
        for recompute in RECOMPUTE:
            yield Case(f"stack {schedule} {recompute}", 2, functools.partial(run_stack, schedule, recompute))
    yield from model_cases()
    yield from trainer_cases()
    yield from mesh_cases()
    from covering import covering

    for number, row in enumerate(covering(FACTORS)):
        if everything or number % EVERY == 0:
            yield Case("row " + " ".join(row.values()), 8, functools.partial(run_row, row))


def command_lines() -> dict[str, list[list[str]]]:
    """Arguments of `oases train`, a run per list, each after the one before."""
    sizes = [f"--{name}={value}" for name, value in SIZES.items()] + [f"--batch={BATCH}", "--schedule=oases"]
    first, more = [*sizes, "--steps=3"], [*sizes, "--steps=5", "--resume=auto"]
    return {
        "dense, resumed": [[*first, "--tp=2"], [*more, "--tp=2"]],
        "dense, resumed at another mesh": [[*first, "--tp=2"], [*more, "--tp=1", "--dp=2"]],
        "plan": [["--plan=FOLDER/plan.json", "--steps=3"]],
        "model": [["--model=FOLDER/qwen2", "--sequence=32", "--batch=8", "--schedule=oases", "--steps=3", "--tp=2"]],
    }


def model_cases() -> Iterator[Case]:
    """Every model at two ranks, and one by every schedule and option."""
    from autotp import zoo

    two = {"tp": 2}
    for name in [*zoo.ALL, *MORE_MODELS]:
        if name not in UNSHARDED:
            yield Case(f"model {name}", 2, functools.partial(run_model, name, two, {}, {}))
    for schedule in (*FACTORS["schedule"], "layers"):
        chosen = {"schedule": schedule, **sub_batches_of(schedule)}
        yield Case(f"llama schedule {schedule}", 2, functools.partial(run_model, "llama", two, chosen, {}))
    for name in ("llama", "gpt2", "qwen3", "t5", "mixtral"):
        yield Case(f"{name} recompute", 2, functools.partial(run_model, name, two, {"recompute": "full"}, {}))
        bfloat16 = functools.partial(run_model, name, two, {}, {}, dtype="bfloat16")
        yield Case(f"{name} bfloat16", 2, bfloat16)
    for name in ("llama", "gpt2", "qwen3"):
        sharded = functools.partial(run_model, name, two, {"sequence_parallel": True}, {})
        yield Case(f"{name} sequence_parallel", 2, sharded)
    yield Case("llama compile", 2, functools.partial(run_model, "llama", two, {"compile": "aot_eager"}, {}))
    yield Case("llama wire int8", 2, functools.partial(run_model, "llama", two, {"wire_dtype": "int8"}, {}))
    bfloat16_sums = {"wire_dtype": torch.bfloat16}
    yield Case("llama wire bfloat16", 2, functools.partial(run_model, "llama", two, bfloat16_sums, {}))


def trainer_cases() -> Iterator[Case]:
    """The built-in GPT at two ranks, dense and with experts."""
    dense: dict[str, Record] = {
        "tensor": {"degrees": {"tensor": 2}},
        "sync": {"degrees": {"tensor": 2}, "schedule": "sync"},
        "recompute": {"degrees": {"tensor": 2}, "recompute": "full"},
        "bfloat16": {"degrees": {"tensor": 2}, "precision": "bfloat16"},
        "sequence": {"degrees": {"tensor": 2}, "sequence_parallel": True},
        "zero": {"degrees": {"data": 2, "tensor": 1}, "zero": True},
        "fsdp": {"degrees": {"data": 2, "tensor": 1}, "fsdp": True},
        "gradients int8": {"degrees": {"data": 2, "tensor": 1}, "gradient_wire": "int8"},
        "pipeline": {"degrees": {"pipeline": 2, "tensor": 1}, "micro_batches": 4},
    }
    for name, options in dense.items():
        yield Case(f"train {name}", 2, functools.partial(run_trainer, options, None))
    experts = {"experts": 4, "expert_hidden": 48, "schedule": "auto", "degrees": {"data": 2, "tensor": 1}}
    for placement in ("none", "prophet", "faster_moe", "eplb"):
        name = "plain" if placement == "none" else "block_wise"
        options = {**experts, "placement": placement}
        yield Case(f"experts {placement} {name}", 2, functools.partial(run_trainer, options, None))
    chosen = {**experts, "placement": "none", "recompute": "full"}
    yield Case("experts with recompute", 2, functools.partial(run_trainer, chosen, None))


def mesh_cases() -> Iterator[Case]:
    """Models over four ranks."""
    deep: Record = {"num_hidden_layers": 4}
    staged, replicas = {"pp": 2, "tp": 2}, {"dp": 2, "tp": 2}
    parts = {"micro_batches": 4}
    for name in ("llama", "qwen3", "gpt_neox", "mixtral"):
        yield Case(f"{name} pp 2, tp 2", 4, functools.partial(run_model, name, staged, parts, deep))
        yield Case(f"{name} dp 2, tp 2", 4, functools.partial(run_model, name, replicas, {}, deep))
    for pipeline in ("gpipe", "interleaved", "zb_h1", "zb_v"):
        chosen: Record = {**parts, "pipeline": pipeline}
        yield Case(f"llama {pipeline}", 4, functools.partial(run_model, "llama", staged, chosen, deep))
    for mode in ("zero", "fsdp"):
        mixed = {"pp": 2, "dp": 2, "tp": 1}
        for where, mesh, chosen in (("dp 2, tp 2", replicas, {}), ("pp 2, dp 2", mixed, parts)):
            for dtype in ("float32", "bfloat16"):
                make = functools.partial(run_model, "llama", mesh, {**chosen, mode: True}, deep, dtype=dtype)
                yield Case(f"llama {mode} {dtype} {where}", 4, make)
    for placement in ("none", "prophet"):
        chosen = {"experts": "balanced", "placement": placement}
        make = functools.partial(run_model, "qwen3_moe", replicas, chosen, {})
        yield Case(f"qwen3_moe balanced, {placement}", 4, make)
    meshes = {"dp 2, tp 2": replicas, "pp 2, tp 2": staged, "dp 4": {"dp": 4, "tp": 1}}
    for first, then in (("dp 2, tp 2", "dp 2, tp 2"), ("dp 2, tp 2", "pp 2, tp 2"), ("pp 2, tp 2", "dp 4")):
        make = functools.partial(run_resumed_model, "llama", meshes[first], meshes[then])
        yield Case(f"llama resumed {first} -> {then}", 4, make)


# Ranks


def work(rank: int, port: int, chosen: list[Case], folder: str, answers: Any) -> None:
    """Run cases one after another on a rank."""
    torch.set_num_threads(1)
    world = chosen[0].world
    if world > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
        dist.init_process_group("gloo")
    for number, case in enumerate(chosen):
        own = Path(folder) / f"{world}-{number}"
        own.mkdir(exist_ok=True)
        start = time.perf_counter()
        try:
            record = case.make(own)
        except BaseException as error:  # any: the other ranks wait for this one, and are ended
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:600]
            answers.put((rank, case.name, {"error": text}))
            return
        if rank == 0:
            assert record is not None
            record["seconds"] = round(time.perf_counter() - start, 2)
        answers.put((rank, case.name, record))
    if world > 1:
        dist.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_cases(chosen: list[Case]) -> dict[str, Record]:
    """Records of cases of one world size."""
    found: dict[str, Record] = {}
    while chosen:
        with tempfile.TemporaryDirectory() as folder:
            done = _run_until_failure(chosen, folder, found)
        chosen = chosen[done:]
    return found


def _run_until_failure(chosen: list[Case], folder: str, found: dict[str, Record]) -> int:
    """Start ranks and run the cases until one fails; the number of cases that have a record then."""
    context = mp.get_context("spawn")
    answers, port, world = context.Queue(), free_port(), chosen[0].world
    ranks = [context.Process(target=work, args=(rank, port, chosen, folder, answers)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    try:
        for number, case in enumerate(chosen):
            record = _record_of(case, answers, ranks)
            found[case.name] = record
            shown = record.get("error") or f"{record['seconds']:6.2f} s  {record['weights'][:12]}"
            print(f"{case.name:<60} {shown}", flush=True)
            if "error" in record:
                return number + 1
        for rank in ranks:
            rank.join(LEFT_SECONDS)
        return len(chosen)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()


def _record_of(case: Case, answers: Any, ranks: list[Any]) -> Record:
    """Record of a case from all ranks; the error of the rank that told first."""
    record: Record = {}
    left, until = len(ranks), time.monotonic() + CASE_SECONDS
    while left:
        try:
            _, name, mine = answers.get(timeout=1.0)
        except queue.Empty:
            if time.monotonic() > until:
                return record if "error" in record else {"error": f"no end within {CASE_SECONDS:.0f} s"}
            if any(rank.exitcode not in (None, 0) for rank in ranks) and "error" not in record:
                record = {"error": f"a rank ended with {[rank.exitcode for rank in ranks]}"}
                until = time.monotonic() + LEFT_SECONDS
            continue
        assert name == case.name, (name, case.name)
        left -= 1
        if mine is not None and "error" in mine:
            until = min(until, time.monotonic() + LEFT_SECONDS)
        if mine is not None and "error" not in record:
            record = mine | {key: value for key, value in record.items() if key not in mine}
    return record


def run(options: argparse.Namespace) -> int:
    """Run the chosen cases and write their records."""
    import oases

    chosen = [
        case
        for case in cases(everything=options.all)
        if (not options.only or any(fnmatch(case.name, pattern) for pattern in options.only))
        and not any(fnmatch(case.name, pattern) for pattern in options.skip)
    ]
    start = time.perf_counter()
    records: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["OASES_CACHE"] = cache
        for world in sorted({case.world for case in chosen}):
            records |= run_cases([case for case in chosen if case.world == world])
    failed = [name for name, record in records.items() if "error" in record]
    took = time.perf_counter() - start
    print(f"{len(records)} cases of {Path(oases.__file__).parent} in {took:.0f} s, {len(failed)} failed")
    if options.json is not None:
        text = json.dumps({"torch": torch.__version__, "seconds": round(took), "cases": records}, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return int(bool(failed))


# Comparison


def difference(before: Record, after: Record) -> str:
    """First difference between two records; empty where there is none."""
    for what in ("losses", "norms"):
        for step, (mine, theirs) in enumerate(zip(before[what], after[what], strict=False)):
            if repr(mine) != repr(theirs):
                return f"{what} at step {step}: {mine!r} and {theirs!r}"
        if len(before[what]) != len(after[what]):
            return f"{len(before[what])} and {len(after[what])} {what}"
    return "" if before["weights"] == after["weights"] else "weights"


def status_of(name: str, before: Record | None, after: Record | None, gone: list[str]) -> str:
    """Result of comparing a case: a word, then the reason."""
    if any(fnmatch(name, pattern) for pattern in gone):
        return "gone"
    if before is None or after is None or "error" in before:
        return "missing: " + (before["error"] if before and after else f"only {'before' if before else 'after'}")
    if "error" in after:
        return "failed: " + after["error"]
    if any(fnmatch(name, pattern) for pattern in MEASURED):
        pairs = zip(before["losses"], after["losses"], strict=True)
        close = all(abs(mine - theirs) <= CLOSE * abs(mine) for mine, theirs in pairs)
        return "close: its copies of experts hang on measured times" if close else "different: losses"
    differs = difference(before, after)
    renamed = ": weights have other names" if before["names"] != after["names"] else ""
    return f"different: {differs}" if differs else f"equal{renamed}"


def compare(files: list[str], gone: list[str]) -> int:
    """Print how each case of two runs compares; 1 where one differs, or fails in the second run only."""
    before, after = (json.loads(Path(file).read_text(encoding="utf-8"))["cases"] for file in files)
    found = {
        name: status_of(name, before.get(name), after.get(name), gone) for name in dict.fromkeys((*before, *after))
    }
    for name, status in found.items():
        print(f"{name:<60} {status}")
    count = Counter(status.partition(":")[0] for status in found.values())
    print(", ".join(f"{number} {word}" for word, number in count.items()))
    return int(bool({"different", "failed"} & set(count)))


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the records to FILE")
    parser.add_argument("--all", action="store_true", help="every row of the covering array")
    parser.add_argument("--only", metavar="PATTERN", nargs="+", default=[], help="cases by name, with *")
    parser.add_argument("--skip", metavar="PATTERN", nargs="+", default=[], help="leave out cases by name, with *")
    parser.add_argument("--compare", metavar=("BEFORE", "AFTER"), nargs=2, help="compare two files, and run nothing")
    parser.add_argument("--gone", metavar="PATTERN", nargs="+", default=[], help="cases removed on purpose, with *")
    options = parser.parse_args()
    return compare(options.compare, options.gone) if options.compare else run(options)


if __name__ == "__main__":
    sys.exit(main())
