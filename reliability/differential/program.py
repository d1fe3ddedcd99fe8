"""Text of the program of a case: model, batches and training loop, in one process or on a rank.

`train(model, replica, log)` is the loop. replica: number of the rank's replica; None for one process, which runs the
samples of all replicas, in the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from reliability.differential.case import FACTORS, Case
from reliability.differential.model_text import WORDS, first_layer, head_of, model_text, sizes

STEPS = 3
OPTIMIZERS = {
    "sgd": "torch.optim.SGD, lr=0.1", "momentum": "torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1",
    "adamw": "torch.optim.AdamW, lr=0.01, eps=1e-3", "single": "torch.optim.AdamW, lr=0.01, eps=1e-3, foreach=False",
    "adafactor": "torch.optim.Adafactor, lr=0.01", "muon": "torch.optim.Muon, lr=0.01",
    "adagrad": "torch.optim.Adagrad, lr=0.01, eps=1e-3",
}  # fmt: skip
"""Class and options. The large eps keeps gradients that are zero but for rounding small."""
STACK_OPTIONS = {"sub_batches": int, "sequence_parallel": bool}


def program(case: Case) -> str:
    """Text of a module with `build`, `batch`, `train` and `parallel`."""
    lines = ["import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist", "import oases"]
    lines += ["from torch.distributed.device_mesh import init_device_mesh"]
    lines += [*model_text(case), *_batch(case), *_parts(case), *_train(case), *_parallel(case)]
    return "\n".join(lines) + "\n"


def _batch(case: Case) -> Iterator[str]:
    samples, length = case.samples, case["sequence"]
    yield "def batch(step):"
    yield "    g = torch.Generator().manual_seed(step)"
    shape = f"{samples}, {length}"
    if case["changing"] == "length":
        shape = f"{samples}, {length} + 4 * (step % 2)"
    elif case["changing"] == "samples":
        shape = f"{samples} * (1 + step % 2), {length}"
    yield f"    shape = ({shape})"
    yield f"    ids, labels = (torch.randint({WORDS}, shape, generator=g) for _ in range(2))"
    if case["loss"] == "ignored":
        yield "    labels[torch.rand(shape, generator=g) < 0.3] = -100"
    if case["loss"] == "mse":
        yield f'    labels = torch.randn(*shape, {sizes(case)["d"]}, generator=g, dtype=torch.{case.dtype})'
    yield '    return {"input_ids": ids, "labels": labels}'


def _parts(case: Case) -> Iterator[str]:
    own = case["family"] == "own"
    yield "def cut(data, number, index):"
    yield "    return {k: v.chunk(number)[index] for k, v in data.items()}"
    yield "def loss_of(model, data):"
    if case.outside:
        yield '    y = model(input_ids=data["input_ids"])' + ("" if own else ".logits")
        smooth = ", label_smoothing=0.1" if case["loss"] == "smooth" else ""
        more = " + 0.1 * y.logsumexp(-1).pow(2).mean()" if case["loss"] == "z" else ""
        yield f'    return F.cross_entropy(y.flatten(0, 1), data["labels"].flatten(){smooth}){more}'
    else:
        yield "    return model(**data)" + ("" if own else ".loss")
    yield "def losses_of(model, data, replica):"
    dp, parts = case.degree("dp"), case.micro_batches
    if case.staged:
        yield "    if replica is not None:"
        yield f"        return (model.train_step if torch.is_grad_enabled() else model.eval_step)(**{_share(case)})"
        if dp * parts == 1:
            yield "    return loss_of(model, data)"
        else:
            yield f"    parts = [cut(cut(data, {dp}, r), {parts}, m) for r in range({dp}) for m in range({parts})]"
            if case["loss"] == "ignored":
                shifted = "" if own else "[:, 1:]"
                yield f'    counts = [(part["labels"]{shifted} != -100).sum() for part in parts]'
                yield "    return sum(loss_of(model, part) * n for part, n in zip(parts, counts)) / sum(counts)"
            else:
                yield "    return sum(loss_of(model, part) for part in parts) / len(parts)"
    elif dp == 1:
        yield "    return loss_of(model, data)"
    else:
        yield "    if replica is not None:"
        yield f"        return loss_of(model, {_share(case)})"
        yield f"    return torch.stack([loss_of(model, cut(data, {dp}, r)) for r in range({dp})])"


def _share(case: Case) -> str:
    """Expression of the samples of a replica."""
    return "data" if case.degree("dp") == 1 else f"cut(data, {case.degree('dp')}, replica)"


def _optimizer(case: Case) -> Iterator[str]:
    name = case["optimizer"]
    if name == "own":
        return
    parameters = "[p for p in model.parameters() if p.requires_grad]"
    if name == "muon":
        parameters = "[p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 2]"
    kind, _, options = OPTIMIZERS[name].partition(", ")
    if case["groups"] == "decay":
        yield f"    chosen = {parameters}"
        parameters = '[{"params": [p for p in chosen if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in chosen if p.dim() < 2]}]'
    if case["made_by"] == "oases":
        yield f"    parameters = {parameters}"
        yield f"    optimizer = {kind}(parameters, {options}) if replica is None else oases.make_optimizer(model, {kind}, params=parameters, {options})"
    else:
        yield f"    optimizer = {kind}({parameters}, {options})"


def _hooks(case: Case) -> Iterator[str]:
    hook, head = case["hook"], head_of(case)
    if hook in ("gradient", "accumulated"):
        yield "    for p in model.parameters():"
        yield "        if p.requires_grad:"
        if hook == "gradient":
            yield "            p.register_hook(lambda g: g * 0.5)"
        else:
            yield "            p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))"
    elif hook == "forward":
        yield f"    model.{head}.register_forward_hook(lambda m, args, y: y * 0.5)"
    elif hook == "module":
        yield f"    model.{head}.register_full_backward_hook(lambda m, given, got: (given[0] * 0.5,))"


def _train(case: Case) -> Iterator[str]:
    yield "def train(model, replica=None, log=lambda *_: None):"
    yield from _optimizer(case)
    yield from _hooks(case)
    scaled, own = case["scaler"] != "none", case["optimizer"] == "own"
    if scaled:
        yield '    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)'
    if case["edited"] == "average":
        yield "    average = {n: p.detach().clone() for n, p in model.named_parameters()}"
    if case["evaluated"] == "first":
        yield from _evaluation("    ")
    yield f"    for step in range({STEPS}):"
    pad = "        "
    if case["condition"] == "attribute":
        yield f"{pad}for m in model.modules():"
        yield f'{pad}    if hasattr(m, "gain"):'
        yield f"{pad}        m.gain = 1.0 + step"
    if case["frozen"] == "later":
        yield f"{pad}for n, p in model.named_parameters():"
        yield f'{pad}    if step == 1 and "{first_layer(case)}" in n:'
        yield f"{pad}        p.requires_grad_(False)"
    zero = "optimizer.zero_grad()" if case["zeroed"] == "none" else "optimizer.zero_grad(set_to_none=False)"
    if own:
        zero = "model.zero_grad()" if case["zeroed"] == "none" else "model.zero_grad(set_to_none=False)"
    if case["closure"] == "yes":
        yield f"{pad}def closure():"
        yield f"{pad}    {zero}"
        yield from _backward(case, pad + "    ")
        yield f"{pad}    return loss.mean()"
        yield f"{pad}optimizer.step(closure)"
    else:
        yield from _backward(case, pad)
        if case["skipped"] == "gradient":
            yield f"{pad}if step == 1:"
            yield f"{pad}    {zero}"
            yield f"{pad}    continue"
        if scaled:
            yield f"{pad}scaler.unscale_(optimizer)"
        if case["clip"] == "torch":
            yield f"{pad}torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
        elif case["clip"] == "oases":
            yield f"{pad}(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) if replica is None else oases.clip_grad_norm(model, 0.1))"
        elif case["clip"] == "value":
            yield f"{pad}torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)"
        if scaled:
            yield f"{pad}scaler.step(optimizer)"
            yield f"{pad}scaler.update()"
        elif own:
            yield f"{pad}with torch.no_grad():"
            yield f"{pad}    for p in model.parameters():"
            yield f"{pad}        if p.grad is not None:"
            yield f"{pad}            p -= 0.1 * p.grad"
        else:
            yield f"{pad}optimizer.step()"
        yield f"{pad}{zero}"
    if case["edited"] == "data":
        yield f"{pad}with torch.no_grad():"
        yield f"{pad}    for p in model.parameters():"
        yield f"{pad}        p.data.mul_(0.9)"
    elif case["edited"] == "average":
        yield f"{pad}with torch.no_grad():"
        yield f"{pad}    for n, p in model.named_parameters():"
        yield f"{pad}        average[n].lerp_(p.detach(), 0.5)"
        yield f"{pad}        p.copy_(average[n])"
    if case["saved"] != "no":
        yield f"{pad}if step == 1:"
        yield from _saving(case, pad + "    ")
    yield f'{pad}log("weights", model)'
    if case["evaluated"] == "between":
        yield from _evaluation(pad)


def _backward(case: Case, pad: str) -> Iterator[str]:
    many = 1 if case["accumulate"] == "1" else 2
    if case["skipped"] == "batch":
        yield f"{pad}if step == 1:"
        yield f"{pad}    continue"
    start = pad
    data = "batch(step)"
    if many > 1:
        yield f"{pad}for n in range({many}):"
        pad += "    "
        data = f"cut(batch(step), {many}, n)"
    if case["accumulate"] == "no_sync":
        yield f"{pad}with model.no_sync() if replica is not None and n == 0 and hasattr(model, 'no_sync') else torch.enable_grad():"
        pad += "    "
    yield f"{pad}loss = losses_of(model, {data}, replica)"
    factor = " * (torch.inf if step == 1 else 1.0)" if case["scaler"] == "overflow" else ""
    total = f"loss.mean(){factor}"
    backward = f"scaler.scale({total}).backward()" if case["scaler"] != "none" else f"{total}.backward()"
    if case.staged:
        yield f"{pad}if replica is None:"
        yield f"{pad}    {backward}"
    else:
        yield f"{pad}{backward}"
    yield f'{start}log("loss", loss)'
    yield f'{start}log("gradients", model)'


def _evaluation(pad: str) -> Iterator[str]:
    yield f"{pad}model.eval()"
    yield f"{pad}with torch.no_grad():"
    yield f'{pad}    log("loss", losses_of(model, batch(9), replica))'
    yield f"{pad}model.train()"


def _saving(case: Case, pad: str) -> Iterator[str]:
    if case["saved"] == "oases":
        optimizer = "None" if case["optimizer"] == "own" else "optimizer"
        yield f"{pad}if replica is not None:"
        yield f'{pad}    oases.save_checkpoint(__file__ + ".saved", model, {optimizer}, step=step)'
        yield f"{pad}    with torch.no_grad():"
        yield f"{pad}        for p in model.parameters():"
        yield f"{pad}            p.zero_()"
        yield f'{pad}    oases.load_checkpoint(__file__ + ".saved", model, {optimizer})'
    else:
        yield f"{pad}state = {{k: v.clone() for k, v in model.state_dict().items()}}"
        yield f"{pad}with torch.no_grad():"
        yield f"{pad}    for p in model.parameters():"
        yield f"{pad}        p.zero_()"
        yield f"{pad}model.load_state_dict(state)"
        if case["optimizer"] != "own":
            yield f"{pad}optimizer.load_state_dict(optimizer.state_dict())"


def options_of(case: Case) -> dict[str, object]:
    """Options of `oases.parallelize` but for mesh and spec."""
    found: dict[str, object] = {"schedule": case["schedule"]}
    if case["sub_batches"] != "default":
        found["sub_batches"] = int(case["sub_batches"])
    if case["recompute"] != "none":
        found["recompute"] = case["recompute"] if case["recompute"] == "full" else 1
    if case["sequence_parallel"] == "yes":
        found["sequence_parallel"] = True
    if case["shards"] != "none":
        found[case["shards"]] = True
    if case["micro_batches"] != "default":
        found["micro_batches"] = case.micro_batches
    if case["pipeline"] != FACTORS["pipeline"][0]:
        found["pipeline"] = case["pipeline"]
    if case["backend"] != "none":
        found["backend"] = case["backend"]
    if case["wire"] != "none":
        found["wire_dtype"] = case["wire"]
    if case["experts"] == "balanced":
        found["experts"] = "balanced"
    return found


def _parallel(case: Case) -> Iterator[str]:
    names = [(part[:2], int(part[2:])) for part in case["mesh"].split(".")]
    shape, labels = tuple(size for _, size in names), tuple(name for name, _ in names)
    options = "".join(f", {name}={value!r}" for name, value in options_of(case).items())
    yield "def parallel(model):"
    yield f'    mesh = init_device_mesh("cpu", {shape}, mesh_dim_names={labels})'.replace("'", '"')
    if case["family"] == "own":
        data = '{"input_ids": batch(0)["input_ids"]}' if case.outside else "batch(0)"
        options = f", spec=oases.ParallelSpec(inputs=((), {data}))" + options
    replica = 'mesh.get_local_rank("dp")' if "dp" in labels else "0"
    yield f"    return oases.parallelize(model, mesh=mesh{options}), {replica}".replace("'", '"')
