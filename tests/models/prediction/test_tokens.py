from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_bayes.core.layout import select
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import COVARIANCES, dense
from hf_bayes.models.linearised import language as linearised_lm
from hf_bayes.uncertainty.gaussian_links import LINKS
from tests.models.linear_words import (
    SMALL,
    Posterior,
    attached,
    brute_force,
    draws_of,
    few_words,
    head_model,
    linear_logits,
    lora_gpt2,
)


@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_the_closed_form_of_a_head_uses_its_gaussian_logits(link: str, kind: str) -> None:
    inputs = few_words()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with head_model(kind) as bayesian:
        gaussian, layout = bayesian.posterior.approximation, bayesian.layout
        features = bayesian.core.model(**inputs).last_hidden_state.detach()
        output = bayesian.linearise(link)(**inputs, labels=labels)
        statistics, kept = bayesian.evaluate_batch({**inputs, "labels": labels}, keep_logits=True)
        few, none = bayesian.evaluate_batch({**inputs, "labels": labels})
    # J of word v is phi at the v-th row of the head
    jacobian = torch.einsum("uv,btn->btuvn", torch.eye(12, dtype=torch.float64), features).flatten(-2)
    means = torch.stack([features @ layout.unflatten(mean)["lm_head.weight"].mT for mean in gaussian.means])
    spread = torch.stack([jacobian @ dense(c, gaussian.means) @ jacobian.mT for c in gaussian.covariances])
    expected = LINKS[link](means, spread)
    assert (output.logits - expected.log_probs).abs().max() < 1e-9
    assert (output.total - expected.total).abs().max() < 1e-9
    assert (output.epistemic is None) == (link == "probit")
    if link == "bridge":
        assert (output.epistemic - expected.epistemic).abs().max() < 1e-9
    targets = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1)
    targets[:, :-1][inputs["attention_mask"][:, :-1] == 0] = -100
    terms = targets != -100
    nll = -expected.log_probs[terms].gather(1, targets[terms][:, None])[:, 0]
    assert torch.isclose(output.loss, nll.mean())
    assert (statistics["nll"] - nll).abs().max() < 1e-6
    # rotations are float32, and evaluation counts positions from the first word
    assert (kept - output.logits).abs().max() < 1e-6
    assert none is None
    assert torch.equal(few["nll"], statistics["nll"])
    defined = {"total"} if link == "probit" else {"total", "aleatoric", "epistemic"}
    assert set(statistics) == {"nll", "confidence", "correct", "brier"} | defined


def test_the_closed_form_and_many_draws_agree() -> None:
    inputs, num_draws = few_words(), 4000
    with head_model("diagonal", num_draws, vocab_size=12) as bayesian:
        gaussian = bayesian.posterior.approximation
        narrow = Gaussian.diagonal(gaussian.means[:1], torch.full_like(gaussian.means[:1], 0.3))
        bayesian.posterior = Posterior(narrow)
        bayesian.show(narrow.sample(num_draws, torch.Generator().manual_seed(1)))
        drawn = bayesian.linearise()(**inputs)
        output = bayesian.linearise("bridge")(**inputs)
        logits = linear_logits(bayesian.linearise(), inputs)
        mean, spread = logits.mean(0), logits.var(0)
        closed = bayesian.linearise("bridge").predictor.head
        states = bayesian.causal.hidden(bayesian, bayesian.numbered({**inputs, "use_cache": False}))
        ((_, exact),) = closed.outputs(narrow, states.hidden, states.output, 3, torch.arange(15))
    std = exact.covariance[0].sqrt()
    # 180 numbers: 4.5 standard errors of a mean, and of a Gaussian's variance
    assert bool(((mean.flatten(0, 1) - exact.mean[0]).abs() < 4.5 * std / num_draws**0.5).all())
    assert bool(((spread.flatten(0, 1) / std.square() - 1).abs() < 4.5 * (2 / num_draws) ** 0.5).all())
    assert not bool(((1.2 * spread.flatten(0, 1) / std.square() - 1).abs() < 4.5 * (2 / num_draws) ** 0.5).all())
    # the bridge's own error (docs/uncertainty.md: 0.015 over ten classes at such variances), and 0.5 / sqrt(4000)
    assert (output.logits.exp() - drawn.logits.exp()).abs().max() < 0.03
    assert ((output.epistemic / drawn.epistemic).log().abs() < 0.3).all()


def test_positions_go_in_chunks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, seen = few_words(), []
    with head_model("kronecker") as bayesian:
        whole = bayesian.linearise("probit")(**inputs).logits
        monkeypatch.setattr(linearised_lm, "JACOBIAN_BUDGET", 2 * 2 * 12 * 12)  # two positions of two components
        link = LINKS["probit"]
        monkeypatch.setitem(LINKS, "probit", lambda *outputs: seen.append(outputs[1].shape) or link(*outputs))
        pieces = bayesian(**inputs).logits
    assert torch.allclose(pieces, whole, atol=1e-12)
    assert seen[0] == (2, 2, 12, 12)
    assert len(seen) == 8


@pytest.mark.parametrize("link", LINKS)
def test_a_batch_without_terms_has_no_statistics(link: str) -> None:
    inputs = few_words()
    with head_model() as bayesian:
        labels = torch.full_like(inputs["input_ids"], -100)
        statistics, _ = bayesian.linearise(link).evaluate_batch({**inputs, "labels": labels})
    assert all(len(value) == 0 for value in statistics.values())


def test_pairs_of_too_many_words_are_refused_with_their_number() -> None:
    with head_model(vocab_size=8200) as bayesian:
        with pytest.raises(ValueError, match=r"8200 words have 67240000 pairs at each position.*link='monte_carlo'"):
            bayesian.linearise("probit")
        members = bayesian(**few_words()).logits  # as before
        assert torch.allclose(bayesian.linearise()(**few_words()).logits, members, atol=1e-9)


@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_a_closed_form_is_of_a_head_alone(link: str) -> None:
    model = lora_gpt2()
    means, theta = draws_of(model, select(model))
    with attached(model, "trainable", means, theta) as bayesian:
        bayesian.linearise()
        with pytest.raises(ValueError, match=r"whose linear head alone is random, got \d+ random tensors"):
            bayesian.linearise(link)
        assert bayesian.predictor.prediction.startswith("linearised")  # and stays what it was
        assert not bayesian.is_closed_form


def test_a_head_whose_logits_are_capped_has_no_closed_form() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        **SMALL, num_hidden_layers=1, head_dim=2, final_logit_softcapping=2.0, tie_word_embeddings=False, pad_token_id=0
    )
    model = Gemma2ForCausalLM(config).double().eval()
    layout, inputs = select(model, "lm_head"), few_words(padding=None)
    means, theta = draws_of(model, layout, size=20.0)
    expected = torch.stack([brute_force(model, layout, inputs, means[m % 2], theta[m]) for m in range(3)])
    with attached(model, "lm_head", means, theta) as bayesian:
        found = linear_logits(bayesian.linearise(), inputs)
        with pytest.raises(ValueError, match="Gemma2ForCausalLM changes what its head gives"):
            bayesian.linearise("probit")(**inputs)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_whole_text_has_no_closed_form() -> None:
    inputs = few_words()
    with head_model() as bayesian:
        bayesian.linearise("bridge")
        for what in (lambda: bayesian.score(**inputs), lambda: bayesian.generate(**inputs, max_new_tokens=2)):
            with pytest.raises(ValueError, match=r"a mean over draws, and link 'bridge' has no draws"):
                what()
