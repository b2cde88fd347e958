"""Linearised language models against Jacobians row by row, against members, and in the closed form of a head."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_bayes import BayesianModelForCausalLM, LaplaceConfig, attach, fit_laplace, pipeline
from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.distributed.member_sums import LocalMembers
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import COVARIANCES, dense
from hf_bayes.models import linearised_lm, output_covariance
from hf_bayes.models.output_covariance import head_covariance
from hf_bayes.uncertainty.decomposition import predict
from hf_bayes.uncertainty.gaussian_links import LINKS
from tests import tiny_models as models
from tests.members.subjects import CAUSAL
from tests.members.test_quantised import int8_block
from tests.models.test_linearised import random_covariance
from tests.runs import token_rows
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer, with_lora

# Llama computes its norms in float32, whatever its weights are
TOLERANCE = {"llama": 1e-5, "gpt2": 1e-10}


class Posterior:
    """The part of a posterior that ``linearise`` reads."""

    def __init__(self, approximation: Any) -> None:
        self.approximation = approximation


WORDS = 24
"""A Jacobian takes a backward pass for each word at each position."""


def llama() -> nn.Module:
    return tiny_llama(dtype=torch.float64, hidden_size=8, intermediate_size=12, vocab_size=WORDS)


def gpt2() -> nn.Module:
    return tiny_gpt2(dtype=torch.float64, n_embd=8, vocab_size=WORDS)


def lora_llama() -> nn.Module:
    return with_lora(llama())


def lora_gpt2() -> nn.Module:
    return with_lora(gpt2())


def few_words(rows: int = 3, padding: str | None = "left", length: int = 5, words: int = 12) -> dict[str, Tensor]:
    inputs = models.batch(rows=rows, length=length, padding=padding)
    return {"input_ids": inputs["input_ids"] % words, "attention_mask": inputs["attention_mask"]}


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama, LoRA": (lora_llama, "trainable"),
    "llama, block": (llama, r"layers\.1\."),
    "llama, embedding, norms": (llama, r"embed_tokens|norm"),
    "gpt2, LoRA": (lora_gpt2, "trainable"),
    "gpt2, last block": (gpt2, r"h\.1\.mlp|ln_f|wpe"),
    "gpt2, tied": (gpt2, r"wte"),
}


def draws_of(model: nn.Module, layout: Layout, count: int = 3, size: float = 0.3) -> tuple[Tensor, Tensor]:
    """[2, d] means of a mixture, and [count, d] draws far enough away for a curve to show."""
    generator = torch.Generator().manual_seed(1)
    start = initial(model, layout)
    # a constant would not do: no norm sees one that is added to all embeddings
    away, *noise = torch.randn(1 + count, layout.dim, generator=generator, dtype=start.dtype)
    means = torch.stack([start, start + 0.2 * away])
    return means, means[torch.arange(count) % 2] + size * torch.stack(noise)


def attached(model: nn.Module, subspace: str, means: Tensor, theta: Tensor) -> Any:
    bayesian = attach(model, theta, subspace=subspace)
    bayesian.posterior = Posterior(Gaussian.diagonal(means, torch.ones_like(means)))  # type: ignore[assignment]
    return bayesian


def linear_logits(bayesian: BayesianModelForCausalLM, inputs: dict[str, Tensor]) -> Tensor:
    """[M, B, T, V] that a linearised model hands to the mixture."""
    rows, length = inputs["input_ids"].shape
    chunks = bayesian.member_logits({**inputs, "use_cache": False}, torch.arange(rows * length))
    return torch.cat([logits for _, logits in chunks], 1).unflatten(1, (rows, length))


def brute_force(model: nn.Module, layout: Layout, inputs: dict[str, Tensor], mean: Tensor, theta: Tensor) -> Tensor:
    """[B, T, V]: f(x, mean) + J (theta - mean), the Jacobian of one row at a time."""
    rows = []
    for row in range(len(inputs["input_ids"])):
        own = {name: value[row : row + 1] for name, value in inputs.items()}
        mask = own["attention_mask"]
        own["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)

        def logits(flat: Tensor, own: dict[str, Tensor] = own) -> Tensor:
            values: Any = layout.unflatten(flat)
            return torch.func.functional_call(model, values, (), {**own, "use_cache": False}).logits[0]

        jacobian = torch.autograd.functional.jacobian(logits, mean)
        rows.append(logits(mean).detach() + jacobian @ (theta - mean))
    return torch.stack(rows)


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
        monkeypatch.setattr("hf_bayes.models.causal_members.HIDDEN_BYTES", 1)
        monkeypatch.setattr("hf_bayes.members.head.CHUNK_BYTES", {"cpu": 4 * models.VOCABULARY * 10})
        pieces = bayesian.evaluate_batch({**inputs, "labels": labels})[0]
    for name, value in whole.items():
        assert torch.allclose(pieces[name], value, atol=1e-9), name


def test_slices_of_rows_leave_room_for_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = lora_gpt2(), few_words(rows=4, padding=None, length=60, words=WORDS)
    means, theta = draws_of(model, select(model))
    with attached(model, "trainable", means, theta) as bayesian:
        of_two_rows = 2 * 3 * 60 * 8 * 8  # rows, members, positions, hidden states, bytes
        monkeypatch.setattr("hf_bayes.models.causal_members.HIDDEN_BYTES", of_two_rows)
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
        with pytest.raises(ValueError, match="do not hold the derivatives of a linearised model's keys and values"):
            bayesian(input_ids=inputs["input_ids"][:, -1:], past_key_values=cache)


def test_processes_deal_their_draws_to_the_same_components() -> None:
    model, inputs = lora_gpt2(), few_words(words=WORDS)
    means, theta = draws_of(model, select(model), 4)
    with attached(model, "trainable", means, theta) as bayesian:
        whole = linear_logits(bayesian.linearise(), inputs)
        # as spread_members leaves it
        bayesian.theta = nn.Parameter(theta[1:2].clone())
        bayesian.current_members.own_spread = spread = LocalMembers()
        spread.rank = 1
        assert torch.allclose(linear_logits(bayesian, inputs)[0], whole[1], atol=1e-12)
        with bayesian.predictor.open(bayesian):
            assert bayesian.spread is spread  # which asks the other processes for their sums
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
        assert not bayesian.is_linearised
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


SMALL = {"hidden_size": 4, "intermediate_size": 6, "vocab_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}


def head_model(kind: str = "diagonal", num_draws: int = 3, std: float = 1.0, **sizes: Any) -> Any:
    """A Llama of 12 words whose head alone is random, and its Gaussian of any structure."""
    model = tiny_llama(dtype=torch.float64, **{**SMALL, **sizes})
    layout = select(model, r"lm_head")
    start = std * initial(model, layout)
    covariances = tuple(random_covariance(kind, layout, seed) for seed in (0, 1))
    gaussian = Gaussian(torch.stack([start, start + 0.1]), covariances)
    theta = gaussian.sample(num_draws, torch.Generator().manual_seed(0))
    bayesian = attach(model, theta, subspace="lm_head")
    bayesian.posterior = Posterior(gaussian)  # type: ignore[assignment]
    return bayesian


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


@pytest.mark.parametrize("kind", COVARIANCES)
def test_the_output_covariance_of_a_head_needs_no_full_jacobian(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "full":  # whose Jacobian is smaller than itself

        def never(*args: Any) -> None:
            raise AssertionError("a Jacobian of all outputs and parameters")

        monkeypatch.setattr(output_covariance, "covariance_of_outputs", never)
    layout = Layout(("w", "b"), ((5, 3), (5,)))
    covariance = random_covariance(kind, layout)
    features = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    eye = torch.eye(5, dtype=torch.float64)
    jacobian = torch.cat([torch.einsum("uv,bn->buvn", eye, features).flatten(2), eye.expand(4, -1, -1)], -1)
    found = head_covariance(covariance, layout, features, weight="w")
    found = found if found.ndim == 3 else torch.diag_embed(found)
    expected = jacobian @ dense(covariance, features) @ jacobian.mT
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


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


# -- refusals ---------------------------------------------------------------------------------------------------------


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
        assert bayesian.is_linearised  # and stays what it was
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
        assert not bayesian.is_linearised


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
