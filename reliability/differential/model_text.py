"""Text of the model of a case: its layers, its loss, and a function that builds it."""

from __future__ import annotations

from collections.abc import Iterator

from reliability.differential.case import Case

WORDS = 32
"""Rows of the vocabulary."""
ACTS = {"gelu": "F.gelu", "relu": "F.relu", "silu": "F.silu", "tanh": "torch.tanh"}
CONFIGURATIONS = {
    "llama": ("Llama", "hidden_size={d}, intermediate_size={f}, num_hidden_layers={n}, num_attention_heads={h}, num_key_value_heads={k}"),
    "qwen2": ("Qwen2", "hidden_size={d}, intermediate_size={f}, num_hidden_layers={n}, num_attention_heads={h}, num_key_value_heads={k}"),
    "qwen3": ("Qwen3", "hidden_size={d}, intermediate_size={f}, num_hidden_layers={n}, num_attention_heads={h}, num_key_value_heads={k}, head_dim=4"),
    "gpt2": ("GPT2", "n_embd={d}, n_layer={n}, n_head={h}, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0"),
    "opt": ("OPT", "hidden_size={d}, ffn_dim={f}, num_hidden_layers={n}, num_attention_heads={h}, word_embed_proj_dim={d}, max_position_embeddings=64, dropout=0"),
    "mixtral": ("Mixtral", "hidden_size={d}, intermediate_size={f}, num_hidden_layers={n}, num_attention_heads={h}, num_key_value_heads={k}, num_local_experts=4"),
    "phi": ("Phi", "hidden_size={d}, intermediate_size={f}, num_hidden_layers={n}, num_attention_heads={h}"),
    "neox": ("GPTNeoX", "hidden_size={d}, intermediate_size={f}, num_hidden_layers={n}, num_attention_heads={h}"),
    "gemma3": ("Gemma3", "hidden_size={d}, intermediate_size={f}, num_hidden_layers={n}, num_attention_heads={h}, num_key_value_heads={k}, head_dim=4, sliding_window=4"),
}  # fmt: skip
"""Class, without its end, and options of small models of transformers."""
CLASSES = {"gpt2": "GPT2LMHeadModel"}
TABLES = {"gpt2": "wte", "opt": "embed_tokens", "neox": "embed_in"}
LISTS = {"gpt2": "h.", "phi": "layers."}


def sizes(case: Case) -> dict[str, int]:
    """Width, features of the MLP, layers, heads and heads of keys."""
    width, heads = int(case["width"]), int(case["heads"])
    keys = {"all": heads, "half": max(1, heads // 2), "one": 1}[case["keys"]]
    if case["family"] != "own":
        width, heads, keys = 16, 4, 2
    return {"d": width, "f": 2 * width, "n": int(case["layers"]), "h": heads, "k": keys}


def model_text(case: Case) -> list[str]:
    """Lines of the model's classes and of `build`."""
    if case["family"] != "own":
        return _build(case)
    return [*_helpers(case), *_layer(case), *_net(case), *_build(case)]


def first_layer(case: Case) -> str:
    """Part of the names of the parameters of the first layer alone."""
    if case["family"] != "own":
        return ".0."
    return {"attributes": "layer0.", "two_lists": "first.0."}.get(case["container"], "layers.0.")


def is_table(case: Case) -> str:
    """Part of the name of the embedding table."""
    return TABLES.get(case["family"], "embed")


def head_of(case: Case) -> str:
    """Attribute of the model that is its head, or its last norm where it has none."""
    if case["family"] != "own":
        return {"neox": "embed_out"}.get(case["family"], "lm_head")
    return "head" if case["loss"] != "mse" else "last"


def _helpers(case: Case) -> Iterator[str]:
    d, e = sizes(case)["d"], sizes(case)["d"] // sizes(case)["h"]
    if case["norm"] == "own":
        yield "class Norm(nn.Module):"
        yield "    def __init__(self):"
        yield "        super().__init__()"
        yield f"        self.gain = nn.Parameter(torch.ones({d}))"
        yield "    def forward(self, x):"
        yield "        return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)"
    if case["adapter"] != "none":
        yield "class Adapted(nn.Module):"
        yield "    def __init__(self, base):"
        yield "        super().__init__()"
        yield "        self.base = base"
        yield "        self.lora_a, self.lora_b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)"
        yield "    def forward(self, x):"
        yield "        return self.base(x) + self.lora_b(self.lora_a(x))"
    if case["position"] == "rotary" and case["attention"] != "none":
        yield "def turned(x):"
        yield f"    a = (torch.arange(x.shape[2])[:, None] / 100.0 ** (torch.arange({e // 2}) / {e // 2})).to(x.dtype)"
        yield "    p, q = x.chunk(2, -1)"
        yield "    return torch.cat([p * a.cos() - q * a.sin(), q * a.cos() + p * a.sin()], -1)"


def _norm(case: Case) -> str:
    d = sizes(case)["d"]
    return {"layer": f"nn.LayerNorm({d})", "rms": f"nn.RMSNorm({d})", "own": "Norm()", "none": "nn.Identity()"}[
        case["norm"]
    ]


def _layer(case: Case) -> Iterator[str]:
    size, bias = sizes(case), "" if case["bias"] == "yes" else ", bias=False"
    d, f, h, k, e = size["d"], size["f"], size["h"], size["k"], size["d"] // size["h"]
    attends, normed = case["attention"] != "none", case["norm"] != "none"
    norms = {"parallel": 1, "sandwich": 2 + 2 * attends}.get(case["residual"], 1 + attends)
    yield "class Layer(nn.Module):"
    yield "    def __init__(self, i):"
    yield "        super().__init__()"
    if case["condition"] == "index":
        yield "        self.i = i"
    if case["condition"] == "attribute":
        yield "        self.gain = 1.0"
    for number in range(norms if normed else 0):
        yield f"        self.norm{number} = {_norm(case)}"
    if case["attention"] == "fused":
        yield f"        self.qkv, self.o = nn.Linear({d}, {3 * d}{bias}), nn.Linear({d}, {d}{bias})"
    elif attends:
        yield f"        self.q, self.k, self.v = nn.Linear({d}, {d}{bias}), nn.Linear({d}, {k * e}{bias}), nn.Linear({d}, {k * e}{bias})"
        yield f"        self.o = nn.Linear({d}, {d}{bias})"
    down = f"nn.Linear({f}, {d}{bias})"
    if case["adapter"] != "none":
        down = f"Adapted({down})"
    if case["mlp"] == "experts":
        yield f"        self.router = nn.Linear({d}, 4, bias=False)"
        yield f"        self.up, self.down = (nn.ModuleList(nn.Linear(*s{bias}) for _ in range(4)) for s in (({d}, {f}), ({f}, {d})))"
    elif case["mlp"] == "stacked":
        yield f"        self.router = nn.Linear({d}, 4, bias=False)"
        yield f"        self.up, self.down = nn.Parameter(torch.randn(4, {d}, {f}) * 0.2), nn.Parameter(torch.randn(4, {f}, {d}) * 0.2)"
    else:
        yield f"        self.up, self.down = nn.Linear({d}, {2 * f if case['mlp'] == 'halves' else f}{bias}), {down}"
        if case["mlp"] == "gated":
            yield f"        self.gate = nn.Linear({d}, {f}{bias})"
    if case["residual"] == "scaled":
        yield f"        self.scale = nn.Parameter(torch.full(({d},), 0.5))"
    if case["unused"] == "parameter":
        yield f"        self.spare = nn.Parameter(torch.ones({d}))"
    if case["buffer"] in ("scale", "transient"):
        kept = "" if case["buffer"] == "scale" else ", persistent=False"
        yield f'        self.register_buffer("factor", torch.linspace(0.5, 1.5, {d}){kept})'
    if case["buffer"] == "counter":
        yield '        self.register_buffer("calls", torch.zeros(()))'
    if attends:
        yield from _attention(case, h, k, e)
    yield "    def mlp(self, x):"
    act = ACTS[case["act"]]
    if case["mlp"] == "gated":
        yield f"        return self.down({act}(self.gate(x)) * self.up(x))"
    elif case["mlp"] == "halves":
        yield "        a, b = self.up(x).chunk(2, -1)"
        yield f"        return self.down({act}(a) * b)"
    elif case["mlp"] == "experts":
        yield "        p, e = self.router(x).softmax(-1).topk(2)"
        yield f"        return sum((p * (e == j)).sum(-1, keepdim=True) * down({act}(up(x))) for j, (up, down) in enumerate(zip(self.up, self.down)))"
    elif case["mlp"] == "stacked":
        yield f'        y = torch.einsum("bsef,efd->bsed", {act}(torch.einsum("bsd,edf->bsef", x, self.up)), self.down)'
        yield "        return (self.router(x).softmax(-1)[..., None] * y).sum(2)"
    else:
        yield f"        return self.down({act}(self.up(x)))"
    yield from _forward(case)


def _attention(case: Case, h: int, k: int, e: int) -> Iterator[str]:
    yield "    def attend(self, x):"
    if case["condition"] == "index":
        yield "        if self.i % 2:"
        yield "            return x"
    yield "        b, s, _ = x.shape"
    if case["attention"] == "fused":
        yield f"        q, k, v = self.qkv(x).view(b, s, 3, -1, {e}).permute(2, 0, 3, 1, 4)"
    else:
        yield f"        q, k, v = (f(x).view(b, s, -1, {e}).transpose(1, 2) for f in (self.q, self.k, self.v))"
    if case["position"] == "rotary":
        yield "        q, k = turned(q), turned(k)"
    if k != h:
        yield f"        k, v = (t.repeat_interleave({h // k}, 1) for t in (k, v))"
    if case["position"] == "alibi":
        yield "        far = torch.arange(s)[None] - torch.arange(s)[:, None]"
        yield f"        bias = far * torch.tensor([2.0**-n for n in range({h})], dtype=x.dtype)[:, None, None]"
    later = "torch.ones(s, s, dtype=torch.bool).triu(1)"
    if case["attention"] == "eager":
        added = " + bias" if case["position"] == "alibi" else ""
        yield f"        w = (q @ k.transpose(-1, -2) / {e}**0.5{added}).masked_fill({later}, -torch.inf)"
        yield "        y = w.softmax(-1) @ v"
    elif case["position"] == "alibi":
        yield f"        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill({later}, -torch.inf))"
    else:
        yield "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
    yield "        return self.o(y.transpose(1, 2).flatten(2))"


def _forward(case: Case) -> Iterator[str]:
    attends, counter = case["attention"] != "none", iter(range(4))

    def normed(value: str) -> str:
        return f"self.norm{next(counter)}({value})" if case["norm"] != "none" else value

    yield "    def forward(self, x, shift=0.0):" if case["call"] == "keyword" else "    def forward(self, x):"
    if case["buffer"] == "counter":
        yield "        self.calls += 1"
    if case["condition"] == "training":
        yield "        if self.training:"
        yield "            x = x * 1.5"
    if case["condition"] == "length":
        yield "        if x.shape[1] > 7:"
        yield "            x = x * 0.5"
    if case["condition"] == "attribute":
        yield "        x = x * self.gain"
    if case["buffer"] in ("scale", "transient"):
        yield "        x = x * self.factor"
    if case["call"] == "keyword":
        yield "        x = x + shift"
    form = case["residual"]
    scale = "self.scale * " if form == "scaled" else ""
    if form == "parallel":
        yield f"        h = {normed('x')}"
        yield f"        x = x + {'self.attend(h) + ' if attends else ''}self.mlp(h)"
    for part in ("attend", "mlp") if form != "parallel" else ():
        if part == "attend" and not attends:
            continue
        if form == "post":
            yield f"        x = {normed(f'x + self.{part}(x)')}"
        elif form == "sandwich":
            inner = normed("x")
            yield f"        x = x + {normed(f'self.{part}({inner})')}"
        else:
            yield f"        x = x + {scale}self.{part}({normed('x')})"
    yield "        return x, x.mean()" if case["call"] == "pair" else "        return x"


def _net(case: Case) -> Iterator[str]:
    d, n = sizes(case)["d"], sizes(case)["n"]
    form, container, call = case["loss"], case["container"], case["call"]
    yield "class Net(nn.Module):"
    yield "    def __init__(self):"
    yield "        super().__init__()"
    yield f"        self.embed = nn.Embedding({WORDS}, {d})"
    if case["position"] == "table":
        yield f"        self.place = nn.Embedding(64, {d})"
    if case["unused"] == "module":
        yield f"        self.spare = nn.Linear({d}, {d})"
    yield f"        made = [Layer(i) for i in range({n})]"
    if case["share"] == "layer":
        yield "        made[-1] = made[0]"
    elif case["share"] == "norm":
        yield "        made[-1].norm0 = made[0].norm0"
    elif case["share"] == "mlp":
        yield "        made[-1].up, made[-1].down = made[0].up, made[0].down"
    if container == "attributes":
        yield f"        {', '.join(f'self.layer{i}' for i in range(n))} = made"
    else:
        yield "        " + {
            "list": "self.layers = nn.ModuleList(made)",
            "sequential": "self.layers = nn.Sequential(*made)",
            "dict": 'self.layers = nn.ModuleDict({f"{i}": each for i, each in enumerate(made)})',
            "two_lists": f"self.first, self.second = nn.ModuleList(made[:{n // 2}]), nn.ModuleList(made[{n // 2}:])",
        }[container]
    yield f"        self.last = {_norm(case)}"
    if form != "mse":
        linear = f"nn.Linear({d}, {WORDS}{', bias=False' if case['head'] == 'linear' else ''})"
        yield f"        self.head = {linear}" if case["head"] != "mlp" else f"        self.head = nn.Sequential(nn.Linear({d}, {d}), nn.GELU(), {linear})"
    if case["share"] == "tied":
        yield "        self.head.weight = self.embed.weight"
    yield "    def forward(self, input_ids, labels=None):" if form != "outside" else "    def forward(self, input_ids):"
    yield "        x = self.embed(input_ids)" + (" + self.place(torch.arange(input_ids.shape[1]))" if case["position"] == "table" else "")
    if call in ("skip", "collected"):
        yield "        kept = [x]"
    inner = "        "
    if call == "twice":
        yield "        for _ in range(2):"
        inner = "            "
    called = {"keyword": "layer(x, shift=0.1)", "pair": "layer(x)[0]"}.get(call, "layer(x)")
    if container == "sequential":
        yield f"{inner}x = self.layers(x)" if case["unused"] != "layer" else f"{inner}x = self.layers[:-1](x)"
    else:
        layers = {
            "list": "self.layers", "dict": "[*self.layers.values()]", "two_lists": "[*self.first, *self.second]",
            "attributes": f"[{', '.join(f'self.layer{i}' for i in range(n))}]",
        }[container]  # fmt: skip
        yield f"{inner}for layer in {layers}{'[:-1]' if case['unused'] == 'layer' else ''}:"
        yield f"{inner}    x = {called}"
        if call == "collected":
            yield f"{inner}    kept.append(x)"
    if call == "skip":
        yield "        x = x + kept[0]"
    if call == "collected":
        yield "        x = x + 0.5 * kept[1]"
    if form == "mse":
        yield "        return F.mse_loss(self.last(x), labels)"
        return
    yield "        y = self.head(self.last(x))"
    if form == "outside":
        yield "        return y"
        return
    smooth = ", label_smoothing=0.1" if form == "smooth" else ""
    more = {"auxiliary": " + 0.1 * x.pow(2).mean()", "z": " + 0.1 * y.logsumexp(-1).pow(2).mean()"}.get(form, "")
    yield f"        return F.cross_entropy(y.flatten(0, 1), labels.flatten(){smooth}){more}"


def _build(case: Case) -> Iterator[str]:
    size, kind = sizes(case), case.dtype
    yield "def build():"
    yield "    torch.manual_seed(0)"
    if case["family"] == "own":
        yield "    model = Net()" + (".double()" if kind == "float64" else "")
    else:
        name, options = CONFIGURATIONS[case["family"]]
        end = {"gpt2": "LMHeadModel", "gemma3": "ForCausalLM"}.get(case["family"], "ForCausalLM")
        config = {"gemma3": "Gemma3TextConfig"}.get(case["family"], f"{name}Config")
        tied = ", tie_word_embeddings=True" if case["share"] == "tied" else ""
        yield f"    from transformers import {config}, {name}{end}"
        yield f"    model = {name}{end}({config}(vocab_size={WORDS}, {options.format(**size)}{tied}))" + (".double()" if kind == "float64" else "")
    yield "    with torch.no_grad():"
    yield "        for p in model.parameters():  # nothing stays at its ones and zeros"
    yield "            p.add_(torch.randn_like(p) * 0.05)"
    if case["adapter"] == "wrapped":
        yield "    for n, p in model.named_parameters():"
        yield '        p.requires_grad_("lora" in n)'
    frozen = {"table": is_table(case), "layer": first_layer(case), "norms": "norm"}.get(case["frozen"])
    if case["frozen"] == "norms" and case["family"] == "gpt2":
        frozen = "ln_"
    if frozen is not None:
        yield "    for n, p in model.named_parameters():"
        yield f'        if "{frozen}" in n:'
        yield "            p.requires_grad_(False)"
    yield "    return model"
