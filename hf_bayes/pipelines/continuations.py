"""Scores of continuations whose tokens are given: the numbers that evaluation harnesses and their scorers ask for.

A row is a pair of lists of token ids, a context and a continuation. The two log-probabilities of a continuation are
those of ``score`` (docs/uncertainty.md), and so are the uncertainties of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.number_checks import is_count
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.language.token_uncertainty import Scores, TokenRecord, join, record, to_scores
from hf_bayes.models.prediction_mode import predicts
from hf_bayes.pipelines.prompts import answer_start, require_offsets
from hf_bayes.posteriors.storage.json_types import is_texts

Row = tuple[Sequence[int], Sequence[int]]
"""The token ids of a context, which has one or more, and those of the continuation, which has one or more."""


class Continuation(NamedTuple):
    """The scores of one continuation of n tokens under M members, on the CPU and in nats.

    Attributes:
        sequence_logprob: log mean_m prod_t p_m(token t), the posterior predictive of the continuation.
        sequence_logprob_tokenwise: the sum of ``logprobs``.
        logprobs: [n] log-probability of each token under the mixture.
        member_logprobs: [M, n] the same under each member.
        total, aleatoric, epistemic: [n] uncertainties at each token's position.
        is_greedy: whether each token is the most probable one of the mixture.
    """

    sequence_logprob: float
    sequence_logprob_tokenwise: float
    logprobs: Tensor
    member_logprobs: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    is_greedy: bool


def read_continuations(
    model: BayesianModelForCausalLM, rows: Sequence[Row], *, batch_size: int = 8
) -> list[Continuation]:
    """Return the scores of each row's continuation, teacher-forced. The longest rows go first, in batches.

    The last token of a row is not read by the model, so a row may have one token more than the model's context.

    Raises:
        ValueError: for a row without a context or a continuation, for a token that the model does not predict, for a
            batch size below 1, for a model whose members are in several processes, and for a model without member
            probabilities.
    """
    if not is_count(batch_size):
        raise ValueError(
            f"batch_size is how many rows go through the model at a time, got {batch_size!r}: give 1 or more"
        )
    for number, (context, continuation) in enumerate(rows):
        _check_row(number, context, continuation, model.config.get_text_config().vocab_size)
    if model.member_group.size > 1:
        raise ValueError(
            f"continuations need all members in one process, got {model.member_group.size} processes: load the "
            "posterior without spread_members()"
        )
    model.predictor.require_members("a continuation's score")
    order = sorted(range(len(rows)), key=lambda number: -sum(map(len, rows[number])))
    found: dict[int, Continuation] = {}
    for start in range(0, len(rows), batch_size):
        numbers = order[start : start + batch_size]
        found.update(zip(numbers, _read(model, [rows[number] for number in numbers]), strict=True))
    return [found[number] for number in range(len(rows))]


def _check_row(number: int, context: Sequence[int], continuation: Sequence[int], num_tokens: int) -> None:
    """Raise for a row without a context or a continuation, and for a token that the model does not predict."""
    if not context or not continuation:
        raise ValueError(
            f"row {number} needs one token of context and one token to score, got {len(context)} and "
            f"{len(continuation)}: begin the context with the tokenizer's bos or eos token"
        )
    if odd := [token for token in continuation if not 0 <= token < num_tokens]:
        raise ValueError(
            f"row {number} has the token id {odd[0]} to score, expected 0 to {num_tokens - 1}, the model's vocabulary: "
            "encode the text with the model's own tokenizer"
        )


@torch.no_grad()
@predicts
def _read(model: BayesianModelForCausalLM, rows: list[Row]) -> list[Continuation]:
    """Return the scores of a batch, padded on the right."""
    length = max(len(context) + len(continuation) for context, continuation in rows) - 1
    ids, targets, mask, valid = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(4))
    for row, (context, continuation) in enumerate(rows):
        tokens = torch.tensor([*context, *continuation])
        read = len(tokens) - 1
        ids[row, :read], targets[row, :read] = tokens[:-1], tokens[1:]
        mask[row, :read], valid[row, len(context) - 1 : read] = 1, 1
    device = model.device
    ids, targets, mask, scored = ids.to(device), targets.to(device), mask.to(device), valid.to(device).bool()
    model.check_inputs({"input_ids": ids, "attention_mask": mask})
    found: list[Continuation] = []
    for inputs in model.row_slices({"input_ids": ids, "attention_mask": mask}):
        here = slice(len(found), len(found) + len(inputs["input_ids"]))
        found += _scored(model, inputs, targets[here], scored[here])
    return found


def _scored(
    model: BayesianModelForCausalLM, inputs: dict[str, Tensor], targets: Tensor, scored: Tensor
) -> list[Continuation]:
    """Return the scores of rows, given the next token of every position and the positions that count."""
    positions = torch.arange(targets.numel(), device=targets.device).view_as(targets)[scored]
    pieces: list[TokenRecord] = []
    greedy: list[Tensor] = []
    with closing(model.predictions({**inputs, "use_cache": False}, positions)) as chunks:
        for index, predictive in chunks:
            assert predictive.members is not None  # require_members refuses closed forms
            prediction, logits = predictive.members
            tokens = targets.flatten()[index]
            pieces.append(record(prediction, logits, tokens))
            greedy.append(prediction.log_probs.argmax(-1) == tokens)
    tokens_of = join(pieces)
    scores = to_scores(tokens_of, scored, model.member_group)
    counts = scored.sum(1).tolist()
    members = tokens_of.member_logprobs.cpu().split(counts, dim=-1)
    is_greedy = [bool(part.all()) for part in torch.cat(greedy).cpu().split(counts)]
    return [_of_row(scores, row, scored[row], members[row], is_greedy[row]) for row in range(len(scored))]


def _of_row(scores: Scores, row: int, scored: Tensor, member_logprobs: Tensor, is_greedy: bool) -> Continuation:
    """Return the scores of one row without the places that do not count."""
    names = ("logprobs", "total", "aleatoric", "epistemic")
    per_token = {name: getattr(scores, name)[row][scored].cpu() for name in names}
    return Continuation(
        sequence_logprob=scores.sequence_logprob[row].item(),
        sequence_logprob_tokenwise=scores.sequence_logprob_tokenwise[row].item(),
        member_logprobs=member_logprobs,
        is_greedy=is_greedy,
        **per_token,
    )


class TokensOfAnswer(NamedTuple):
    """The ids of an answer's tokens, and their scores."""

    ids: list[int]
    scores: Continuation


def read_answers(generate: Any, prompts: Sequence[str], answers: Sequence[str]) -> list[TokensOfAnswer]:
    """Return the tokens of answers to prompts; prompt and answer are tokenized as one text, as ``score`` does.

    Args:
        generate: a ``BayesianTextGenerationPipeline`` with a fast tokenizer.
    Raises:
        ValueError: as ``score``, and for another number of prompts than answers.
    """
    for name, given in (("prompts", prompts), ("answers", answers)):
        if isinstance(given, str) or not is_texts(list(given)):
            raise ValueError(f"{name} is a list of strings, got {given!r:.100}: give a list also for a single text")
    require_offsets(generate.tokenizer)
    if len(prompts) != len(answers):
        raise ValueError(f"each answer has a prompt of its own, got {len(prompts)} prompts and {len(answers)} answers")
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        encoded = generate.tokenizer(prompt + answer, return_offsets_mapping=True)
        first = answer_start(encoded["offset_mapping"], prompt, answer)
        rows.append((encoded["input_ids"][:first], encoded["input_ids"][first:]))
    found = read_continuations(generate.model, rows)
    return [TokensOfAnswer(ids, scores) for (_, ids), scores in zip(rows, found, strict=True)]
