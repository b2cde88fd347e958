from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    StoppingCriteria,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers.generation import BaseStreamer

from hf_bayes.members import member_sums as spread
from hf_bayes.members.compat.transformers import CACHE
from hf_bayes.models.attaching import attach
from hf_bayes.uncertainty.decomposition import Prediction, predict
from tests.members.reference import mixture
from tests.models.written import (
    FIELDS,
    STEPS,
    SUBJECTS,
    TOLERANCE,
    attached,
    beams,
    brute_force_scores,
    generate,
    greedy,
    looped,
    member_logits,
    prepared,
    require_scores,
)
from tests.tiny_models import PAD, VOCABULARY, batch, with_lora

TOLERANCE |= dict.fromkeys(
    ("jamba", "bamba", "granitemoehybrid", "falcon_h1", "qwen3_next", "mamba", "mamba2", "falcon_mamba", "xlstm"), 2e-5
) | {"opt": 1e-11}


SLIDING = ["mistral-last-block", "gemma3-last-block"]  # windows of 4 tokens, prompts of 7


def sampled(log_probs: Tensor) -> Tensor:
    return log_probs.softmax(-1).multinomial(1)[:, 0]


# -- tokens and their numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("padding", ["left", None])
def test_greedy_generation_equals_a_loop_over_separate_models(name: str, padding: str | None) -> None:
    model, layout, theta = prepared(name)
    inputs = batch(padding=padding)
    sequences = looped(model, layout, theta, inputs, greedy)
    expected = brute_force_scores(model, layout, theta, sequences, inputs["attention_mask"], [STEPS] * 3)
    with attached(name, model, theta) as bayesian:
        output = generate(bayesian, inputs)
    assert torch.equal(output.sequences, sequences)
    require_scores(output, expected, TOLERANCE[name.split("-")[0]])


@pytest.mark.parametrize("name", SUBJECTS)
def test_sampled_tokens_equal_a_loop_with_the_same_seed(name: str) -> None:
    model, layout, theta = prepared(name)
    inputs = batch(padding="left")
    torch.manual_seed(3)
    sequences = looped(model, layout, theta, inputs, sampled)
    expected = brute_force_scores(model, layout, theta, sequences, inputs["attention_mask"], [STEPS] * 3)
    with attached(name, model, theta) as bayesian:
        torch.manual_seed(3)
        output = generate(bayesian, inputs, do_sample=True)
    assert torch.equal(output.sequences, sequences)
    require_scores(output, expected, TOLERANCE[name.split("-")[0]])


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-lora"])
def test_several_samples_equal_a_loop_over_repeated_prompts(name: str) -> None:
    model, layout, theta = prepared(name)
    inputs = batch(2, padding="left")
    repeated = {key: value.repeat_interleave(2, 0) for key, value in inputs.items()}
    torch.manual_seed(3)
    sequences = looped(model, layout, theta, repeated, sampled)
    expected = brute_force_scores(model, layout, theta, sequences, repeated["attention_mask"], [STEPS] * 4)
    with attached(name, model, theta) as bayesian:
        torch.manual_seed(3)
        output = generate(bayesian, inputs, do_sample=True, num_return_sequences=2)
    assert torch.equal(output.sequences, sequences)
    require_scores(output, expected, TOLERANCE[name.split("-")[0]])


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_beam_search_equals_a_search_over_separate_models(name: str, use_cache: bool) -> None:
    model, layout, theta = prepared(name)
    inputs = batch(2, padding="left")
    sequences, sums = beams(model, layout, theta, inputs, width=3)
    masks = inputs["attention_mask"].repeat_interleave(3, 0)
    expected = brute_force_scores(model, layout, theta, sequences, masks, [STEPS] * 6)
    with attached(name, model, theta) as bayesian:
        output = generate(
            bayesian, inputs, num_beams=3, num_return_sequences=3, use_cache=use_cache, output_scores=True
        )
    assert torch.equal(output.sequences, sequences)
    torch.testing.assert_close(output.sequences_scores.double() * STEPS, sums, rtol=0, atol=1e-4)  # summed in float32
    require_scores(output, expected, TOLERANCE[name.split("-")[0]])


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-last-block", *SLIDING])
@pytest.mark.parametrize(
    ("options", "members_per_pass", "trunk"),
    [
        ({"cache_implementation": "static"}, None, True),
        ({"cache_implementation": "dynamic"}, 3, True),
        ({"cache_implementation": "hybrid"}, None, True),
        ({"use_cache": False}, None, True),
        ({}, 1, True),
        ({}, 2, True),
        ({"cache_implementation": "static"}, 2, True),
        ({"use_cache": False}, 2, True),
        ({"num_beams": 3}, 1, True),
        ({"num_beams": 3, "cache_implementation": "static"}, None, True),
        ({"num_beams": 3, "do_sample": True}, 2, True),
        ({"do_sample": True}, None, False),
        ({"num_beams": 3}, None, False),
    ],
    ids=str,
)
def test_caches_chunks_of_members_and_trunk_change_no_token(
    name: str, options: dict[str, Any], members_per_pass: int | None, trunk: bool
) -> None:
    model, _, theta = prepared(name, num_members=4)
    inputs = batch(2, padding="left")
    plain = {key: value for key, value in options.items() if key != "cache_implementation"}
    outputs = []
    for settings, size, with_trunk in ((plain | {"use_cache": False}, 4, False), (options, members_per_pass, trunk)):
        with attached(name, model, theta, trunk=with_trunk) as bayesian:
            bayesian.members_per_pass = size
            torch.manual_seed(4)
            outputs.append(generate(bayesian, inputs, **settings))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    require_scores(outputs[1], {field: outputs[0][field].double() for field in FIELDS}, TOLERANCE[name.split("-")[0]])


@pytest.mark.parametrize("name", SLIDING)
def test_a_window_that_does_not_slide_is_caught(name: str) -> None:
    model, layout, theta = prepared(name)
    logits = []
    for window in (4, 100):
        model.config.sliding_window = window
        logits.append(member_logits(model, layout, theta, *batch().values())[:, :, -1])
    assert (logits[0] - logits[1]).abs().amax(-1).min() > 0.01  # of every member and row


def test_output_logits_are_the_log_of_the_mixture() -> None:
    model, layout, theta = prepared("gpt2-lora")
    inputs = batch(padding="left")
    with attached("gpt2-lora", model, theta) as bayesian:
        output = generate(bayesian, inputs, output_logits=True, repetition_penalty=5.0)
    logits = member_logits(model, layout, theta, inputs["input_ids"], inputs["attention_mask"])[:, :, -1]
    torch.testing.assert_close(output.logits[0].double(), mixture(logits), rtol=0, atol=1e-5)  # generate's float32


def test_streamer_is_given_every_token() -> None:
    class Collected(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[Tensor] = []

        def put(self, value: Tensor) -> None:
            self.tokens.append(value.reshape(1, -1))

        def end(self) -> None:
            self.tokens.append(torch.tensor([[-1]]))

    model, _, theta = prepared("llama-lora")
    streamer = Collected()
    with attached("llama-lora", model, theta) as bayesian:
        output = generate(bayesian, batch(1), streamer=streamer)
    assert torch.equal(torch.cat(streamer.tokens, 1), torch.cat([output.sequences, torch.tensor([[-1]])], 1))


def test_generation_may_start_from_nothing_but_the_bos_token() -> None:
    model, _, theta = prepared("llama-lora")
    with attached("llama-lora", model, theta) as bayesian:
        output = bayesian.generate(max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True)
        scores = bayesian.score(output.sequences)
    assert output.sequences.shape == (1, 1 + STEPS)
    torch.testing.assert_close(output.total, scores.total, rtol=1e-5, atol=1e-5)  # float32 inside Llama


def test_several_beams_may_start_from_nothing_but_the_bos_token() -> None:
    model, layout, theta = prepared("gpt2-lora")
    with attached("gpt2-lora", model, theta) as bayesian:
        output = generate(bayesian, {}, num_beams=3, num_return_sequences=3)
    bos = {"input_ids": output.sequences[:1, :1], "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    tokens, _ = beams(model, layout, theta, bos, 3)
    assert torch.equal(output.sequences, tokens)
    mask = bos["attention_mask"].expand(3, 1)
    require_scores(output, brute_force_scores(model, layout, theta, tokens, mask, [STEPS] * 3), TOLERANCE["gpt2"])


@pytest.mark.parametrize("num_beams", [1, 2])
def test_padding_that_generate_infers_is_padding_for_scores_too(num_beams: int) -> None:
    model, _, theta = prepared("gpt2-last-block")
    inputs = batch(padding="left")
    with attached("gpt2-last-block", model, theta) as bayesian:
        given = generate(bayesian, inputs, num_beams=num_beams)
        inferred = generate(bayesian, {"input_ids": inputs["input_ids"]}, num_beams=num_beams)
    require_scores(inferred, {field: given[field] for field in FIELDS}, 0.0)


@pytest.mark.parametrize("options", [{"logits_to_keep": 0}, {"logits_to_keep": 3}, {"use_cache": None}], ids=str)
def test_what_changes_no_token_changes_no_number(options: dict[str, Any]) -> None:
    model, _, theta = prepared("gpt2-lora")
    inputs = batch(padding="left")
    with attached("gpt2-lora", model, theta) as bayesian:
        expected, output = generate(bayesian, inputs), generate(bayesian, inputs, **options)
    assert torch.equal(output.sequences, expected.sequences)
    require_scores(output, {field: expected[field] for field in FIELDS}, TOLERANCE["gpt2"])


def test_a_generation_config_may_be_the_second_argument() -> None:
    model, _, theta = prepared("gpt2-lora")
    config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=PAD)
    ids = batch()["input_ids"]
    with attached("gpt2-lora", model, theta) as bayesian:
        assert torch.equal(bayesian.generate(ids, config), bayesian.generate(ids, generation_config=config))
        with pytest.raises(ValueError, match="dola_layers"):
            bayesian.generate(ids, GenerationConfig(dola_layers="high"))


def test_beams_that_a_criterion_stops_are_scored_up_to_there() -> None:
    class Stop(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return input_ids[:, -1] > VOCABULARY // 2

    # with a padding token 0 and no end token transformers fills up what is shorter with -1
    model, layout, theta = prepared("gpt2-lora")
    inputs = batch()
    with attached("gpt2-lora", model, theta) as bayesian:
        output = generate(bayesian, inputs, num_beams=2, stopping_criteria=[Stop()])
    lengths = (output.sequences[:, 7:] >= 0).sum(1)
    assert lengths.min() < lengths.max()
    sequences, mask = output.sequences.clamp_min(0), inputs["attention_mask"]
    expected = brute_force_scores(model, layout, theta, sequences, mask, lengths.tolist())
    require_scores(output, expected, TOLERANCE["gpt2"])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_mask_may_be_of_any_type(dtype: torch.dtype, num_beams: int) -> None:
    model, _, theta = prepared("gpt2-lora")
    inputs = batch(padding="left")
    with attached("gpt2-lora", model, theta) as bayesian:
        expected = generate(bayesian, inputs, num_beams=num_beams)
        cast = {**inputs, "attention_mask": inputs["attention_mask"].to(dtype)}
        output = generate(bayesian, cast, num_beams=num_beams)
    require_scores(output, {field: expected[field] for field in FIELDS}, 0.0)


def test_one_member_has_no_epistemic_uncertainty() -> None:
    model, _, theta = prepared("llama-lora", num_members=1)
    with attached("llama-lora", model, theta) as bayesian:
        output = generate(bayesian, batch())
    assert torch.equal(output.epistemic, torch.zeros(3, STEPS, dtype=output.epistemic.dtype))
    torch.testing.assert_close(output.sequence_logprob, output.sequence_logprob_tokenwise, rtol=1e-12, atol=0)


def test_a_model_without_keys_and_values_to_cache_is_refused() -> None:
    model = RwkvForCausalLM(RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ValueError, match=f"RwkvForCausalLM takes no {CACHE}"):
        attach(model, subspace="attention.output")
    assert "forward" not in vars(model.rwkv.blocks[0].attention.output)
    xlm = XLMWithLMHeadModel(XLMConfig(vocab_size=VOCABULARY, emb_dim=16, n_layers=1, n_heads=2, causal=True))
    with pytest.raises(ValueError, match=r"XLMWithLMHeadModel (takes|returns) no"):  # its cache is a dictionary
        attach(xlm, subspace="q_lin")


def test_a_model_that_keeps_its_state_in_its_layers_is_refused() -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(num_hidden_layers=3, lru_width=16, **sizes))
    with pytest.raises(ValueError, match=f"RecurrentGemmaForCausalLM returns no {CACHE}: models that keep"):
        attach(with_lora(model, target_modules=["q_proj"]))


def test_mixing_logits_instead_of_probabilities_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed_logits(logits: Tensor) -> Prediction:
        return Prediction(logits.mean(0).log_softmax(-1), predict(logits).uncertainty)

    model, layout, theta = prepared("gpt2-last-block")
    sequences = looped(model, layout, theta, batch(), greedy)
    expected = brute_force_scores(model, layout, theta, sequences, batch()["attention_mask"], [STEPS] * 3)
    monkeypatch.setattr(spread, "predict", mixed_logits)
    with attached("gpt2-last-block", model, theta) as bayesian:
        output = generate(bayesian, batch())
    assert not torch.equal(output.sequences, sequences)
    assert ((output.logprobs - expected["logprobs"])[:, 0].abs() > 0.01).any()
