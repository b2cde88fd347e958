from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

from hf_bayes.core.layout import select
from hf_bayes.members.compat.transformers import CACHE
from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.attaching import attach
from hf_bayes.models.language.token_uncertainty import GenerationTrace, TokenRecord, record, to_scores
from hf_bayes.uncertainty.decomposition import Prediction, predict
from tests.members.reference import entropies, mixture, scattered, separate_logits
from tests.members.subject_models import named
from tests.models.prepared import TOLERANCE as ROUNDING
from tests.models.prepared import prepared as prepared_subject
from tests.models.written import (
    FIELDS,
    STEPS,
    TOLERANCE,
    attached,
    brute_force_scores,
    generate,
    greedy,
    looped,
    prepared,
    require_scores,
)
from tests.tiny_models import VOCABULARY, batch, tiny_llama


@pytest.mark.parametrize("name", ["llama-lora", "llama-head", "gpt2-last-block"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_scores_of_padded_rows_equal_those_of_each_row_alone(name: str, padding: str) -> None:
    model, _, theta, subspace = prepared_subject(name)
    inputs = batch(padding=padding)
    mask = inputs["attention_mask"].bool()
    with attach(model, theta, subspace=subspace) as bayesian:
        together = bayesian.score(**inputs)
        for row in range(len(mask)):
            alone = bayesian.score(inputs["input_ids"][row, mask[row]][None])
            for field, values in together._asdict().items():
                found = values[row][~values[row].isnan()] if values.ndim == 2 else values[row : row + 1]
                expected = getattr(alone, field).flatten()
                torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)
    assert torch.equal(together.total.isnan(), ~(mask[:, 1:] & mask[:, :-1]))


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "Camembert", "Bert"])
def test_left_padding_keeps_the_first_position_of_the_family(family: str) -> None:
    head = "LMHeadModel" if family == "Bert" else "ForCausalLM"
    model = named(family, head, is_decoder=True)(torch.float64)
    theta = scattered(model, select(model, "last_block"), 3)
    inputs = batch(padding="left")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with attach(model, theta, subspace="last_block") as bayesian, torch.no_grad():
        together = bayesian.score(**inputs)
        for row, mask in enumerate(inputs["attention_mask"].bool()):
            ids = inputs["input_ids"][row, mask][None]
            alone = bayesian.score(ids)
            torch.testing.assert_close(together.sequence_logprob[row], alone.sequence_logprob[0], rtol=1e-10, atol=0)
            only = labels.masked_fill(torch.arange(3)[:, None] != row, -100)
            padded = bayesian(**inputs, labels=only, theta=theta).loss
            single = bayesian(input_ids=ids, labels=ids, theta=theta).loss
            torch.testing.assert_close(padded, single, rtol=1e-10, atol=0)


def test_generate_counts_positions_as_that_of_transformers() -> None:
    model = named("Roberta", is_decoder=True)(torch.float64)
    inputs = batch(padding="left")
    options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False}
    searched = {"num_beams": 2, "length_penalty": 0.0, "output_scores": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options)  # type: ignore[operator]
    with attach(model, subspace="last_block", num_members=1) as bayesian:
        found = bayesian.generate(**inputs, **options)
        beams = bayesian.generate(**inputs, **options, **searched)
    assert torch.equal(found, expected)
    torch.testing.assert_close(beams.sequence_logprob, beams.sequences_scores.double(), rtol=1e-6, atol=0)


def test_a_cache_of_the_models_own_kind_is_left_to_it() -> None:
    fields = {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
    model = named("MiniMax", **fields)(torch.float32)
    subspace, inputs = r"layers\.1\.self_attn\.q_proj", batch()
    layout = select(model, subspace)
    theta = scattered(model, layout, 4).float()
    expected = mixture(separate_logits(model, layout, theta, inputs))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with attach(model, theta, subspace=subspace) as bayesian, torch.no_grad():
        whole = bayesian.generate(**inputs, **options)
        bayesian.members_per_pass = 2
        answer = bayesian(**inputs, use_cache=True)
        for settings in ({}, {"num_beams": 2}, {"use_cache": True}):
            found = bayesian.generate(**inputs, **options, **settings)
            assert torch.equal(found, whole) or "num_beams" in settings
        with pytest.raises(ValueError, match=rf"generate\({CACHE}=DynamicCache, use_cache=False\)"):
            bayesian.generate(**inputs, **options, **{CACHE: DynamicCache()})
    torch.testing.assert_close(answer.logits, expected.float(), rtol=1e-4, atol=1e-4)
    assert type(answer[CACHE]).__name__ == "MiniMaxCache"


def test_scores_equal_brute_force_and_begin_where_asked() -> None:
    model, layout, theta, subspace = prepared_subject("gpt2-last-block")
    ids = batch()["input_ids"]
    logits = separate_logits(model, layout, theta, batch())[:, :, 3:-1]
    per_member = logits.log_softmax(-1).gather(-1, ids[:, 4:].expand(3, -1, -1)[..., None])[..., 0]
    with attach(model, theta, subspace=subspace) as bayesian:
        scores = bayesian.score(**batch(), first=4)
    assert scores.total.shape == (3, 3)
    for found, expected in zip(scores[:3], entropies(logits), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    sequence = per_member.sum(-1).logsumexp(0) - math.log(3)
    torch.testing.assert_close(scores.sequence_logprob, sequence, rtol=1e-10, atol=0)
    tokenwise = (per_member.logsumexp(0) - math.log(3)).sum(-1)
    torch.testing.assert_close(scores.sequence_logprob_tokenwise, tokenwise, rtol=1e-10, atol=0)


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_texts_have_scores(length: int) -> None:
    with attach(tiny_llama(), subspace="last_block", num_members=2) as bayesian:
        scores = bayesian.score(batch(2, length)["input_ids"])
    assert scores.total.shape == (2, length - 1)
    assert scores.sequence_logprob.isfinite().all()


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-last-block"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_rows_that_end_early_hold_nan_after_their_end(name: str, num_beams: int) -> None:
    model, layout, theta = prepared(name)
    inputs = batch(padding="left")
    eos = int(looped(model, layout, theta, inputs, greedy)[0, inputs["input_ids"].shape[1] + 1])  # row 0 ends in step 2
    with attached(name, model, theta) as bayesian:
        output = generate(bayesian, inputs, eos_token_id=eos, num_beams=num_beams)
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    lengths = [(row == eos).nonzero()[0].item() + 1 if eos in row else len(row) for row in new]
    assert lengths[0] == 2 or num_beams > 1
    if num_beams == 1:
        assert torch.equal(output.sequences, looped(model, layout, theta, inputs, greedy, eos))
    expected = brute_force_scores(model, layout, theta, output.sequences, inputs["attention_mask"], lengths)
    require_scores(output, expected, TOLERANCE[name.split("-")[0]])
    assert output.total.isnan().sum() == sum(new.shape[1] - length for length in lengths)


def test_rows_stopped_by_a_criterion_hold_nan_after_it() -> None:
    class SecondToken(StoppingCriteria):
        """Stops row 0 after two tokens, as a stop string might."""

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.tensor([input_ids.shape[1] >= 9, False, False])

    model, _, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        output = generate(bayesian, batch(), stopping_criteria=[SecondToken()], eos_token_id=VOCABULARY - 1)
    assert output.total[0].isnan().tolist() == [False, False, True, True, True]
    assert not output.total[1:].isnan().any()


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "top_k": 5, "temperature": 0.5}, {"num_beams": 2}], ids=str
)
def test_logits_processors_change_tokens_but_no_uncertainty(options: dict[str, Any]) -> None:
    model, layout, theta = prepared("gpt2-last-block")
    inputs = batch(padding="left")
    with attached("gpt2-last-block", model, theta) as bayesian:
        plain = generate(bayesian, inputs, **options)
        output = generate(bayesian, inputs, repetition_penalty=5.0, **options)
    assert not torch.equal(plain.sequences, output.sequences)
    expected = brute_force_scores(model, layout, theta, output.sequences, inputs["attention_mask"], [STEPS] * 3)
    require_scores(output, expected, TOLERANCE["gpt2"])


class Asking(LogitsProcessor):
    """Asks the model in every step for what other texts would be, and changes nothing."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        self.ask = ask

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.ask(input_ids)
        return scores


@pytest.mark.parametrize("kind", ["forward", "last logits", "the same text", "generate"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_calls_of_a_logits_processor_are_no_steps(kind: str, use_cache: bool) -> None:
    model, layout, theta = prepared("gpt2-last-block")
    inputs = batch(padding="left")
    with attached("gpt2-last-block", model, theta) as bayesian:
        ask = {
            "forward": lambda ids: bayesian(input_ids=ids[:2, :3]),
            "last logits": lambda ids: bayesian(input_ids=ids[:, :3], logits_to_keep=1),
            "the same text": lambda ids: bayesian(input_ids=ids, logits_to_keep=1),
            "generate": lambda ids: bayesian.generate(ids[:1, -1:], max_new_tokens=2, do_sample=False),
        }[kind]
        output = generate(bayesian, inputs, logits_processor=[Asking(ask)], use_cache=use_cache)
    expected = brute_force_scores(model, layout, theta, output.sequences, inputs["attention_mask"], [STEPS] * 3)
    require_scores(output, expected, TOLERANCE["gpt2"])
    assert torch.equal(output.sequences, looped(model, layout, theta, inputs, greedy))


def test_a_call_after_the_only_step_is_no_step() -> None:
    model, _, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        asking = Asking(lambda ids: bayesian(input_ids=ids[:, :3], logits_to_keep=1))
        expected = generate(bayesian, batch(), max_new_tokens=1)
        found = generate(bayesian, batch(), max_new_tokens=1, logits_processor=[asking])
    for field in FIELDS:
        assert torch.equal(found[field], expected[field]), field


def test_inputs_within_a_logits_processor_are_checked() -> None:
    model, _, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        asking = Asking(lambda ids: bayesian(input_ids=ids + VOCABULARY))
        with pytest.raises(ValueError, match="has the token id"):
            generate(bayesian, batch(), logits_processor=[asking])


def test_without_return_dict_there_are_tokens_alone() -> None:
    model, layout, theta = prepared("llama-lora")
    with attached("llama-lora", model, theta) as bayesian:
        tokens = bayesian.generate(**batch(), max_new_tokens=STEPS, do_sample=False)
    assert torch.equal(tokens, looped(model, layout, theta, batch(), greedy))


def test_a_mask_of_another_text_cannot_be_scored() -> None:
    model, _, theta = prepared("gpt2-lora")
    inputs = batch()
    with (
        attached("gpt2-lora", model, theta) as bayesian,
        pytest.raises(ValueError, match=r"attention_mask .* \[3, 5\]"),
    ):
        bayesian.score(inputs["input_ids"], inputs["attention_mask"][:, :5])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["mask", "no mask"])
def test_prompts_that_end_in_padding_are_refused(options: dict[str, Any], given: bool) -> None:
    # transformers warns, and goes on from what the padding token says
    model, _, theta = prepared("gpt2-lora")
    inputs = batch(padding="right")
    inputs = inputs if given else {"input_ids": inputs["input_ids"]}
    sentence = "2 of 3 prompts end in padding, first row 1: .* tokenizer.padding_side='left'"
    with attached("gpt2-lora", model, theta) as bayesian, pytest.raises(ValueError, match=sentence):
        generate(bayesian, inputs, **options)


def test_a_prompt_without_tokens_is_refused() -> None:
    model, _, theta = prepared("gpt2-lora")
    with attached("gpt2-lora", model, theta) as bayesian, pytest.raises(ValueError, match="leave input_ids out"):
        generate(bayesian, {"input_ids": torch.zeros(2, 0, dtype=torch.long)})


@pytest.mark.parametrize(
    ("ids", "first"), [(torch.ones(4, dtype=torch.long), 1), (batch()["input_ids"], 0), (batch()["input_ids"], 99)]
)
def test_scores_of_what_nothing_precedes_are_refused(ids: Tensor, first: int) -> None:
    model, _, theta = prepared("llama-lora")
    with attached("llama-lora", model, theta) as bayesian, pytest.raises(ValueError, match="1 <= first <= T, got"):
        bayesian.score(ids, first=first)


def test_sum_of_token_logprobs_is_no_sequence_logprob() -> None:
    model, _, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        output = generate(bayesian, batch())
    assert ((output.sequence_logprob - output.sequence_logprob_tokenwise).abs() > 0.01).all()


def _prediction(rows: int = 2, seed: int = 0) -> tuple[Prediction, Tensor]:
    logits = torch.randn((3, rows, 7), generator=torch.Generator().manual_seed(seed))
    return predict(logits), logits


def test_a_forward_too_many_is_forgotten() -> None:
    # on CUDA generate learns one forward later that all rows have stopped, and drops that forward's token
    def trace(forwards: int) -> Any:
        trace = GenerationTrace(LocalMembers())
        tokens = torch.tensor([[1, 2], [3, 4]])
        for step in range(forwards):
            if step > 0:
                trace.chosen(tokens[:, step - 1])
            trace.observe(*_prediction(seed=step))
        return trace.scores(tokens, torch.tensor([2, 1]))

    expected, found = trace(2), trace(3)
    assert found is not None
    for field in FIELDS:
        assert torch.equal(getattr(found, field).nan_to_num(9.0), getattr(expected, field).nan_to_num(9.0))


def test_scores_are_laid_out_row_by_row() -> None:
    prediction, logits = _prediction(rows=3)
    tokens = record(prediction, logits, torch.tensor([0, 1, 2]))
    valid = torch.tensor([[True, False], [True, True]])
    scores = to_scores(TokenRecord(*tokens), valid, LocalMembers())
    assert scores.total[valid].tolist() == prediction.uncertainty.total.tolist()
    assert scores.total.isnan().tolist() == [[False, True], [False, False]]
    assert math.isclose(float(scores.sequence_logprob_tokenwise[1]), float(tokens.logprobs[1:].sum()), rel_tol=1e-6)
