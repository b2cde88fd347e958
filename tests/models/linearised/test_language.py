"""Linearised language models against Jacobians row by row, against members, and in the closed form of a head."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_bayes import BayesianModelForCausalLM, LaplaceConfig, attach, fit_laplace, pipeline
from hf_bayes.core.layout import initial, select
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import COVARIANCES
from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.uncertainty.decomposition import predict
from tests import tiny_models as models
from tests.members.subjects import CAUSAL
from tests.members.test_quantised import int8_block
from tests.models.linear_words import (
    WORDS,
    attached,
    brute_force,
    draws_of,
    few_words,
    gpt2,
    head_model,
    linear_logits,
    lora_gpt2,
)
from tests.runs import token_rows
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer, with_lora

# Llama computes its norms in float32, whatever its weights are
TOLERANCE = {"llama": 1e-5, "gpt2": 1e-10}


def llama() -> nn.Module:
    return tiny_llama(dtype=torch.float64, hidden_size=8, intermediate_size=12, vocab_size=WORDS)


def lora_llama() -> nn.Module:
    return with_lora(llama())


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama, LoRA": (lora_llama, "trainable"),
    "llama, block": (llama, r"layers\.1\."),
    "llama, embedding, norms": (llama, r"embed_tokens|norm"),
    "gpt2, LoRA": (lora_gpt2, "trainable"),
    "gpt2, last block": (gpt2, r"h\.1\.mlp|ln_f|wpe"),
    "gpt2, tied": (gpt2, r"wte"),
}


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("case", CASES)
def test_linear_logits_are_those_of_jacobians_row_by_row(case: str, padding: str | None) -> None:
    build, subspace = CASES[case]
    model, inputs = build(), few_words(padding=padding, words=WORDS)
    layout = select(model, subspace)
    means, theta = draws_of(model, layout)
    with torch.no_grad():
        expected = torch.stack([brute_force(model, layout, inputs, means[m % 2], theta[m]) for m in range(3)])
    with attached(model, subspace, means, theta) as bayesian:
        found = linear_logits(bayesian.linearise(), inputs)
        members = linear_logits(bayesian.linearise(None), inputs)
        bayesian.posterior.approximation = Gaussian.diagonal(means.flip(0), torch.ones_like(means))
        others = linear_logits(bayesian.linearise(), inputs)
    read = inputs["attention_mask"].bool()
    size = expected[:, read].abs().max()
    assert (found - expected)[:, read].abs().max() < TOLERANCE[case.split(",")[0]] * size
    # the twins: members themselves, and draws dealt to the wrong component of the mixture
    assert (members - expected)[:, read].abs().max() > 0.01 * size
    assert (others - expected)[:, read].abs().max() > 0.01 * size


@pytest.mark.parametrize("subject", sorted(CAUSAL.keys() - {"bloom-last-block"}))
def test_every_family_moves_along_its_own_gradient(subject: str) -> None:
    """u'J (theta - mean) forwards, through the members' engine, and backwards, through the plain model."""
    case = CAUSAL[subject]
    model, inputs = case.make(torch.float64), models.batch(padding="right")
    layout, read = select(model, case.subspace), inputs["attention_mask"].bool()[..., None]
    mean, generator = initial(model, layout), torch.Generator().manual_seed(0)
    weights = torch.randn(3, 7, models.VOCABULARY, generator=generator, dtype=torch.float64)
    away = torch.randn(layout.dim, generator=generator, dtype=torch.float64)

    def weighted(logits: Tensor) -> Tensor:
        return (weights * logits).where(read, 0).flatten(-3).sum(-1)

    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = [parameters[name].requires_grad_() for name in layout.names]
    gradient = torch.autograd.grad(weighted(model(**inputs, use_cache=False).logits), chosen)
    flat = torch.cat([part.flatten() for part in gradient])
    with attached(model, case.subspace, mean[None], torch.stack([mean + away, mean - away])) as bayesian:
        ahead, back = weighted(linear_logits(bayesian.linearise(), inputs))
    # norms, rotations and the routing of experts are float32
    assert abs(ahead - back - 2 * flat @ away) < 1e-4 * flat.norm() * away.norm()
    assert abs(ahead - back) > 1e-3 * flat.norm()


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_all_that_is_predicted_is_of_linear_logits(padding: str | None) -> None:
    model, inputs = lora_gpt2(), few_words(padding=padding, words=WORDS)
    layout = select(model)
    means, theta = draws_of(model, layout)
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    labels = ids.masked_fill(~mask, -100)
    with attached(model, "trainable", means, theta) as bayesian:
        before = bayesian(**inputs).logits
        bayesian.linearise()
        logits = linear_logits(bayesian, inputs)
        output = bayesian(**bayesian.numbered(inputs), labels=labels)
        statistics, _ = bayesian.evaluate_batch({**inputs, "labels": labels})
        scores = bayesian.score(ids, inputs["attention_mask"])
        assert torch.equal(bayesian.linearise(None)(**inputs).logits, before)
    prediction = predict(logits)
    for part in ("total", "aleatoric", "epistemic"):
        assert (getattr(output, part) - getattr(prediction.uncertainty, part)).abs().max() < 1e-12
    assert (output.logits - prediction.log_probs).abs().max() < 1e-12
    chosen = logits.log_softmax(-1)[:, :, :-1].gather(-1, ids[None, :, 1:, None].expand(3, -1, -1, -1))[..., 0]
    valid = mask[:, 1:] & mask[:, :-1]
    mixture = chosen.logsumexp(0) - math.log(3)
    assert torch.isclose(output.loss, -mixture[valid].mean())
    assert (statistics["nll"].double() + mixture[valid]).abs().max() < 1e-6  # kept in float32
    assert (statistics["epistemic"] - prediction.uncertainty.epistemic[:, :-1][valid]).abs().max() < 1e-12
    assert (statistics["member_nll"] + chosen[:, valid].mean(0)).abs().max() < 1e-12
    assert (scores.logprobs[valid] - mixture[valid]).abs().max() < 1e-12
    assert bool(scores.logprobs[~valid].isnan().all())
    together = chosen.masked_fill(~valid, 0).sum(-1).logsumexp(0) - math.log(3)
    assert (scores.sequence_logprob - together).abs().max() < 1e-12


def test_passes_and_slices_do_not_change_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = with_lora(tiny_gpt2(dtype=torch.float64), layers_to_transform=[1]), models.batch(padding="left")
    means, theta = draws_of(model, select(model), 5)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with attached(model, "trainable", means, theta) as bayesian:
        bayesian.linearise()
        assert bayesian.members.num_trunk_blocks == 1
        whole = bayesian.evaluate_batch({**inputs, "labels": labels})[0]
        bayesian.members_per_pass = 2
        monkeypatch.setattr("hf_bayes.models.language.causal_members.HIDDEN_BYTES", 1)
        monkeypatch.setattr("hf_bayes.members.head.CHUNK_BYTES", {"cpu": 4 * models.VOCABULARY * 10})
        pieces = bayesian.evaluate_batch({**inputs, "labels": labels})[0]
    for name, value in whole.items():
        assert torch.allclose(pieces[name], value, atol=1e-9), name


def test_slices_of_rows_leave_room_for_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = lora_gpt2(), few_words(rows=4, padding=None, length=60, words=WORDS)
    means, theta = draws_of(model, select(model))
    with attached(model, "trainable", means, theta) as bayesian:
        of_two_rows = 2 * 3 * 60 * 8 * 8  # rows, members, positions, hidden states, bytes
        monkeypatch.setattr("hf_bayes.models.language.causal_members.HIDDEN_BYTES", of_two_rows)
        members = [len(piece["input_ids"]) for piece in bayesian.row_slices(inputs)]
        bayesian.linearise()
        linear = [len(piece["input_ids"]) for piece in bayesian.row_slices(inputs)]
    assert (members, linear) == ([2, 2], [1, 1, 1, 1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_callers_may_have_any_gradients_and_attention(mode: Any, attention: str) -> None:
    model, inputs = with_lora(tiny_llama(attn_implementation=attention)), models.batch(padding="left")
    means, theta = draws_of(model, select(model))
    with attached(model, "trainable", means, theta) as bayesian:
        members = bayesian(**inputs).logits
        expected = bayesian.linearise()(**inputs)
        with mode():
            found = bayesian(**models.batch(padding="left"))
    assert torch.allclose(found.logits, expected.logits, atol=1e-5)
    assert not torch.allclose(found.logits, members, atol=1e-2)
    assert not found.logits.requires_grad


@pytest.mark.parametrize("strategy", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_generation_follows_linear_logits_token_by_token(strategy: dict[str, Any]) -> None:
    model, inputs = lora_gpt2(), few_words(length=7, words=WORDS)
    means, theta = draws_of(model, select(model))
    with attached(model, "trainable", means, theta) as bayesian:
        bayesian.linearise()
        torch.manual_seed(0)
        output = bayesian.generate(
            **inputs, max_new_tokens=4, eos_token_id=None, return_dict_in_generate=True, **strategy
        )
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], 1)
        again = bayesian.score(output.sequences, mask, first=7)
        log_probs = predict(linear_logits(bayesian, {"input_ids": output.sequences, "attention_mask": mask})).log_probs
        members = bayesian.linearise(None).score(output.sequences, mask, first=7)
    for name, value in again._asdict().items():
        assert (output[name] - value).abs().max() < 1e-9, name
        assert (members._asdict()[name] - value).abs().max() > 1e-3, name
    if not strategy:
        assert torch.equal(log_probs[:, 6:-1].argmax(-1), output.sequences[:, 7:])


def test_a_cache_is_refused_since_it_holds_no_derivatives() -> None:
    model, inputs = lora_gpt2(), few_words(words=WORDS)
    means, theta = draws_of(model, select(model))
    with attached(model, "trainable", means, theta) as bayesian:
        cache = bayesian(**inputs, use_cache=True).past_key_values
        bayesian.linearise()
        assert bayesian(**inputs, use_cache=True).past_key_values is None
        with pytest.raises(ValueError, match="does not hold the derivatives of a linearised model's keys and values"):
            bayesian(input_ids=inputs["input_ids"][:, -1:], past_key_values=cache)


def test_processes_deal_their_draws_to_the_same_components() -> None:
    model, inputs = lora_gpt2(), few_words(words=WORDS)
    means, theta = draws_of(model, select(model), 4)
    with attached(model, "trainable", means, theta) as bayesian:
        whole = linear_logits(bayesian.linearise(), inputs)
        # as spread_members leaves it
        bayesian.theta = nn.Parameter(theta[1:2].clone())
        bayesian.current_members.own_group = spread = LocalMembers()
        spread.rank = 1
        assert torch.allclose(linear_logits(bayesian, inputs)[0], whole[1], atol=1e-12)
        with bayesian.predictor.open(bayesian):
            assert bayesian.member_group is spread  # which asks the other processes for their sums
        spread.rank = 0
        assert not torch.allclose(linear_logits(bayesian, inputs)[0], whole[1], atol=1e-2)


def test_members_keep_their_mixture_component_or_are_refused() -> None:
    model, inputs = lora_gpt2(), few_words(words=WORDS)
    means, theta = draws_of(model, select(model), 4)
    with attached(model, "trainable", means, theta) as bayesian:
        expected = bayesian.linearise()(**inputs).logits
        with pytest.raises(ValueError, match=r"a mixture of 2 Gaussians.*which is unknown for shown members"):
            bayesian.show(theta.roll(1, 0))
        assert torch.equal(bayesian(**inputs).logits, expected)
        bayesian.linearise(None).show(theta.roll(1, 0))
        with pytest.raises(ValueError, match=r"show\(None\)"):
            bayesian.linearise()
        assert not bayesian.predictor.prediction.startswith("linearised")
        bayesian.show(None)
        assert torch.equal(bayesian.linearise()(**inputs).logits, expected)


def test_draws_of_one_gaussian_may_be_shown_in_any_order() -> None:
    model, inputs = lora_gpt2(), few_words(words=WORDS)
    means, theta = draws_of(model, select(model), 3)
    with attached(model, "trainable", means[:1], theta) as bayesian:
        expected = linear_logits(bayesian.linearise(), inputs)
        bayesian.show(theta.flip(0))
        assert (linear_logits(bayesian, inputs) - expected.flip(0)).abs().max() < 1e-12


# -- a head alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COVARIANCES)
def test_linear_draws_of_a_linear_model_are_its_members(kind: str) -> None:
    inputs = few_words()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with head_model(kind) as bayesian:
        members, statistics = bayesian(**inputs), bayesian.evaluate_batch({**inputs, "labels": labels})[0]
        bayesian.linearise()
        output, found = bayesian(**inputs), bayesian.evaluate_batch({**inputs, "labels": labels})[0]
    # the hidden states are the same bits, f(mean) + J (theta - mean) rounds three times more
    assert (output.logits - members.logits).abs().max() < 1e-10
    assert (output.epistemic - members.epistemic).abs().max() < 1e-10
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in statistics.items())


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_no_gaussian_is_refused() -> None:
    with attach(with_lora(tiny_llama())) as bayesian:
        with pytest.raises(ValueError, match="needs a Gaussian posterior, got none"):
            bayesian.linearise()
        with pytest.raises(ValueError, match="link must be one of monte_carlo, probit, bridge"):
            bayesian.linearise("mc")


def test_attention_without_a_derivative_forwards_is_refused() -> None:
    model = lora_gpt2()
    means, theta = draws_of(model, select(model))
    with attached(model, "trainable", means, theta) as bayesian:
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ValueError, match=r"got attn_implementation='flash_attention_2'.*'sdpa'"):
            bayesian.linearise()


def test_an_operation_without_a_derivative_forwards_is_refused() -> None:
    model = CAUSAL["bloom-last-block"].make(torch.float64)  # its activation is an autograd function of its own
    means, theta = draws_of(model, select(model, "last_block"))
    with attached(model, "last_block", means, theta) as bayesian:
        with pytest.raises(ValueError, match=r"BloomForCausalLM forwards, and one of its operations cannot be"):
            bayesian.linearise()
        assert not bayesian.predictor.prediction.startswith("linearised")


@pytest.mark.filterwarnings("ignore")
def test_few_bits_that_forget_derivatives_are_refused_by_name() -> None:
    model = int8_block(1, lora=0)
    means, theta = draws_of(model, select(model))
    with (
        attached(model, "trainable", means, theta) as bayesian,
        pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj .*quantized\.dynamic.*cannot be differentiated"),
    ):
        bayesian.linearise()
    model = int8_block(0, lora=2)  # below all that is random
    means, theta = draws_of(model, select(model))
    with attached(model, "trainable", means, theta) as bayesian:
        assert bool(linear_logits(bayesian.linearise(), models.batch()).isfinite().all())


# -- from a saved posterior -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("laplace")
    config = LaplaceConfig(estimator="ef_sequence", prior_std=0.3, check_gradient=False)
    fit_laplace(with_lora(tiny_llama()), token_rows(), config).save_pretrained(directory)
    return directory


def test_a_saved_posterior_scores_and_generates_linearised(saved: Path) -> None:
    model = BayesianModelForCausalLM.from_pretrained(saved, base_model=tiny_llama(), members=4)
    write = pipeline("bayesian-text-generation", model, tokenizer=tiny_tokenizer())
    members = write.score("A chain that has not moved")
    model.linearise()
    record = write.score("A chain that has not moved")
    again = write.score(["A chain that has not moved", "Uncertainty"])[0]
    assert [token["total"] for token in again["tokens"]] == pytest.approx(
        [token["total"] for token in record["tokens"]], abs=1e-5
    )
    assert record["uncertainty"]["epistemic"] > 0
    assert record["uncertainty"]["sequence_logprob"] != members["uncertainty"]["sequence_logprob"]
    written = write("A chain", max_new_tokens=3, do_sample=False)[0]
    assert len(written["tokens"]) <= 3
    assert list(written["tokens"][0]) == ["token", "id", "logprob", "total", "aleatoric", "epistemic"]
