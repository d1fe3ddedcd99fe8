"""Models whose vocabulary is cut: small ones of transformers, tables tied in each library's way, and a plain one."""

import os

import torch
from torch import nn

os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def gpt2(vocabulary=97):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=32, n_embd=32, n_layer=1, n_head=2))


def llama(vocabulary=96):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
        )
    )


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5,
        )
    )  # fmt: skip


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=97, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=2,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def opt():
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=97, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
            scale_embedding=True,
        )
    )  # fmt: skip


class Plain(nn.Module):
    """A language model of nobody's library, with its own loss code and both ways to tie a head."""

    def __init__(self, vocabulary=51, width=8, tied=True):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=1)
        self.positions = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids, labels):
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits = self.head(x)
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}
