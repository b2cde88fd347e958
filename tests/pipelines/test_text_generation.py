from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, TextStreamer

from hf_bayes.pipelines.factory import BayesianTextGenerationPipeline, pipeline
from hf_bayes.pipelines.records import UncertaintyStreamer
from hf_bayes.posteriors.abstention import Abstention
from tests import tiny_models as models
from tests.pipelines.built import GREEDY, PARTS, PROMPTS, approximately, bayesian

SEQUENCE = ("sequence_logprob", "sequence_logprob_tokenwise")


def numbers(records: list[dict[str, Any]], name: str) -> Tensor:
    return torch.tensor([record[name] for record in records], dtype=torch.float64)


# -- generation -----------------------------------------------------------------------------------------------------


def test_record_holds_what_generate_returns(generate: BayesianTextGenerationPipeline) -> None:
    (record,) = generate(PROMPTS[0], **GREEDY)
    inputs = generate.tokenizer(PROMPTS[0], return_tensors="pt")
    output = generate.model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], return_dict_in_generate=True, **GREEDY
    )
    new = output.sequences[0, inputs["input_ids"].shape[1] :]
    assert list(record) == ["generated_text", "tokens", "uncertainty", "num_members"]
    assert record["generated_text"] == PROMPTS[0] + generate.tokenizer.decode(new)
    assert [token["id"] for token in record["tokens"]] == new.tolist()
    for name, field in [("logprob", "logprobs"), *((part, part) for part in PARTS)]:
        assert torch.equal(numbers(record["tokens"], name).float(), output[field][0]), name
    for part in PARTS:
        # a mean in float64 against one in float32
        assert record["uncertainty"][part] == pytest.approx(output[part][0].mean().item(), abs=1e-6)
    assert [record["uncertainty"][name] for name in SEQUENCE] == [output[name][0].item() for name in SEQUENCE]


@pytest.mark.parametrize("kind", sorted(models.CAUSAL_LMS))
def test_batch_with_padding_equals_one_at_a_time(kind: str) -> None:
    generate = pipeline("bayesian-text-generation", bayesian(kind), models.tiny_tokenizer())
    together = generate(PROMPTS, batch_size=3, **GREEDY)
    assert together == approximately([generate(prompt, **GREEDY) for prompt in PROMPTS])
    with pytest.raises(AssertionError):  # its twin: the numbers of the prompts in another order
        assert together[::-1] == approximately([generate(prompt, **GREEDY) for prompt in PROMPTS])


def test_records_are_plain_json(generate: BayesianTextGenerationPipeline) -> None:
    records = generate(PROMPTS, batch_size=2, **GREEDY)
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_generators_and_datasets_are_read_lazily(generate: BayesianTextGenerationPipeline) -> None:
    taken = []

    def prompts() -> Iterator[str]:
        for prompt in itertools.cycle(PROMPTS):
            taken.append(prompt)
            yield prompt

    first = next(iter(generate(prompts(), **GREEDY)))
    assert first == generate(PROMPTS[0], **GREEDY)
    assert len(taken) < 4


def test_several_sequences_each_have_their_own_record(generate: BayesianTextGenerationPipeline) -> None:
    torch.manual_seed(0)
    records = generate(PROMPTS[:2], batch_size=2, num_return_sequences=3, do_sample=True, max_new_tokens=5)
    assert [len(each) for each in records] == [3, 3]
    for prompt, each in zip(PROMPTS, records, strict=False):
        context = generate.tokenizer(prompt)["input_ids"]
        for record in each:
            ids = torch.tensor([context + [token["id"] for token in record["tokens"]]])
            scores = generate.model.score(ids, first=len(context))
            assert numbers(record["tokens"], "epistemic").float() == pytest.approx(scores.epistemic[0], abs=1e-5)
            assert record["uncertainty"]["sequence_logprob"] == pytest.approx(scores.sequence_logprob.item(), abs=1e-4)
    assert len({record["generated_text"] for record in records[0]}) > 1


def test_beams_have_records_of_the_usual_keys(generate: BayesianTextGenerationPipeline) -> None:
    records = generate(PROMPTS[0], num_beams=3, num_return_sequences=2, **GREEDY)
    assert [list(record) for record in records] == [["generated_text", "tokens", "uncertainty", "num_members"]] * 2


def ending(kind: str, token: int) -> tuple[BayesianTextGenerationPipeline, dict[str, Any]]:
    """A pipeline and the arguments with which its rows end at ``token``, by an end token or a stop string."""
    tokenizer = models.tiny_tokenizer()
    generate = pipeline("bayesian-text-generation", bayesian(), tokenizer)
    arguments = {"eos_token_id": token} if kind == "end" else {"stop_sequence": tokenizer.decode([token])}
    return generate, {**GREEDY, **arguments}


@pytest.mark.parametrize("kind", ["end", "stop string"])
@pytest.mark.parametrize("pad", [0, 2], ids=["pad", "pad is eos"])
def test_rows_are_cut_at_their_end(kind: str, pad: int) -> None:
    generate, _ = ending("end", 0)
    full = [record["tokens"] for (record,) in generate(PROMPTS, **GREEDY)]
    # ends the first row early, at a piece of text of its own, and leaves another row running
    place, stop = next(
        (place, token) for place, token in enumerate(full[0]) if token["token"].isascii() and token["token"]
    )
    assert any(stop["id"] not in [token["id"] for token in tokens] for tokens in full[1:])
    generate, arguments = ending(kind, stop["id"])
    generate.tokenizer.pad_token_id = pad
    records = generate(PROMPTS, batch_size=3, pad_token_id=pad, **arguments)
    first = records[0][0]
    assert [token["id"] for token in first["tokens"]] == [token["id"] for token in full[0][: place + 1]]
    logprobs = numbers(first["tokens"], "logprob")
    assert first["uncertainty"]["sequence_logprob_tokenwise"] == pytest.approx(logprobs.sum().item(), abs=1e-4)
    assert records == approximately([generate(prompt, pad_token_id=pad, **arguments) for prompt in PROMPTS])


def test_beams_end_at_a_stop_string() -> None:
    generate, arguments = ending("stop string", 280)
    records = generate(PROMPTS, batch_size=3, num_beams=3, **arguments)
    assert records == approximately([generate(prompt, num_beams=3, **arguments) for prompt in PROMPTS])


def test_new_text_and_tensors_as_in_transformers(generate: BayesianTextGenerationPipeline) -> None:
    (full,) = generate(PROMPTS[0], **GREEDY)
    (new,) = generate(PROMPTS[0], return_full_text=False, **GREEDY)
    (tensors,) = generate(PROMPTS[0], return_tensors=True, **GREEDY)
    assert full["generated_text"] == PROMPTS[0] + new["generated_text"]
    ids = [token["id"] for token in full["tokens"]]
    assert tensors["generated_token_ids"] == generate.tokenizer(PROMPTS[0])["input_ids"] + ids
    assert new["tokens"] == full["tokens"] == tensors["tokens"]


def test_an_empty_prompt_begins_with_bos(generate: BayesianTextGenerationPipeline) -> None:
    (record,) = generate("", **GREEDY)
    ids = torch.tensor([[models.BOS] + [token["id"] for token in record["tokens"]]])
    assert len(record["tokens"]) == 6
    assert numbers(record["tokens"], "logprob").float() == pytest.approx(
        generate.model.score(ids).logprobs[0], abs=1e-5
    )


def test_chats_are_continued(generate: BayesianTextGenerationPipeline) -> None:
    chat = [{"role": "user", "content": "What moves?"}]
    (record,) = generate(chat, **GREEDY)
    assert record["generated_text"][:1] == chat
    answer = record["generated_text"][1]
    assert answer == {"role": "assistant", "content": "".join(token["token"] for token in record["tokens"])}
    ((same,), (other,)) = generate([chat, [*chat, {"role": "assistant", "content": "A"}]], batch_size=2, **GREEDY)
    assert same == approximately(record)
    assert len(other["generated_text"]) == 2
    assert other["generated_text"][1]["content"] == "A" + "".join(token["token"] for token in other["tokens"])


@pytest.mark.parametrize("at", ["construction", "call"])
def test_a_generation_config_is_honoured(at: str, caplog: pytest.LogCaptureFixture) -> None:
    given = {"generation_config": GenerationConfig(max_new_tokens=3, do_sample=False)}
    tokenizer = models.tiny_tokenizer()
    generate = pipeline("bayesian-text-generation", bayesian(), tokenizer, **(given if at == "construction" else {}))
    transformers.logging.enable_propagation()
    try:
        (record,) = generate(PROMPTS[0], **(given if at == "call" else {}))
    finally:
        transformers.logging.disable_propagation()
    assert "generation_config" not in caplog.text  # no complaint that arguments are given twice
    assert len(record["tokens"]) == 3
    assert given["generation_config"].return_dict_in_generate is not True


def test_a_stock_streamer_still_streams(
    generate: BayesianTextGenerationPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    (record,) = generate(PROMPTS[0], streamer=TextStreamer(generate.tokenizer), **GREEDY)
    assert capsys.readouterr().out == record["generated_text"] + "\n"


# -- streaming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_stream_yields_the_tokens_of_the_record(generate: BayesianTextGenerationPipeline, sampled: bool) -> None:
    arguments = {"max_new_tokens": 12, "do_sample": sampled}
    torch.manual_seed(3)
    (record,) = generate(PROMPTS[0], **arguments)
    torch.manual_seed(3)
    streamed, stream = [], generate.stream(PROMPTS[0], **arguments)
    while True:
        try:
            streamed.append(next(stream))
        except StopIteration as stop:
            final = stop.value
            break
    assert streamed == record["tokens"]
    assert final == record


def test_a_token_is_streamed_when_it_is_drawn(generate: BayesianTextGenerationPipeline) -> None:
    forwards = []
    hook = generate.model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        arrived = []

        def note(record: dict[str, Any]) -> None:
            arrived.append((record["id"], len(forwards)))

        streamer = UncertaintyStreamer(generate.tokenizer, note)
        (record,) = generate("A chain", streamer=streamer, max_new_tokens=8, do_sample=False)
    finally:
        hook.remove()
    assert [token for token, _ in arrived] == [token["id"] for token in record["tokens"]]
    # a whole character comes before the next forward, bytes of one come with the next token
    late = [num - place for place, (_, num) in enumerate(arrived, start=1)]
    whole = [bool(token["token"]) and token["token"].isascii() for token in record["tokens"]]
    assert [delay for delay, at_once in zip(late, whole, strict=True) if at_once] == [0] * sum(whole)
    assert sum(whole) > 2
    assert max(late) <= 1


def test_an_abandoned_stream_stops_generating(generate: BayesianTextGenerationPipeline) -> None:
    forwards = []
    hook = generate.model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        stream = generate.stream(PROMPTS[0], max_new_tokens=100, do_sample=False)
        next(stream)
        stream.close()
    finally:
        hook.remove()
    assert len(forwards) < 100
    assert generate(PROMPTS[0], **GREEDY)  # and leaves the model usable


def test_beams_cannot_be_streamed(generate: BayesianTextGenerationPipeline) -> None:
    with pytest.raises(ValueError, match=r"num_beams=2 of a stream\) is not supported .* when all of them have ended"):
        list(generate.stream(PROMPTS[0], num_beams=2))  # sampled beams, which transformers lets pass


def test_a_streamer_serves_one_call(generate: BayesianTextGenerationPipeline) -> None:
    streamer = UncertaintyStreamer(generate.tokenizer, lambda _: None)
    generate("the cell", streamer=streamer, max_new_tokens=2)
    with pytest.raises(ValueError, match="UncertaintyStreamer serves one call: make another"):
        generate("the cell", streamer=streamer, max_new_tokens=2)


def test_errors_in_a_stream_reach_the_reader(generate: BayesianTextGenerationPipeline) -> None:
    with pytest.raises(ValueError, match="one sequence, got 2"):
        list(generate.stream(PROMPTS[0], num_return_sequences=2, do_sample=True, max_new_tokens=2))
    with pytest.raises(ValueError, match="one prompt"):
        generate.stream(PROMPTS)


# -- scoring --------------------------------------------------------------------------------------------------------


def test_scores_equal_those_of_the_model(generate: BayesianTextGenerationPipeline) -> None:
    text = models.TEXTS[0]
    record = generate.score(text)
    scores = generate.model.score(generate.tokenizer(text, return_tensors="pt")["input_ids"])
    assert list(record) == ["text", "tokens", "uncertainty", "num_members"]
    assert record["num_members"] == 3
    assert record["text"] == text
    assert text.endswith("".join(token["token"] for token in record["tokens"]))
    for name, field in [("logprob", "logprobs"), *((part, part) for part in PARTS)]:
        assert torch.equal(numbers(record["tokens"], name).float(), getattr(scores, field)[0]), name
    assert [record["uncertainty"][name] for name in SEQUENCE] == [getattr(scores, name).item() for name in SEQUENCE]


@pytest.mark.parametrize("side", ["left", "right"])
def test_scores_in_batches_equal_those_of_one_text(generate: BayesianTextGenerationPipeline, side: str) -> None:
    one_by_one = [generate.score(text) for text in models.TEXTS]
    before, generate.tokenizer.padding_side = generate.tokenizer.padding_side, side
    try:
        assert generate.score(iter(models.TEXTS), batch_size=3) == approximately(one_by_one)
    finally:
        generate.tokenizer.padding_side = before


def test_a_text_of_one_token_cannot_be_scored(generate: BayesianTextGenerationPipeline) -> None:
    with pytest.raises(ValueError, match="two tokens or more to be scored, got 1 in 'A'"):
        generate.score(["the cell", "A"], batch_size=2)


@pytest.mark.parametrize("texts", [None, ["the cell", 7], [["the", "cell"]]])
def test_what_is_no_text_cannot_be_scored(generate: BayesianTextGenerationPipeline, texts: Any) -> None:
    with pytest.raises(ValueError, match=r"score takes a string or strings, got (None|7|\['the', 'cell'\])"):
        generate.score(texts)


# -- classification -------------------------------------------------------------------------------------------------


# -- construction ---------------------------------------------------------------------------------------------------


def test_score_withholds_by_the_rule_of_the_pipeline(generate: BayesianTextGenerationPipeline) -> None:
    rule = Abstention(measure="epistemic", threshold=0.01, error_rate=0.1, failure_rate=0.1, num_rows=10, answered=0.5,
                      heldout_error_rate=0.05)  # fmt: skip
    strict = pipeline("bayesian-text-generation", generate.model, generate.tokenizer, abstain=rule)
    assert strict(PROMPTS[0], **GREEDY)[0]["abstained"] is True
    assert strict.score(PROMPTS[0])["abstained"] is True
    assert strict.score(PROMPTS[0], abstain=replace(rule, threshold=99.0))["abstained"] is False
    assert "abstained" not in strict.score(PROMPTS[0], abstain=False)
    assert "abstained" not in generate.score(PROMPTS[0])


@pytest.mark.parametrize(
    "given", [{"return_attention_mask": False}, {"return_overflowing_tokens": True}, {"is_split_into_words": True}]
)
def test_score_refuses_what_changes_a_batch(generate: BayesianTextGenerationPipeline, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"takes no {next(iter(given))} here"):
        generate.score(PROMPTS, **given)


@pytest.mark.parametrize("text", ["日本語", "😀 ok", "é a"])
def test_a_first_character_of_several_tokens_is_shown(generate: BayesianTextGenerationPipeline, text: str) -> None:
    assert "".join(token["token"] for token in generate.score(text)["tokens"]) == text


def test_records_tell_a_temperature_of_the_mixture() -> None:
    generate = pipeline("bayesian-text-generation", bayesian(), models.tiny_tokenizer())
    assert "mixture_temperature" not in generate.score(PROMPTS[0])
    generate.model.show(generate.model.theta.detach(), temperature=2.0)
    for record in (generate.score(PROMPTS[0]), generate(PROMPTS[0], **GREEDY)[0], generate.score(" a", prompt="A")):
        assert (record["num_members"], record["mixture_temperature"]) == (3, 2.0)
