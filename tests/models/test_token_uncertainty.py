from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    StaticCache,
    StoppingCriteria,
)
from transformers.generation import BaseStreamer

from hf_bayes.core.layout import Layout, select
from hf_bayes.distributed import member_sums as spread
from hf_bayes.distributed.member_sums import LocalMembers
from hf_bayes.models.attaching import attach
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.token_uncertainty import GenerationTrace, TokenRecord, record, to_scores
from hf_bayes.uncertainty.decomposition import Prediction, predict
from tests.members import subjects
from tests.members.reference import entropies, mixture, scattered, separate_logits
from tests.tiny_models import PAD, VOCABULARY, batch, tiny_gpt2, tiny_llama, with_lora

STEPS = 5
FIELDS = ("total", "aleatoric", "epistemic", "logprobs", "sequence_logprob", "sequence_logprob_tokenwise")
# The models are float64, but transformers' Llama normalises and rotates in float32 (6e-8), and sums amplify that.
# So do the others', and Gemma-2, float32 itself, caps attention and logits.
TOLERANCE = {"gpt2": 1e-11, "gemma2": 1e-4} | dict.fromkeys(("llama", "mistral", "qwen3", "gemma3", "lfm2"), 2e-5)
TOLERANCE |= dict.fromkeys(("jamba", "bamba", "granitemoehybrid", "falcon_h1", "qwen3_next"), 2e-5) | {"opt": 1e-11}

SUBJECTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama-lora": (lambda: with_lora(_llama()), "trainable"),
    "llama-lora-last-block": (
        lambda: with_lora(_llama(), target_modules=["q_proj"], layers_to_transform=[2]),
        "trainable",
    ),
    "llama-head": (lambda: _llama(), "last_layer"),
    "gpt2-lora": (lambda: with_lora(_gpt2()), "trainable"),
    "gpt2-last-block": (lambda: _gpt2(), "last_block"),
    "gpt2-tied-head": (lambda: _gpt2(), "last_layer"),
    "mistral-lora": (lambda: with_lora(_endless(subjects.mistral)), "trainable"),
    "mistral-last-block": (lambda: _endless(subjects.mistral), "last_block"),
    "qwen3-query-and-key-norms": (lambda: _endless(subjects.qwen3), r"[qk]_norm"),
    "gemma2-last-block": (lambda: _endless(subjects.gemma2, torch.float32), "last_block"),  # see there
    "gemma3-last-block": (lambda: _endless(subjects.gemma3), "last_block"),
    "gemma3-everything": (lambda: _endless(subjects.gemma3), "."),
    "lfm2-last-block": (lambda: _endless(subjects.lfm2), "last_block"),
    "jamba-lora": (lambda: _endless(subjects.jamba, targets=["q_proj"]), "trainable"),
    "bamba-lora": (lambda: _endless(subjects.bamba, targets=["q_proj"]), "trainable"),
    "granitemoehybrid-lora": (lambda: _endless(subjects.granite_hybrid, targets=["q_proj"]), "trainable"),
    "falcon_h1-lora": (lambda: _endless(subjects.falcon_h1, targets=["q_proj"]), "trainable"),
    "qwen3_next-lora": (lambda: _endless(subjects.qwen3_next, targets=["q_proj"]), "trainable"),
    "opt-last-block": (lambda: _endless(subjects.opt), "last_block"),
}


SLIDING = ["mistral-last-block", "gemma3-last-block"]  # windows of 4 tokens, prompts of 7


def _llama() -> nn.Module:
    return tiny_llama(dtype=torch.float64, num_hidden_layers=3, eos_token_id=None)


def _endless(
    make: Callable[[torch.dtype], nn.Module], dtype: torch.dtype = torch.float64, targets: list[str] | None = None
) -> nn.Module:
    model = make(dtype)
    model.generation_config.eos_token_id = None
    return model if targets is None else with_lora(model, target_modules=targets)


def _gpt2() -> nn.Module:
    return tiny_gpt2(dtype=torch.float64, n_layer=3, eos_token_id=None)


def prepared(name: str, num_members: int = 3) -> tuple[nn.Module, Layout, Tensor]:
    make, subspace = SUBJECTS[name]
    model = make()
    layout = select(model, subspace)
    return model, layout, scattered(model, layout, num_members)


class OwnCache(DynamicCache):
    """Of whose rows nobody knows."""


def attached(name: str, model: nn.Module, theta: Tensor, **options: Any) -> BayesianModelForCausalLM:
    bayesian = attach(model, theta, subspace=SUBJECTS[name][1], **options).eval()
    assert isinstance(bayesian, BayesianModelForCausalLM)
    return bayesian


# -- brute force: the mixture of separate models, without cache, in a Python loop ------------------------------------


def member_logits(model: nn.Module, layout: Layout, theta: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """[M, rows, T, V]"""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return separate_logits(model, layout, theta, {"input_ids": ids, "attention_mask": mask, "position_ids": positions})


def looped(
    model: nn.Module, layout: Layout, theta: Tensor, inputs: dict[str, Tensor], choose: Callable[[Tensor], Tensor],
    eos: int | None = None,
) -> Tensor:  # fmt: skip
    """Token by token, the next one by ``choose`` from the mixture's log-probabilities [rows, V] in float32."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ended = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(STEPS):
        token = choose(mixture(member_logits(model, layout, theta, ids, mask)[:, :, -1]).float())
        token = torch.where(ended, PAD, token)
        ended = ended | (token == eos)
        ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        if ended.all():
            break
    return ids


def greedy(log_probs: Tensor) -> Tensor:
    return log_probs.argmax(-1)


def sampled(log_probs: Tensor) -> Tensor:
    return log_probs.softmax(-1).multinomial(1)[:, 0]


def beams(
    model: nn.Module, layout: Layout, theta: Tensor, inputs: dict[str, Tensor], width: int
) -> tuple[Tensor, Tensor]:
    """The ``width`` best continuations of each row, best first, no end tokens: [B * width, T], and their scores."""
    kept_ids, kept_scores = [], []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        ids, mask, scores = ids[None], mask[None], torch.zeros(1, dtype=torch.float64)
        for _ in range(STEPS):
            step = mixture(member_logits(model, layout, theta, ids, mask)[:, :, -1])
            scores, best = (scores[:, None] + step).flatten().topk(width)
            row, token = best // VOCABULARY, best % VOCABULARY
            ids = torch.cat([ids[row], token[:, None]], 1)
            mask = torch.cat([mask[row], torch.ones_like(token)[:, None]], 1)
        kept_ids.append(ids)
        kept_scores.append(scores)
    return torch.cat(kept_ids), torch.cat(kept_scores)


def brute_force_scores(
    model: nn.Module, layout: Layout, theta: Tensor, sequences: Tensor, prompt_mask: Tensor, lengths: list[int]
) -> dict[str, Tensor]:
    """All fields of ``Scores`` from one teacher-forced pass of every member."""
    start = prompt_mask.shape[1]
    new = sequences.shape[1] - start
    written = torch.arange(new) < torch.tensor(lengths)[:, None]
    mask = torch.cat([prompt_mask, written.long()], 1)
    logits = member_logits(model, layout, theta, sequences, mask)[:, :, start - 1 : -1]
    tokens = sequences[:, start:]
    per_member = logits.log_softmax(-1).gather(-1, tokens.expand(len(theta), -1, -1)[..., None])[..., 0]
    chosen = mixture(logits).gather(-1, tokens[..., None])[..., 0]
    nan = torch.where(written, 0.0, math.nan)
    total, aleatoric, epistemic = (part + nan for part in entropies(logits))
    return {
        "total": total, "aleatoric": aleatoric, "epistemic": epistemic, "logprobs": chosen + nan,
        "sequence_logprob": (per_member * written).sum(-1).logsumexp(0) - math.log(len(theta)),
        "sequence_logprob_tokenwise": (chosen * written).sum(-1),
    }  # fmt: skip


def require_scores(output: Any, expected: dict[str, Tensor], tolerance: float) -> None:
    for field in FIELDS:
        torch.testing.assert_close(
            output[field].double(),
            expected[field].double(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m, f=field: f"{f}: {m}",
        )


def generate(bayesian: BayesianModelForCausalLM, inputs: dict[str, Tensor], **options: Any) -> Any:
    options = {"max_new_tokens": STEPS, "do_sample": False, "top_k": 0, "pad_token_id": PAD} | options
    return bayesian.generate(**inputs, return_dict_in_generate=True, **options)


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


def test_static_caches_do_not_compile_the_forward() -> None:
    # generate does so on GPUs, or wherever it is told to
    compiling = CompileConfig()
    compiling._compile_all_devices = True
    model, layout, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        output = generate(bayesian, batch(), cache_implementation="static", compile_config=compiling)
    assert torch.equal(output.sequences, looped(model, layout, theta, batch(), greedy))


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


def test_output_logits_are_the_log_of_the_mixture() -> None:
    model, layout, theta = prepared("gpt2-lora")
    inputs = batch(padding="left")
    with attached("gpt2-lora", model, theta) as bayesian:
        output = generate(bayesian, inputs, output_logits=True, repetition_penalty=5.0)
    logits = member_logits(model, layout, theta, inputs["input_ids"], inputs["attention_mask"])[:, :, -1]
    torch.testing.assert_close(output.logits[0].double(), mixture(logits), rtol=0, atol=1e-5)  # generate's float32


@pytest.mark.parametrize("members_per_pass", [None, 1])
@pytest.mark.parametrize(
    ("name", "trunk"), [("llama-lora-last-block", 2), ("llama-head", 3), ("llama-lora", 0), ("mistral-last-block", 2)]
)
def test_cache_holds_the_trunk_once(name: str, trunk: int, members_per_pass: int | None) -> None:
    model, _, theta = prepared(name)
    with attached(name, model, theta) as bayesian:
        bayesian.members_per_pass = members_per_pass
        cache = generate(bayesian, batch(2)).past_key_values
    assert [layer.keys.shape[0] for layer in cache.layers] == [2] * trunk + [6] * (3 - trunk)


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


def test_without_return_dict_there_are_tokens_alone() -> None:
    model, layout, theta = prepared("llama-lora")
    with attached("llama-lora", model, theta) as bayesian:
        tokens = bayesian.generate(**batch(), max_new_tokens=STEPS, do_sample=False)
    assert torch.equal(tokens, looped(model, layout, theta, batch(), greedy))


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


def test_one_member_has_no_epistemic_uncertainty() -> None:
    model, _, theta = prepared("llama-lora", num_members=1)
    with attached("llama-lora", model, theta) as bayesian:
        output = generate(bayesian, batch())
    assert torch.equal(output.epistemic, torch.zeros(3, STEPS, dtype=output.epistemic.dtype))
    torch.testing.assert_close(output.sequence_logprob, output.sequence_logprob_tokenwise, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": "model"},
        {"prompt_lookup_num_tokens": 2},
        {"custom_generate": "someone/loop"},
        {"penalty_alpha": 0.5, "top_k": 4},
        {"prefill_chunk_size": 2},
        {"inputs_embeds": torch.ones(1, 2, 16)},
        {"guidance_scale": 2.0},
        {"token_healing": True},
        {"use_mtp": True},
        {"assistant_early_exit": 1},
        {"speculation_type": "dflash"},
        {"num_beam_groups": 2, "num_beams": 2},
        {"force_words_ids": [[5]], "num_beams": 2},
        {"constraints": ["a constraint"], "num_beams": 2},
        {"negative_prompt_ids": torch.ones(3, 2, dtype=torch.long)},
        {"custom_generate": lambda model, input_ids, **_: input_ids},
        {"cache_implementation": "paged"},
        {"cache_implementation": "quantized"},
        {"cache_implementation": "offloaded"},
        {"cache_implementation": "offloaded_static"},
        {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())},
        {"past_key_values": OwnCache()},
        {"past_key_values": DynamicCache(), "use_cache": False},
        {"generation_config": GenerationConfig(dola_layers="high")},
    ],
    ids=lambda options: ", ".join(options),
)
def test_decoding_that_knows_nothing_of_members_is_refused(options: dict[str, Any]) -> None:
    model, _, theta = prepared("llama-lora")
    options = {key: model if value == "model" else value for key, value in options.items()}
    named = next(iter(options)) if "generation_config" not in options else "dola_layers"
    sentence = rf"generate\({named}=.{{1,60}}\) is not supported for an ensemble: .*\. Supported are greedy search, "
    with attached("llama-lora", model, theta) as bayesian, pytest.raises(ValueError, match=sentence):
        bayesian.generate(**batch(), **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"position_ids": torch.arange(7).expand(3, 7) + 5}, "position_ids"),
        ({"attention_mask": torch.ones(3, 9, dtype=torch.long)}, "attention_mask of 9 positions"),
    ],
    ids=["positions", "a mask of more than the prompt"],
)
def test_beams_of_more_than_a_text_and_its_mask_are_refused(options: dict[str, Any], named: str) -> None:
    # beams are scored by reading them once more, and these would be read as other texts
    model, layout, theta = prepared("gpt2-lora")
    inputs = batch() | options
    with attached("gpt2-lora", model, theta) as bayesian:
        with pytest.raises(ValueError, match=rf"generate\(num_beams=2, {named}\) is not .* beams are read once more"):
            generate(bayesian, inputs, num_beams=2)
        if "position_ids" not in options:
            return
        output = generate(bayesian, inputs)  # tokens that are scored while they are drawn are no matter
    first = separate_logits(model, layout, theta, inputs)[:, :, -1]
    torch.testing.assert_close(output.total[:, 0], entropies(first)[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("ids", "first"), [(torch.ones(4, dtype=torch.long), 1), (batch()["input_ids"], 0), (batch()["input_ids"], 99)]
)
def test_scores_of_what_nothing_precedes_are_refused(ids: Tensor, first: int) -> None:
    model, _, theta = prepared("llama-lora")
    with attached("llama-lora", model, theta) as bayesian, pytest.raises(ValueError, match="1 <= first <= T, got"):
        bayesian.score(ids, first=first)


def test_threads_that_ask_one_model_take_turns() -> None:
    model, _, theta = prepared("llama-lora")
    inside, go_on = threading.Event(), threading.Event()

    def pause(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and not inside.is_set():
            inside.set()
            go_on.wait(20)

    with attached("llama-lora", model, theta) as bayesian, ThreadPoolExecutor(2) as pool:
        prompt, text = {"input_ids": batch()["input_ids"][:1, :3]}, batch()["input_ids"]
        options = {"do_sample": False, "max_new_tokens": 4}
        expected, scores = bayesian.generate(**prompt, **options), bayesian.score(text)
        bayesian.core.model.layers[1].register_forward_pre_hook(pause)
        written = pool.submit(bayesian.generate, **prompt, **options)  # type: ignore[arg-type]
        assert inside.wait(20)  # in the middle of a forward, its rows and members bound
        scored = pool.submit(bayesian.score, text)
        assert wait([scored], timeout=0.3).not_done
        go_on.set()
        assert torch.equal(written.result(20), expected)
        for found, alone in zip(scored.result(20), scores, strict=True):
            assert torch.equal(found.nan_to_num(), alone.nan_to_num())


def test_assisted_decoding_is_refused_with_its_reason() -> None:
    model, _, theta = prepared("llama-lora")
    reason = r"assistant_model=PeftModelForCausalLM\) .* drafted tokens are checked several at a time, and uncertainty"
    with attached("llama-lora", model, theta) as bayesian, pytest.raises(ValueError, match=reason):
        bayesian.generate(**batch(), assistant_model=model)


def test_an_offloaded_cache_is_refused() -> None:
    model, _, theta = prepared("llama-lora")
    cache = DynamicCache()
    cache.offloading = True  # made so, it asks for CUDA
    message = "past_key_values=DynamicCache that is offloaded.*not known to keep the rows of members apart"
    with attached("llama-lora", model, theta) as bayesian, pytest.raises(ValueError, match=message):
        bayesian.generate(**batch(), past_key_values=cache)


def test_continuous_batching_is_refused() -> None:
    model, _, theta = prepared("llama-lora")
    with (
        attached("llama-lora", model, theta) as bayesian,
        pytest.raises(ValueError, match=r"generate\(continuous batching\) is not supported for an ensemble"),
    ):
        bayesian.generate_batch([[3, 4, 5]], max_new_tokens=2)


@pytest.mark.parametrize("options", [{"num_beam_groups": 1}, {"guidance_scale": 1.0}, {"use_mtp": False}], ids=str)
def test_settings_that_ask_for_nothing_are_no_matter(options: dict[str, Any]) -> None:
    model, layout, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        output = generate(bayesian, batch(), **options)
    assert torch.equal(output.sequences, looped(model, layout, theta, batch(), greedy))


def test_a_model_without_keys_and_values_to_cache_is_refused() -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(**sizes))
    with pytest.raises(ValueError, match="MambaForCausalLM takes no past_key_values"):
        attach(model, subspace="out_proj")
    assert "forward" not in vars(model.backbone.layers[0].mixer.out_proj)


def test_a_model_that_keeps_its_state_in_its_layers_is_refused() -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(num_hidden_layers=3, lru_width=16, **sizes))
    with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM answers no past_key_values: models that keep"):
        attach(with_lora(model, target_modules=["q_proj"]))


def test_refused_decoding_is_found_in_the_models_own_settings() -> None:
    model, _, theta = prepared("llama-lora")
    model.generation_config.prompt_lookup_num_tokens = 2
    with (
        attached("llama-lora", model, theta) as bayesian,
        pytest.raises(ValueError, match="prompt_lookup_num_tokens=2"),
    ):
        bayesian.generate(**batch())


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


def test_sum_of_token_logprobs_is_no_sequence_logprob() -> None:
    model, _, theta = prepared("gpt2-last-block")
    with attached("gpt2-last-block", model, theta) as bayesian:
        output = generate(bayesian, batch())
    assert ((output.sequence_logprob - output.sequence_logprob_tokenwise).abs() > 0.01).all()


# -- the trace by itself ---------------------------------------------------------------------------------------------


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


def test_a_cache_of_the_callers_own_is_used_and_grown() -> None:
    model, layout, theta = prepared("llama-lora-last-block")
    inputs = batch()
    cache = DynamicCache(config=model.get_base_model().config)
    with torch.no_grad(), attached("llama-lora-last-block", model, theta) as bayesian:
        prefix = bayesian(inputs["input_ids"][:, :4], past_key_values=cache, use_cache=True)
        rest = bayesian(inputs["input_ids"][:, 4:], past_key_values=prefix.past_key_values, use_cache=True)
    assert rest.past_key_values is cache
    assert cache.get_seq_length() == 7
    expected = mixture(
        member_logits(model, layout, theta, **{"ids": inputs["input_ids"], "mask": inputs["attention_mask"]})
    )
    torch.testing.assert_close(rest.logits, expected[:, 4:], rtol=1e-5, atol=1e-5)  # float32 inside Llama


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-lora", "mistral-last-block"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("change", ["beams", "rows", "members"])
def test_a_cache_of_other_rows_is_refused(name: str, kind: str, change: str) -> None:
    model, _, theta = prepared(name)
    inputs = {key: value[:1] for key, value in batch().items()}
    longer = {key: torch.cat([value, value], 1) for key, value in inputs.items()}
    with attached(name, model, theta) as bayesian:
        config = bayesian.config
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=40)
        generate(bayesian, inputs, past_key_values=cache)
        if change == "members":
            bayesian.show(theta[:2])
        if change == "rows":
            longer = {key: value.repeat(3, 1) for key, value in longer.items()}
        num_beams = 2 if change == "beams" else 1
        with pytest.raises(ValueError, match=r"layer \d of the cache has [13] rows, expected [2-9]"):
            generate(bayesian, longer, past_key_values=cache, num_beams=num_beams)


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-lora", "llama-head"])
def test_a_cache_whose_rows_are_repeated_serves_beams(name: str) -> None:
    model, _, theta = prepared(name)
    inputs = batch(padding="left")
    with attached(name, model, theta) as bayesian:
        prefix = generate(bayesian, {key: value[:, :4] for key, value in inputs.items()}, max_new_tokens=1)
        prefix = prefix.past_key_values
        prefix.batch_repeat_interleave(2)
        output = generate(bayesian, inputs, past_key_values=prefix, num_beams=2)
        expected = generate(bayesian, inputs, num_beams=2)
    assert torch.equal(output.sequences, expected.sequences)
    require_scores(output, {field: expected[field] for field in FIELDS}, 0.0)
