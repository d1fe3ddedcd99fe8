"""Runs of transformers models: equal for all degrees, instruction data, wrong use."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from oases import TrainConfig, Trainer, UsageError
from oases.autotp.pipeline.dataflow import IGNORED
from oases.models.options import Degrees
from oases_train.instructions import Instructions
from oases_train.plan import Run
from oases_train.tokenizer import load_tokenizer
from oases_train.tokens import open_corpus

LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=256, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip
OPT = dict(
    model_type="opt", architectures=["OPTForCausalLM"], hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=256, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64, dropout=0.0,
)  # fmt: skip
T5 = dict(
    model_type="t5", architectures=["T5ForConditionalGeneration"], d_model=32, d_kv=8, d_ff=64, num_layers=2,
    num_decoder_layers=3, num_heads=4, vocab_size=256, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
)  # fmt: skip
STEPS, BATCH, SEQUENCE = 4, 8, 24


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.fixture
def t5(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(T5))
    return str(tmp_path)


@pytest.fixture
def single_layer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    return str(tmp_path)


@pytest.fixture
def tuning(tmp_path):
    path = tmp_path / "tuning.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "response": f"{2 * i} ok"}) + "\n" for i in range(40)))
    return str(path)


def config_of(model, **changes):
    sizes = dict(batch=BATCH, sequence=SEQUENCE, steps=STEPS, micro_batches=2, validation_batches=2, warmup=0)
    return TrainConfig(model=model, **{**sizes, "learning_rate": 1e-2, **changes})


def trained(model, degrees, changes):
    pipeline, data, tensor = degrees
    trainer = Trainer(config_of(model, degrees=Degrees(data, pipeline, tensor), **changes))
    result = trainer.train()
    trainer.close()
    return [*result["losses"], result["validation_loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("instructions", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_degrees_train_alike(two_ranks, llama, corpus, tuning, instructions):
    data = tuning if instructions else corpus
    expected = trained(llama, (1, 1, 1), {"data": data})
    assert expected[0] > expected[-1] + 0.1  # it learns
    for degrees, changes in (
        ((2, 1, 1), {}),
        ((1, 1, 2), {}),
        ((1, 1, 2), {"sequence_parallel": True}),
        ((1, 2, 1), {"zero": True}),
        ((1, 2, 1), {"fsdp": True}),
    ):
        for found in two_ranks.run(trained, llama, degrees, {"data": data, **changes}):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", [False, True])
def test_an_encoder_and_decoder_train_alike(two_ranks, t5, corpus, tuning, instructions):
    """On text and the text after it, and on prompts with responses."""
    data = tuning if instructions else corpus
    expected = trained(t5, (1, 1, 1), {"data": data})
    assert expected[0] > expected[-1] + 0.1  # it learns
    for degrees, changes in (((2, 1, 1), {}), ((1, 1, 2), {}), ((1, 2, 1), {"fsdp": True})):
        for found in two_ranks.run(trained, t5, degrees, {"data": data, **changes}):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_the_loss_of_prompts_is_that_of_each_alone(t5, tuning):
    """Padding has no part in it."""
    trainer = Trainer(config_of(t5, data=tuning, degrees=Degrees(1, 1, 1)))
    samples = trainer.config.samples(trainer.corpus, "train", 0, 4)
    trainer.model.eval()
    found = trainer.stage.evaluate([samples])
    losses = []
    for tokens, mask, labels in zip(*samples.values(), strict=True):
        known = labels[labels != IGNORED]
        logits = trainer.model(input_ids=tokens[mask == 1][None], labels=known[None]).logits[0]
        losses += torch.nn.functional.cross_entropy(logits.float(), known, reduction="none").tolist()
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "changes"), [((1, 1, 2), {}), ((1, 2, 1), {"fsdp": True})])
def test_a_single_layer_trains(two_ranks, single_layer, corpus, degrees, changes):
    expected = trained(single_layer, (1, 1, 1), {"data": corpus})
    assert expected[0] > expected[-1] + 0.1  # it learns
    for found in two_ranks.run(trained, single_layer, degrees, {"data": corpus, **changes}):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_stages_of_a_single_layer_are_refused(single_layer):
    with pytest.raises(UsageError, match=r"2 stages are more than the 1 layer; give fewer stages$"):
        Run.of(config_of(single_layer, degrees=Degrees(1, 2, 1)), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "changes"),
    [((1, 2, 1), {}), ((1, 1, 2), {}), ((1, 2, 1), {"fsdp": True}), ((1, 2, 1), {"zero": True})],
)
def test_balanced_experts_train_alike(two_ranks, tmp_path, corpus, degrees, changes):
    mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | mixture | {"tie_word_embeddings": False}))
    expected = trained(str(tmp_path), (1, 1, 1), {"data": corpus})
    run = {"data": corpus, "placement": "eplb", **changes}
    for found in two_ranks.run(trained, str(tmp_path), degrees, run):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"top_k": 1}, "top_k 1 needs a mixture of experts; give --experts N, too"),
        ({"model": None, "placement": "eplb"}, "placement 'eplb' needs a mixture of experts"),
    ],
)
def test_options_of_experts_need_them(llama, changes, why):
    with pytest.raises(UsageError, match=why):
        config_of(**{"model": llama, **changes})


def test_a_placement_sends_tokens_to_the_experts_of_a_model(llama):
    assert config_of(llama).model_experts == {}
    assert config_of(llama, placement="none").model_experts == {"experts": "balanced", "placement": "none"}


@pytest.mark.slow
def test_quantised_gradients_train_alike(two_ranks, llama, corpus):
    """Averages, with error feedback; reduce-scatters, without."""
    expected = trained(llama, (1, 1, 1), {"data": corpus})
    for changes in ({}, {"zero": True}, {"fsdp": True}):
        run = {"data": corpus, "gradient_wire": "int8", **changes}
        first, second = two_ranks.run(trained, llama, (1, 2, 1), run)
        assert first == second != expected
        assert first == pytest.approx(expected, rel=5e-3)


@pytest.mark.slow
def test_quantised_messages_train_alike(two_ranks, llama, corpus):
    """Stages of a transformers model."""
    expected = trained(llama, (1, 1, 1), {"data": corpus})
    first, second = two_ranks.run(trained, llama, (2, 1, 1), {"data": corpus, "pipeline_wire": "int8"})
    assert first == second != expected
    assert first == pytest.approx(expected, rel=5e-3)


@pytest.mark.slow
def test_bfloat16_with_masters_is_close_to_float32(two_ranks, llama, corpus):
    expected = trained(llama, (1, 1, 1), {"data": corpus})
    for found in two_ranks.run(trained, llama, (2, 1, 1), {"data": corpus, "precision": "bfloat16"}):
        assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.long
def test_packed_examples_have_losses_of_their_own(llama, tuning):
    """The loss of a packed batch is the mean over its responses, each computed alone."""
    trainer = Trainer(config_of(llama, data=tuning, degrees=Degrees(1, 1, 1)))
    samples = trainer.corpus.samples(split="train", step=0, batch=4, sequence=SEQUENCE, seed=0)
    trainer.model.eval()
    found = trainer.stage.evaluate([samples])
    losses = []
    for tokens, labels, positions in zip(*samples.values(), strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), SEQUENCE]
        for start, end in itertools.pairwise(starts):
            logits = trainer.model(input_ids=tokens[None, start:end]).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(
                logits.float(), labels[start + 1 : end], ignore_index=IGNORED, reduction="none"
            )
            losses += each[labels[start + 1 : end] != IGNORED].tolist()
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert (samples["labels"] == IGNORED).any()
    assert ((samples["labels"] == IGNORED) | (samples["labels"] == samples["input_ids"])).all()


def packed_opt(folder, tuning, degrees):
    with pytest.raises(UsageError, match=r"OPTForCausalLM does not separate the examples of a row by position_ids"):
        Trainer(config_of(folder, data=tuning, degrees=degrees))


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees", [Degrees(1, 1, 2), pytest.param(Degrees(1, 2, 1), marks=pytest.mark.slow)], ids=str
)
def test_a_model_whose_packed_examples_see_each_other_is_refused(two_ranks, tmp_path, tuning, degrees):
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    two_ranks.run(packed_opt, str(tmp_path), tuning, degrees)


def test_instructions_are_drawn_by_step_and_divided(tuning):
    data = Instructions(Path(tuning), load_tokenizer(None))
    draw = dict(batch=3, sequence=SEQUENCE, seed=1)
    first, again = (data.samples(split="train", step=5, **draw) for _ in range(2))
    other, held_out = data.samples(split="train", step=6, **draw), data.samples(split="validation", step=5, **draw)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["input_ids"], other["input_ids"])
    texts = [bytes(row.tolist()).decode() for row in held_out["input_ids"]]
    assert all(text.startswith(("1+1=2", "21+21=42")) for text in texts)
    assert tuning in data.description


class Letters:
    """Tokenizer that knows letters alone, and no end of a text."""

    end, fingerprint = None, "letters"

    def encode(self, texts):
        return [[ord(character) for character in text if character.isalpha()] for text in texts]


def test_a_response_without_tokens_is_refused(tmp_path):
    data = tmp_path / "numbers.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n\n{"prompt": "c", "response": "42"}\n')
    with pytest.raises(UsageError, match=r"numbers.jsonl', line 3: the tokenizer finds no token in 'response'"):
        Instructions(data, Letters())


def test_prompts_and_responses_of_an_encoder_and_decoder(tuning, corpus):
    data = Instructions(Path(tuning), load_tokenizer(None))
    draw = dict(split="validation", step=5, batch=3, seed=1)
    found = data.pairs(**draw, sequence=SEQUENCE)
    for tokens, mask, labels in zip(*found.values(), strict=True):
        prompt, response = (bytes(each.tolist()).decode() for each in (tokens[mask == 1], labels[labels != IGNORED]))
        assert (prompt, response) in {("1+1=\n", "2 ok\n"), ("21+21=\n", "42 ok\n")}  # bytes end in line breaks
        assert tokens[mask == 0].tolist() == [0] * (SEQUENCE - len(prompt))
    assert data.pairs(**draw, sequence=7)["labels"].shape == (3, 7)
    with pytest.raises(UsageError, match="a prompt of 7 tokens does not fit into a sequence of 6; raise --sequence"):
        data.pairs(**draw, sequence=6)
    text = open_corpus(corpus, load_tokenizer(None))
    before, after = text.pairs(**draw, sequence=SEQUENCE).values()
    whole, _ = text.batch(**draw, sequence=2 * SEQUENCE - 1)
    assert torch.equal(torch.cat([before, after], 1)[:, :-1], whole)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("not json\n" * 3, "line 1"),
        ('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n', "line 2: 'response' must be text, got None"),
        ('{"prompt": "a", "response": "b"}\n', "has 1 examples; give at least 2"),
        ('{"prompt": "' + "a" * 30 + '", "response": "b"}\n' * 1 + '{"prompt": "a", "response": "b"}\n',
         "a prompt of 30 tokens leaves no room for its response in a sequence of 24"),
    ],
)  # fmt: skip
def test_wrong_instructions_are_named_by_line(llama, tmp_path, lines, message):
    path = tmp_path / "wrong.jsonl"
    path.write_text(lines)
    with pytest.raises(UsageError, match=message):
        config_of(llama, data=str(path)).check_files({})


def test_options_that_a_model_sets_or_cannot_have(llama, tmp_path):
    assert config_of(llama).hidden == 32
    assert config_of(llama, hidden=32, layers=2).heads == 4
    for changes, message in (
        ({"hidden": 64}, "--hidden 64: --model .* has 32; leave out --hidden"),
        ({"experts": 4}, "--experts is for the built-in GPT"),
        ({"model": str(tmp_path / "missing")}, "is not a file; give a config.json"),
    ):
        with pytest.raises(UsageError, match=message):
            config_of(**{"model": llama, **changes})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model_type": "t5", "architectures": ["T5EncoderModel"]}, "is t5 of ['T5EncoderModel']"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is bert of ['BertForMaskedLM']"),
        ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}, "is llava of"),
        ({"model_type": "whisper"}, "is whisper;"),
    ],
)
def test_models_of_other_kinds_are_named(llama, tmp_path, monkeypatch, given, named):
    """Where the file says so without transformers, whose import takes seconds."""
    (tmp_path / "config.json").write_text(json.dumps(given))
    if given["model_type"] in ("t5", "bert"):
        monkeypatch.setattr("oases_train.model_stage.configuration", lambda data: pytest.fail("imports transformers"))
    with pytest.raises(UsageError, match="trains models that predict the next token, or a text from") as refused:
        config_of(llama)
    assert named in str(refused.value)
    assert "oases.parallelize(model, mesh=...) in a custom training loop" in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"model_type": "marian", "architectures": ["MarianMTModel"], "decoder_start_token_id": 0},
        {"model_type": "mbart", "architectures": ["MBartForConditionalGeneration"]},
    ],
    ids=lambda given: given["model_type"],
)
def test_encoder_decoders_of_text_are_taken(tmp_path, given):
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "vocab_size": 256, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps({**given, **sizes}))
    config = config_of(str(tmp_path))
    assert config.encoder_decoder
    assert config.layers == 5


def test_an_encoder_decoder_without_sizes_of_its_own_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5gemma"}))
    with pytest.raises(UsageError, match="has no hidden_size, but sizes of its encoder and decoder apart; train it"):
        config_of(str(tmp_path))


def test_a_decoder_without_a_first_token_is_told(t5, tmp_path):
    """Its inputs are its labels after that token."""
    (tmp_path / "config.json").write_text(json.dumps(T5 | {"decoder_start_token_id": None}))
    with pytest.raises(UsageError, match="has no decoder_start_token_id, from which a decoder's inputs are made"):
        config_of(t5)


def test_a_plan_of_another_model_is_told_before_ranks_start(llama, tmp_path):
    plan = Run.of(config_of(llama, degrees=Degrees(1, 1, 2)), 2).plan
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert Run.of(config_of(llama, micro_batches=1, plan=str(file)), 2).plan == plan
    for changed, message in (
        ({"intermediate_size": 96}, "LlamaForCausalLM has 26784 parameters, --model .* has 32928; make a plan"),
        ({"hidden_size": 64}, "plan: hidden is 32 there and 64 here"),
        ({"num_hidden_layers": 3}, "plan: layers is 2 there and 3 here"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
        with pytest.raises(UsageError, match=message):
            Run.of(config_of(llama, micro_batches=1, plan=str(file)), 2)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_told(llama, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 200}))
    with pytest.raises(UsageError, match="its vocabulary of 200 is too small; bytes has 256 tokens; give"):
        config_of(llama)


@pytest.mark.long
def test_degrees_make_a_plan_of_the_traced_layers(llama):
    run = Run.of(config_of(llama, degrees=Degrees(1, 2, 2), recompute="full"), 4)
    assert run.plan.model.name == "LlamaForCausalLM"
    assert [(len(stage.segments), stage.segments[0].recomputed_layers) for stage in run.plan.stages] == [(1, 1)] * 2
    assert run.plan.uniform_tp == 2
    with pytest.raises(UsageError, match="--tp 3 does not divide the heads and widths of LlamaForCausalLM"):
        Run.of(config_of(llama, degrees=Degrees(1, 1, 3)), 3)
    with pytest.raises(UsageError, match="3 stages are more than the 2 layers"):
        Run.of(config_of(llama, degrees=Degrees(1, 3, 1), micro_batches=4), 3)
    again = Run(config_of(llama, degrees=Degrees(1, 2, 2)), run.plan)
    with pytest.raises(UsageError, match="is not the built-in GPT; give the model's configuration as --model"):
        Run(TrainConfig(hidden=32, layers=2, heads=4, sequence=SEQUENCE, batch=BATCH), again.plan)
