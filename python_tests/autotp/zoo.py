"""Small unedited models of transformers, with random weights, and data for them."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=90)
GATED = dict(**SIZES, intermediate_size=64, num_key_value_heads=2)
ENCODER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)

MODELS = {
    "gpt2": ("GPT2LMHeadModel", dict(**GPT2, vocab_size=97)),
    "llama": ("LlamaForCausalLM", GATED),
    "qwen3": ("Qwen3ForCausalLM", dict(**GATED, head_dim=8)),
    "mistral": ("MistralForCausalLM", dict(**GATED, sliding_window=6)),
    "gemma3": (
        "Gemma3ForCausalLM",
        dict(**GATED, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    ),
    "phi": ("PhiForCausalLM", dict(**SIZES, intermediate_size=64)),
    "gpt_neox": ("GPTNeoXForCausalLM", dict(**SIZES, intermediate_size=64)),
    "opt": ("OPTForCausalLM", dict(**SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64)),
    "bert": ("BertForMaskedLM", dict(**SIZES, intermediate_size=64)),
    "t5": (
        "T5ForConditionalGeneration",
        dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=90, decoder_start_token_id=0),
    ),
    "vit": ("ViTForImageClassification", dict(**ENCODER, image_size=16, patch_size=4)),
}
"""The models of the promise: class and configuration."""

OTHERS = {
    "qwen2": ("Qwen2ForCausalLM", GATED),
    "phi3": ("Phi3ForCausalLM", dict(**GATED, pad_token_id=0)),
    "gemma2": ("Gemma2ForCausalLM", dict(**GATED, head_dim=8, sliding_window=4)),
    "gptj": ("GPTJForCausalLM", dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=90, n_positions=64)),
    "codegen": ("CodeGenForCausalLM", dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=90)),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], vocab_size=90),
    ),
    "bloom": ("BloomForCausalLM", dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=90)),
    "mpt": ("MptForCausalLM", dict(d_model=32, n_layers=2, n_heads=4, vocab_size=90)),
    "falcon": ("FalconForCausalLM", SIZES),
    "olmo2": ("Olmo2ForCausalLM", dict(**SIZES, intermediate_size=64)),
    "bitnet": ("BitNetForCausalLM", dict(**GATED, bos_token_id=0, eos_token_id=0)),
    "cohere": ("CohereForCausalLM", GATED),
    "glm4": ("Glm4ForCausalLM", dict(**GATED, head_dim=8, pad_token_id=0)),
    "modernbert": ("ModernBertForMaskedLM", dict(**SIZES, intermediate_size=64, pad_token_id=0)),
    "deberta": ("DebertaV2ForMaskedLM", dict(**SIZES, intermediate_size=64, relative_attention=True)),
    "distilbert": ("DistilBertForMaskedLM", dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=90)),
    "bart": (
        "BartForConditionalGeneration",
        dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=90, max_position_embeddings=64),
    ),
    "dinov2": ("Dinov2ForImageClassification", dict(ENCODER, image_size=16, patch_size=4)),
    "swin": (
        "SwinForImageClassification",
        dict(embed_dim=16, depths=[2, 2], num_heads=[2, 4], image_size=32, patch_size=4, window_size=4),
    ),
    "albert": ("AlbertForMaskedLM", dict(**SIZES, intermediate_size=64, embedding_size=16)),
}  # fmt: skip
"""Models that nothing was written for."""

MIXTURES = {
    "mixtral": ("MixtralForCausalLM", dict(**GATED, num_local_experts=4)),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        dict(**GATED, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
             shared_expert_intermediate_size=32, decoder_sparse_step=1, norm_topk_prob=False),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        dict(**GATED, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
             norm_topk_prob=True),
    ),
    "olmoe": ("OlmoeForCausalLM", dict(**GATED, num_experts=4, num_experts_per_tok=2)),
}  # fmt: skip
"""Models with mixtures of experts."""

LATER_MIXTURES = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        dict(**SIZES, num_key_value_heads=4, intermediate_size=64, moe_intermediate_size=16, n_routed_experts=8,
             num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=1, first_k_dense_replace=1,
             q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        dict(**GATED, head_dim=8, num_local_experts=8, num_experts_per_tok=2, sliding_window=6, pad_token_id=0),
    ),
    "granitemoe": ("GraniteMoeForCausalLM", dict(**GATED, num_local_experts=8, num_experts_per_tok=2)),
    "phimoe": ("PhimoeForCausalLM", dict(**GATED, num_local_experts=8, num_experts_per_tok=2)),
}  # fmt: skip
"""Models with mixtures of experts that are tested with balanced experts alone."""

HYBRIDS = {
    "jamba": (
        "JambaForCausalLM",
        dict(**GATED, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=4, mamba_dt_rank=4,
             use_mamba_kernels=False),
    ),
    "lfm2": (
        "Lfm2ForCausalLM", dict(**GATED, layer_types=["conv", "full_attention"], block_multiple_of=8, pad_token_id=0)
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        dict(**GATED, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
             linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0),
    ),
}  # fmt: skip
"""Models whose layers are of two kinds, of which one is no attention."""

ALL = {**MODELS, **OTHERS, **MIXTURES, **LATER_MIXTURES, **HYBRIDS}

DROPOUTS = (
    *(
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "dropout",
        "attention_dropout",
        "hidden_dropout_prob",
        "dropout_rate",
    ),
    *("attention_probs_dropout_prob", "hidden_dropout", "embed_dropout", "drop_path_rate", "activation_dropout"),
    *("embedding_dropout", "mlp_dropout", "classifier_dropout_prob"),
)


def config(name, **changed):
    kind, sizes = ALL[name]
    found = getattr(transformers, kind).config_class(**{**sizes, **changed})
    for dropout in DROPOUTS:  # masks of a model in one process cannot be had again
        if getattr(found, dropout, None):
            setattr(found, dropout, 0.0)
    return found


def build(name, seed=0, **changed):
    kind = ALL[name][0]
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config(name, **changed))
    with torch.no_grad():  # nothing at its initial zeros and ones, where a gradient could hide
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def batch(name, samples=4, length=10, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    if name in ("vit", "dinov2", "swin"):
        size = 32 if name == "swin" else 16
        pixels = torch.randn(samples, 3, size, size, generator=generator)
        return {"pixel_values": pixels.to(dtype), "labels": torch.arange(samples) % 2}
    tokens = torch.randint(3, 90, (samples, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, length - 3 :] = 0  # a sample that is shorter
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
