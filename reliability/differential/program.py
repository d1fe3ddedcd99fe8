"""Text of the program of a case: model, batches and training loop, in one process or on a rank.

`train(model, replica, log)` is the loop. replica: number of the rank's replica; None for one process, which computes
what all replicas do. The loss of pipeline stages is that of the whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from reliability.differential.case import Case
from reliability.differential.factors import holds

TEMPLATE = Path(__file__).with_name("template.py.txt").read_text(encoding="utf-8").splitlines()
"""Lines of the programs of all cases.

A line that ends with `#? condition` is in the programs of cases for which it holds, and so is the block below it;
after `#?-` that stays without the line. `<name>` stands for one of `values`.
"""
OPTIMIZERS = {
    "sgd": "SGD, lr=0.1", "momentum": "SGD, lr=0.1, momentum=0.9, weight_decay=0.1",
    "adamw": "AdamW, lr=0.01, eps=1e-3",
    "single": "AdamW, lr=0.01, eps=1e-3, foreach=False", "adafactor": "Adafactor, lr=0.01", "muon": "Muon, lr=0.01",
    "adagrad": "Adagrad, lr=0.01, eps=1e-3", "own": "SGD, lr=0.1",
}  # fmt: skip
"""Class and options. The large eps keeps gradients that are zero but for rounding small."""
_COMMON = "hidden_size=16, num_attention_heads=4, num_hidden_layers=<n>"
_GATED = f"{_COMMON}, intermediate_size=32, num_key_value_heads=2"
FAMILIES = {
    "llama": ("Llama", _GATED), "qwen2": ("Qwen2", _GATED), "qwen3": ("Qwen3", f"{_GATED}, head_dim=4"),
    "gpt2": ("GPT2", "n_embd=16, n_layer=<n>, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0"),
    "opt": ("OPT", f"{_COMMON}, ffn_dim=32, word_embed_proj_dim=16, dropout=0"),
    "mixtral": ("Mixtral", f"{_GATED}, num_local_experts=4"), "phi": ("Phi", f"{_COMMON}, intermediate_size=32"),
    "neox": ("GPTNeoX", f"{_COMMON}, intermediate_size=32"),
    "gemma3": ("Gemma3", f"{_GATED}, head_dim=4, sliding_window=4"),
}  # fmt: skip
"""Class, without its end, and options of small models of transformers."""
MIXING = {
    "samples": "x = x - 0.5 * x.mean(0, keepdim=True)", "rolled": "x = x + 0.5 * x.roll(1, 0)",
    "tokens": "x = x - 0.5 * x.mean(1, keepdim=True)", "shifted": "x = x + 0.5 * x.roll(1, 1)",
    "summed": "x = x + 0.2 * x.cumsum(1)",
}  # fmt: skip
"""Statements of a layer in which samples or tokens depend on each other."""
_MARK = re.compile(r"<(\w+)(?::((?:[^<>]|<\w+>)*))?>")
_NORMS = {"layer": "nn.LayerNorm(<d>)", "rms": "nn.RMSNorm(<d>)", "own": "Norm()", "none": "nn.Identity()"}
_FLAGS = (
    "schedule",
    "sub_batches",
    "recompute",
    "sequence_parallel",
    "micro_batches",
    "pipeline",
    "backend",
    "experts",
)
"""Factors that are options of `oases.parallelize` of the same name."""


def program(case: Case) -> str:
    """Text of a module with `build`, `batch`, `train` and `parallel`."""
    known, facts = values(case), case.facts()

    def value(found: re.Match[str]) -> str:
        name, argument = found.group(1), _MARK.sub(value, found.group(2) or "")
        return {
            "loss": lambda: _loss(case, argument), "losses": lambda: _losses(case, argument, "train_step"),
            "evaluated": lambda: _losses(case, argument, "eval_step"),
        }.get(name, lambda: known[name])()  # fmt: skip

    lines = []
    for line in _chosen(TEMPLATE, facts):
        pad = line[: len(line) - len(line.lstrip())]
        if line.strip() == "<forward>":
            lines += [pad + each for each in _forward(case)]
            continue
        while _MARK.search(line):
            line = _MARK.sub(value, line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _chosen(lines: list[str], facts: Mapping[str, str]) -> Iterator[str]:
    """Lines whose conditions hold, without these."""
    dropped: int | None = None  # the indent of a line that is not there
    shifts: list[int] = []  # indents of lines that are not there, but whose blocks are
    for line in lines:
        text, _, condition = line.partition(" #?")
        indent = len(text) - len(text.lstrip())
        if dropped is not None and indent > dropped:
            continue
        dropped = None
        while shifts and indent <= shifts[-1]:
            shifts.pop()
        if not holds(condition.lstrip("-").strip(), facts):
            if condition.startswith("-"):
                shifts.append(indent)
            else:
                dropped = indent
            continue
        yield text[4 * len(shifts) :]


def values(case: Case) -> dict[str, str]:
    """Values of the marks of the template."""
    own, width, heads = case["family"] == "own", int(case["width"]), int(case["heads"])
    name, options = FAMILIES.get(case["family"], ("", ""))
    kind, _, settings = OPTIMIZERS[case["optimizer"]].partition(", ")
    dimensions = [(part[:2], int(part[2:])) for part in case["mesh"].split(".")]
    shapes = {"no": "{}, {}", "length": "{}, {} + 4 * (step % 2)", "samples": "{} * (1 + step % 2), {}"}
    layer = {"attributes": "layer0.", "two_lists": "first.0."}.get(case["container"], "layers.0.") if own else ".0."
    tables = {"gpt2": "wte", "opt": "embed_tokens", "neox": "embed_in"}
    frozen = {
        "table": tables.get(case["family"], "embed"),
        "layer": layer,
        "norms": "ln_" if name == "GPT2" else "norm",
        "thawed": layer,
    }
    attends = case["attention"] != "none"
    keys = {"all": heads, "half": max(1, heads // 2), "one": 1}[case["keys"]]
    zero = "model" if case["optimizer"] == "own" else "optimizer"
    numbers = {"d": width, "e": width // heads, "f": 2 * width, "h": heads, "k": keys, "n": case["layers"], "v": 32}
    return {key: str(value) for key, value in numbers.items()} | {
        "norm": _NORMS[case["norm"]], "bias": "" if case["bias"] == "yes" else ", bias=False",
        "norms": str({"parallel": 1, "sandwich": 2 + 2 * attends}.get(case["residual"], 1 + attends)),
        "act": "torch.tanh" if case["act"] == "tanh" else f"F.{case['act']}", "dtype": case.dtype,
        "config": f"{name}{'TextConfig' if name == 'Gemma3' else 'Config'}",
        "class": f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}",
        "options": options + (", tie_word_embeddings=True" if case["share"] == "tied" else ""),
        "frozen": frozen.get(case["frozen"], ""), "layer": layer,
        "shape": shapes[case["changing"]].format(case.samples, case["sequence"]),
        "z": str(case["loss"] == "z"), "smooth": "0.1" if case["loss"] == "smooth" else "0.0",
        "dp": str(case.degree("dp")), "optimizer": f"torch.optim.{kind}", "settings": settings,
        "head": {"": "last" if case["loss"] == "mse" else "head", "GPTNeoX": "embed_out"}.get(name, "lm_head"),
        "zero": f"{zero}.zero_grad({'set_to_none=False' if case['zeroed'] == 'zeros' else ''})",
        "saved": "None" if case["optimizer"] == "own" else "optimizer",
        "mesh": str(tuple(size for _, size in dimensions)), "names": str(tuple(name for name, _ in dimensions)),
        "inputs": '{"input_ids": batch(0)["input_ids"]}' if case.outside else "batch(0)", "parallel": _options(case),
        "replica": 'mesh.get_local_rank("dp")' if "dp" in case["mesh"] else "0",
    }  # fmt: skip


def _options(case: Case) -> str:
    """Options of `oases.parallelize` but for mesh and spec, as arguments."""
    found: dict[str, object] = {name: case[name] for name in _FLAGS if case[name] not in ("default", "none", "no")}
    found = {
        name: True if each == "yes" else int(f"{each}") if f"{each}".isdigit() else each
        for name, each in found.items()
    }
    for name, plain in (("pipeline", "one_f_one_b"), ("experts", "sharded")):
        if found[name] == plain:
            del found[name]
    if case["shards"] != "none":
        found[case["shards"]] = True
    if case["wire"] != "none":
        found["wire_dtype"] = case["wire"]
    written = {name: value if name == "wire_dtype" else repr(value) for name, value in found.items()}
    return "".join(f", {name}={value}" for name, value in written.items())


def _forward(case: Case) -> Iterator[str]:
    """Lines of a layer's forward."""
    if case["buffer"] == "counter":
        yield "self.calls += 1"
    if case["condition"] in ("training", "length"):
        yield f"if {'self.training' if case['condition'] == 'training' else 'x.shape[1] > 7'}:"
        yield "    x = x * 1.5"
    if case["condition"] == "attribute":
        yield "x = x * self.volume"
    if case["buffer"] in ("scale", "transient"):
        yield "x = x * self.factor"
    if case["mixing"] != "none":
        yield MIXING[case["mixing"]]
    number = iter(range(4))

    def normed(value: str) -> str:
        return f"self.norms[{next(number)}]({value})" if case["norm"] != "none" else value

    form, parts = case["residual"], ("attend", "mlp") if case["attention"] != "none" else ("mlp",)
    if form == "parallel":
        yield f"h = {normed('x')}"
        yield f"x = x + {' + '.join(f'self.{part}(h)' for part in parts)}"
    for part in parts if form != "parallel" else ():
        if form == "post":
            yield f"x = {normed(f'x + self.{part}(x)')}"
        else:
            inner = f"self.{part}({normed('x')})"
            outer = {"sandwich": lambda: normed(inner), "scaled": lambda: f"self.scale * {inner}"}  # noqa: B023
            yield f"x = x + {outer.get(form, lambda: inner)()}"  # noqa: B023
    yield {"pair": "return x, x.mean()", "streams": "return x, other + x"}.get(case["call"], "return x")


def _loss(case: Case, data: str) -> str:
    """Expression of the loss of a batch."""
    return f"model(**{data})" if case["family"] == "own" and not case.outside else f"loss_of(model, {data})"


def _losses(case: Case, data: str, step: str) -> str:
    """Expression of the loss of a batch, or of the losses of all replicas."""
    dp = case.degree("dp")
    if case.staged:
        share = data if dp == 1 else f"cut({data}, {dp}, replica)"
        return f"{_loss(case, data)} if replica is None else model.{step}(**{share})"
    return _loss(case, data) if dp == 1 else f"losses_of(model, {data}, replica)"
