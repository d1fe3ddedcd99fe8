"""Template of the programs of all cases.

A line that ends with `#? factor=choice,choice & factor!=choice` is in the programs of such cases; with the line, the
block below it. After `#?-` the block stays without the line. `<name>` stands for a value of `program.values`.
"""

TEMPLATE = """
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.utils.checkpoint import checkpoint #? call=checkpoint
import oases
from torch.distributed.device_mesh import init_device_mesh
class Norm(nn.Module): #? norm=own & own=yes
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(<d>))
    def forward(self, x):
        return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
class Adapted(nn.Module): #? adapter!=none
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))
def turned(x): #? position=rotary
    a = (torch.arange(x.shape[2])[:, None] / 100.0 ** (torch.arange(<e> // 2) / (<e> // 2))).to(x.dtype)
    p, q = x.chunk(2, -1)
    return torch.cat([p * a.cos() - q * a.sin(), q * a.cos() + p * a.sin()], -1)
class Layer(nn.Module): #? own=yes
    def __init__(self, i):
        super().__init__()
        self.i = i #? condition=index
        self.volume = 1.0 #? condition=attribute
        self.norms = nn.ModuleList(<norm> for _ in range(<norms>)) #? norm!=none
        self.qkv, self.o = nn.Linear(<d>, 3 * <d><bias>), nn.Linear(<d>, <d><bias>) #? attention=fused
        self.q, self.o = nn.Linear(<d>, <d><bias>), nn.Linear(<d>, <d><bias>) #? attention=sdpa,eager
        self.k, self.v = nn.Linear(<d>, <k> * <e><bias>), nn.Linear(<d>, <k> * <e><bias>) #? attention=sdpa,eager
        self.inner = nn.MultiheadAttention(<d>, <h><bias>, batch_first=True) #? attention=module
        self.up, self.down = nn.Linear(<d>, <f><bias>), nn.Linear(<f>, <d><bias>) #? mlp=plain,gated
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(<d>, <f><bias>)) #? mlp=normed
        self.down = nn.utils.parametrizations.weight_norm(nn.Linear(<f>, <d><bias>)) #? mlp=normed
        self.gate = nn.Linear(<d>, <f><bias>) #? mlp=gated
        self.up, self.down = nn.Linear(<d>, 2 * <f><bias>), nn.Linear(<f>, <d><bias>) #? mlp=halves
        self.router = nn.Linear(<d>, 4, bias=False) #? mlp=experts,stacked
        self.up = nn.ModuleList(nn.Linear(<d>, <f><bias>) for _ in range(4)) #? mlp=experts
        self.down = nn.ModuleList(nn.Linear(<f>, <d><bias>) for _ in range(4)) #? mlp=experts
        self.up = nn.Parameter(torch.randn(4, <d>, <f>) * 0.2) #? mlp=stacked
        self.down = nn.Parameter(torch.randn(4, <f>, <d>) * 0.2) #? mlp=stacked
        self.down = Adapted(self.down) #? adapter!=none
        self.scale = nn.Parameter(torch.full((<d>,), 0.5)) #? residual=scaled
        self.spare = nn.Parameter(torch.ones(<d>)) #? unused=parameter
        self.register_buffer("factor", torch.linspace(0.5, 1.5, <d>)) #? buffer=scale
        self.register_buffer("factor", torch.linspace(0.5, 1.5, <d>), persistent=False) #? buffer=transient
        self.register_buffer("calls", torch.zeros(())) #? buffer=counter
    def attend(self, x): #? attention!=none
        if self.i % 2: #? condition=index
            return x
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, -1, <e>).permute(2, 0, 3, 1, 4) #? attention=fused
        q, k, v = (f(x).view(b, s, -1, <e>).transpose(1, 2) for f in (self.q, self.k, self.v)) #? attention=sdpa,eager
        q, k = turned(q), turned(k) #? position=rotary
        k, v = (t.repeat_interleave(<h> // <k>, 1) for t in (k, v)) #? keys!=all
        later = torch.ones(s, s, dtype=torch.bool).triu(1) #? attention=eager,module
        return self.inner(x, x, x, attn_mask=later, need_weights=False)[0] #? attention=module
        later = torch.ones(s, s, dtype=torch.bool).triu(1) #? attention!=eager,module & position=alibi
        slopes = torch.tensor([2.0**-n for n in range(<h>)], dtype=x.dtype)[:, None, None] #? position=alibi
        bias = (torch.arange(s)[None] - torch.arange(s)[:, None]) * slopes #? position=alibi
        w = q @ k.transpose(-1, -2) / <e>**0.5 #? attention=eager
        w = w + bias #? attention=eager & position=alibi
        y = w.masked_fill(later, -torch.inf).softmax(-1) @ v #? attention=eager
        mask = bias.masked_fill(later, -torch.inf) #? attention!=eager,module & position=alibi
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask) #? attention!=eager,module & position=alibi
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) #? attention!=eager,module & position!=alibi
        return self.o(y.transpose(1, 2).flatten(2)) #? attention!=module
    def mlp(self, x):
        return self.down(<act>(self.up(x))) #? mlp=plain,normed
        return self.down(<act>(self.gate(x)) * self.up(x)) #? mlp=gated
        a, b = self.up(x).chunk(2, -1) #? mlp=halves
        return self.down(<act>(a) * b) #? mlp=halves
        p, e = self.router(x).softmax(-1).topk(2) #? mlp=experts
        parts = [down(<act>(up(x))) for up, down in zip(self.up, self.down)] #? mlp=experts
        return sum((p * (e == j)).sum(-1, keepdim=True) * y for j, y in enumerate(parts)) #? mlp=experts
        y = <act>(torch.einsum("bsd,edf->bsef", x, self.up)) #? mlp=stacked
        return (self.router(x).softmax(-1)[..., None] * torch.einsum("bsef,efd->bsed", y, self.down)).sum(2) #? mlp=stacked
    def forward(self, x): #? call!=keyword,mask,table
        <forward>
    def forward(self, x, shift=0.0): #? call=keyword
        x = x + shift
        <forward>
    def forward(self, x, mask): #? call=mask
        x = x * mask[..., None]
        <forward>
    def forward(self, x, table): #? call=table
        x = x + table
        <forward>
class Net(nn.Module): #? own=yes
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(<v>, <d>)
        self.place = nn.Embedding(64, <d>) #? position=table
        self.spare = nn.Linear(<d>, <d>) #? unused=module
        made = [Layer(i) for i in range(<n>)]
        made[-1] = made[0] #? share=layer
        made[-1].norms = made[0].norms #? share=norm
        made[-1].up, made[-1].down = made[0].up, made[0].down #? share=mlp
        self.layers = nn.ModuleList(made) #? container=list
        self.layers = nn.Sequential(*made) #? container=sequential
        self.layers = nn.ModuleDict({f"{i}": each for i, each in enumerate(made)}) #? container=dict
        self.first, self.second = nn.ModuleList(made[: <n> // 2]), nn.ModuleList(made[<n> // 2 :]) #? container=two_lists
        for i, each in enumerate(made): #? container=attributes
            setattr(self, f"layer{i}", each)
        self.last = <norm>
        self.head = nn.Linear(<d>, <v>, bias=False) #? loss!=mse & head=linear
        self.head = nn.Linear(<d>, <v>) #? loss!=mse & head=bias
        self.head = nn.Sequential(nn.Linear(<d>, <d>), nn.GELU(), nn.Linear(<d>, <v>)) #? loss!=mse & head=mlp
        self.head.weight = self.embed.weight #? share=tied
    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        x = F.dropout(x, 0.2, self.training) #? passes=noise
        x = x + self.place(torch.arange(input_ids.shape[1])) #? position=table
        kept = [x] #? call=skip,collected
        layers = self.layers #? container=list,sequential
        layers = [*self.layers.values()] #? container=dict
        layers = [*self.first, *self.second] #? container=two_lists
        layers = [getattr(self, f"layer{i}") for i in range(<n>)] #? container=attributes
        layers = layers[:-1] #? unused=layer
        for _ in range(2): #?- call=twice
            x = layers(x) #? container=sequential
            for layer in layers: #? container!=sequential
                x = layer(x) #? call=plain,skip,twice,collected
                x = layer(x, (input_ids > 3).to(x.dtype)) #? call=mask
                x = layer(x, torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None] / x.shape[2]) #? call=table
                x = checkpoint(layer, x, use_reentrant=False) #? call=checkpoint
                x = layer(x, shift=0.1) #? call=keyword
                x = layer(x)[0] #? call=pair
                kept.append(x) #? call=collected
        x = x + kept[0] #? call=skip
        x = x + 0.5 * kept[1] #? call=collected
        parts = zip(x.chunk(2, 1), labels.chunk(2, 1)) #? loss=chunked
        return sum(F.cross_entropy(self.head(self.last(h)).flatten(0, 1), l.flatten(), reduction="sum") for h, l in parts) / labels.numel() #? loss=chunked
        return F.mse_loss(self.last(x), labels) #? loss=mse
        y = self.head(self.last(x)) #? loss!=mse,chunked
        return y #? loss=outside
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()) #? loss=cross,ignored
        return F.cross_entropy(y.flatten(0, 1), labels.flatten(), label_smoothing=0.1) #? loss=smooth
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()) + 0.1 * x.pow(2).mean() #? loss=auxiliary
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()) + 0.1 * y.logsumexp(-1).pow(2).mean() #? loss=z
def build():
    torch.manual_seed(0)
    model = Net().to(torch.<dtype>) #? own=yes
    from transformers import <config>, <class> #? own=no
    model = <class>(<config>(vocab_size=<v>, <options>)).to(torch.<dtype>) #? own=no
    [p.data.add_(torch.randn_like(p) * 0.05) for p in model.parameters()]
    [p.requires_grad_("lora" in n) for n, p in model.named_parameters()] #? adapter=wrapped
    [p.requires_grad_(False) for n, p in model.named_parameters() if "<frozen>" in n] #? frozen=table,layer,norms,thawed
    return model
def batch(step):
    g = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(<v>, (2, <shape>), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.3] = -100 #? loss=ignored
    labels = torch.randn(*ids.shape, <d>, generator=g, dtype=torch.<dtype>) #? loss=mse
    return {"input_ids": ids, "labels": labels}
def cut(data, number, index): #? cut=yes
    return {k: v.chunk(number)[index] for k, v in data.items()}
def loss_of(model, data): #? direct=no
    return model(**data).loss #? outside=no
    y = model(input_ids=data["input_ids"]) #? outside=yes & own=yes
    y = model(input_ids=data["input_ids"]).logits #? outside=yes & own=no
    more = 0.1 * y.logsumexp(-1).pow(2).mean() if <z> else 0 #? outside=yes
    return F.cross_entropy(y.flatten(0, 1), data["labels"].flatten(), label_smoothing=<smooth>) + more #? outside=yes
def losses_of(model, data, replica): #? staged=no & replicas=yes
    if replica is not None:
        return <loss:cut(data, <dp>, replica)>
    return torch.stack([<loss:cut(data, <dp>, r)> for r in range(<dp>)])
def train(model, replica=None, log=lambda *_: None):
    parameters = [p for n, p in model.named_parameters() if p.requires_grad]
    parameters = [p for p in parameters if p.dim() == 2] #? optimizer=muon
    parameters = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in parameters if p.dim() < 2]}] #? groups=decay
    optimizer = <optimizer>(parameters, <settings>) #? optimizer!=own & made_by=torch
    optimizer = <optimizer>(parameters, <settings>) if replica is None else oases.make_optimizer(model, <optimizer>, params=parameters, <settings>) #? made_by=oases
    def halve(p): #? hook=accumulated
        p.grad.mul_(0.5)
    [p.register_post_accumulate_grad_hook(halve) for p in model.parameters() if p.requires_grad] #? hook=accumulated
    [p.register_hook(lambda g: g * 0.5) for p in model.parameters() if p.requires_grad] #? hook=gradient
    model.<head>.register_forward_hook(lambda m, args, y: y * 0.5) #? hook=forward
    model.<head>.register_full_backward_hook(lambda m, given, got: (given[0] * 0.5,)) #? hook=module
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) #? scaler!=none
    average = {n: p.detach().clone() for n, p in model.named_parameters()} #? edited=average
    model.eval() #? evaluated=first
    with torch.no_grad(): #? evaluated=first
        log("loss", <evaluated:batch(9)>)
    model.train() #? evaluated=first
    for step in range(3):
        [setattr(m, "volume", 1.0 + step) for m in model.modules() if hasattr(m, "volume")] #? condition=attribute
        if step == 1: #? frozen=later
            [p.requires_grad_(False) for n, p in model.named_parameters() if "<layer>" in n]
        if step == 1: #? frozen=thawed
            thawed = [p for n, p in model.named_parameters() if "<layer>" in n]
            [p.requires_grad_(True) for p in thawed]
            optimizer.add_param_group({"params": thawed}) if thawed else None
        torch.manual_seed(step) #? passes=noise
        def closure(): #?- closure=yes
            <zero> #? closure=yes
            if step == 1: #? skipped=batch
                continue
            for n in range(2): #?- accumulate!=1
                with model.no_sync() if replica is not None and n == 0 and hasattr(model, "no_sync") else torch.enable_grad(): #?- accumulate=no_sync
                    with torch.no_grad(): #? passes=peek
                        log("loss", <losses:batch(8)>)
                    loss = <losses:batch(step)> #? accumulate=1
                    loss = <losses:cut(batch(step), 2, n)> #? accumulate!=1
                    loss = loss + <losses:batch(7)> #? passes=two
                    total = loss.mean() * (torch.inf if step == 1 else 1.0) #? scaler=overflow
                    scaler.scale(total).backward() #? scaler=overflow
                    scaler.scale(loss.mean()).backward() #? scaler=yes
                    loss.mean().backward() #? scaler=none & staged=no
                    if replica is None: #? staged=yes
                        loss.backward()
            log("loss", loss)
            log("gradients", model)
            return loss.mean() #? closure=yes
        if step == 1: #? skipped=gradient
            <zero>
            continue
        scaler.unscale_(optimizer) #? scaler!=none
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) #? clip=torch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) if replica is None else oases.clip_grad_norm(model, 0.1) #? clip=oases
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01) #? clip=value
        scaler.step(optimizer) #? scaler!=none
        scaler.update() #? scaler!=none
        optimizer.step(closure) #? closure=yes
        optimizer.step() #? scaler=none & closure=no & optimizer!=own
        with torch.no_grad(): #? optimizer=own
            [p.sub_(0.1 * p.grad) for p in model.parameters() if p.grad is not None]
        <zero> #? closure=no
        [p.data.mul_(0.9) for p in model.parameters()] #? edited=data
        [p.data[0].zero_() for p in model.parameters()] #? edited=row
        with torch.no_grad(): #? edited=average
            for n, p in model.named_parameters():
                p.copy_(average[n].lerp_(p.detach(), 0.5))
        if step == 1: #? saved!=no
            if replica is not None: #? saved=oases
                oases.save_checkpoint(__file__ + ".saved", model, <saved>, step=step)
                [p.data.zero_() for p in model.parameters()]
                oases.load_checkpoint(__file__ + ".saved", model, <saved>)
            state = {k: v.clone() for k, v in model.state_dict().items()} #? saved=state
            [p.data.zero_() for p in model.parameters()] #? saved=state
            model.load_state_dict(state) #? saved=state
            optimizer.load_state_dict(optimizer.state_dict()) #? saved=state & optimizer!=own
        log("weights", model)
        model.eval() #? evaluated=between
        with torch.no_grad(): #? evaluated=between
            log("loss", <evaluated:batch(9)>)
        model.train() #? evaluated=between
def parallel(model):
    mesh = init_device_mesh("cpu", <mesh>, mesh_dim_names=<names>)
    spec = oases.ParallelSpec(inputs=((), <inputs>)) #? own=yes
    spec = None #? own=no
    return oases.parallelize(model, mesh=mesh, spec=spec<parallel>), <replica>
"""
