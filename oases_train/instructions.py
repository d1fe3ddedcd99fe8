"""Instruction data: prompts with responses, and a loss on responses only.

For a decoder, examples are packed into samples. Those of one sample do not attend to each other: positions begin
anew at each, from which transformers builds its masks. An encoder gets one prompt in each sample, and its decoder the
response. Like a corpus of text it is divided by position into training and validation, and drawn by seed and step.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oases.errors import UsageError
from oases.files import parse_json, read_lines
from oases.layers.loss import IGNORED
from oases.limits import short
from oases_train.data import HOLD_OUT_EVERY
from oases_train.tokenizer import AnyTokenizer

FIELDS = ("prompt", "response")
_REMEDY = f"give an object with {' and '.join(FIELDS)} on each line"


class Instructions:
    """JSON Lines file of objects with `prompt` and `response`. UsageError, with the line, for anything else."""

    unit = "tokens"

    def __init__(self, path: Path, tokenizer: AnyTokenizer) -> None:
        self.path = path
        lines = [(number, line) for number, line in read_lines(path, "data", _REMEDY) if line.strip()]
        texts = [_fields(path, number, line) for number, line in lines]
        if len(texts) < 2:
            raise UsageError(f"data {str(path)!r} has {len(texts)} examples; give at least 2, one for validation")
        prompts, responses = (tokenizer.encode([text[place] for text in texts]) for place in (0, 1))
        self._end = end = [] if tokenizer.end is None else [tokenizer.end]
        self._examples = [
            (np.asarray(prompt, np.int64), np.asarray([*response, *end], np.int64))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        for (number, _), (_, response) in zip(lines, self._examples, strict=True):
            if not len(response):
                raise UsageError(
                    f"data {str(path)!r}, line {number}: the tokenizer finds no token in 'response'; {_REMEDY}"
                )
        self.num_tokens = sum(len(prompt) + len(response) for prompt, response in self._examples)
        self.longest_prompt = max(len(prompt) for prompt, _ in self._examples)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.identity: dict[str, Any] = {
            "examples": len(self._examples),
            "digest": digest,
            "tokenizer": tokenizer.fingerprint,
        }
        """Plain values that differ for data with different batches."""
        self.description = f"{len(self._examples)} prompts with responses from {path}"

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a file is named as JSON Lines."""
        return path.suffix == ".jsonl"

    def samples(self, *, split: str, step: int, batch: int, sequence: int, seed: int) -> dict[str, Tensor]:
        """Draw a batch: input_ids, labels (prompts are ignored) and position_ids, int64 [batch, sequence] each.

        Examples are drawn until a row is full; the last one is cut off. Equal arguments give equal batches on all
        ranks. UsageError where a prompt leaves no room for its response.
        """
        if self.longest_prompt >= sequence:
            raise UsageError(
                f"data {str(self.path)!r}: a prompt of {self.longest_prompt} tokens leaves no room for its response "
                f"in a sequence of {sequence}; raise --sequence, or shorten it"
            )
        generator, chosen = np.random.default_rng([seed, step, split == "train"]), self._chosen(split)
        rows = [self._row(generator, chosen, sequence) for _ in range(batch)]
        columns = zip(("input_ids", "labels", "position_ids"), zip(*rows, strict=True), strict=True)
        return {name: torch.from_numpy(np.stack(column)) for name, column in columns}

    def pairs(self, *, split: str, step: int, batch: int, sequence: int, seed: int) -> dict[str, Tensor]:
        """Draw a batch for an encoder-decoder: input_ids and attention_mask of prompts, labels of responses.

        int64 [batch, sequence] each, padded; a longer response is cut off. UsageError for a prompt that does not fit.
        """
        longest = self.longest_prompt + len(self._end)
        if longest > sequence:
            raise UsageError(
                f"data {str(self.path)!r}: a prompt of {longest} tokens does not fit into a sequence of {sequence}; "
                "raise --sequence, or shorten it"
            )
        generator, chosen = np.random.default_rng([seed, step, split == "train"]), self._chosen(split)
        tokens, mask, labels = (np.full((batch, sequence), value, np.int64) for value in (0, 0, IGNORED))
        for row in range(batch):
            prompt, response = self._examples[chosen[int(generator.integers(len(chosen)))]]
            given = np.concatenate([prompt, np.asarray(self._end, np.int64)])
            tokens[row, : len(given)], mask[row, : len(given)] = given, 1
            labels[row, : len(response)] = response[:sequence]
        found = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(column) for name, column in found.items()}

    def _chosen(self, split: str) -> list[int]:
        """Numbers of the examples of a split."""
        held_out = [number for number in range(len(self._examples)) if number % HOLD_OUT_EVERY == 1]
        return held_out if split == "validation" else sorted(set(range(len(self._examples))) - set(held_out))

    def _row(self, generator: np.random.Generator, chosen: list[int], sequence: int) -> list[Any]:
        columns: list[list[Any]] = [[], [], []]
        length = 0
        while length < sequence:
            prompt, response = self._examples[chosen[int(generator.integers(len(chosen)))]]
            ignored = np.full_like(prompt, IGNORED)
            pair = (np.concatenate([prompt, response]), np.concatenate([ignored, response]))
            for column, part in zip(columns, (*pair, np.arange(len(pair[0]))), strict=True):
                column.append(part)
            length += len(pair[0])
        found = [np.concatenate(column)[:sequence] for column in columns]
        starts = found[2] == 0
        found[1][starts] = IGNORED  # nothing before an example predicts its first token
        return found


def _fields(path: Path, number: int, line: bytes) -> tuple[str, str]:
    where = f"data {str(path)!r}, line {number}"
    data = parse_json(line, where, _REMEDY)
    found = [data.get(name) if isinstance(data, dict) else None for name in FIELDS]
    for name, value in zip(FIELDS, found, strict=True):
        if not isinstance(value, str) or not value:
            raise UsageError(f"{where}: {name!r} must be text, got {short(value)}; {_REMEDY}")
    return str(found[0]), str(found[1])
