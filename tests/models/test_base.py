from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Model

from hf_bayes.core.layout import select
from hf_bayes.members import member_sums as spread
from hf_bayes.members.weight_methods import WeightMethods
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.uncertainty.decomposition import Prediction, predict
from tests.members.reference import (
    core_of,
    entropies,
    mixture,
    relative_error,
    scattered,
    separate_gradients,
    separate_logits,
)
from tests.members.subjects import CAUSAL, CLASSIFIERS, labelled
from tests.models.prepared import prepared, unchanged
from tests.tiny_models import (
    batch,
    inputs_of,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    with_lora,
)

# -- one ordinary model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["llama-lora", "llama-head", "gpt2-last-block", "bert-lora", "roberta-head", "bert-tagger-lora", "vit-last-block"],
)
def test_logits_are_the_log_mixture_with_its_entropies(name: str) -> None:
    model, layout, theta, subspace = prepared(name)
    inputs = inputs_of(model)
    logits = separate_logits(model, layout, theta, inputs)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        output = bayesian(**inputs)
    assert relative_error(output.logits, mixture(logits)) < 1e-12
    for part, expected in zip((output.total, output.aleatoric, output.epistemic), entropies(logits), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-10)  # the bound for float64
    assert output.total.shape == output.logits.shape[:-1]


def test_mixing_logits_instead_of_probabilities_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed_logits(logits: Tensor) -> Prediction:
        return Prediction(logits.mean(0).log_softmax(-1), predict(logits).uncertainty)

    model, layout, theta, subspace = prepared("bert-lora")
    expected = mixture(separate_logits(model, layout, theta, batch()))
    monkeypatch.setattr(spread, "predict", mixed_logits)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        assert relative_error(bayesian(**batch()).logits, expected) > 0.01


@pytest.mark.parametrize("name", ["llama-lora", "bert-lora", "bert-tagger-lora", "llama-tagger-head", "vit-head"])
def test_loss_with_labels_is_the_mixtures_mean_nll(name: str) -> None:
    model, layout, theta, subspace = prepared(name)
    inputs = labelled(name)
    log_probs = mixture(separate_logits(model, layout, theta, {k: v for k, v in inputs.items() if k != "labels"}))
    labels = inputs["labels"]
    if name in CAUSAL:
        log_probs, labels = log_probs[:, :-1], labels[:, 1:]
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        loss = bayesian(**inputs).loss
    expected = F.nll_loss(log_probs.flatten(0, -2), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


# -- scores of given text --------------------------------------------------------------------------------------------


# -- classifiers and regressors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_std", [None, 0.0, -1.0])
def test_regression_without_noise_is_refused_and_changes_nothing(noise_std: float | None) -> None:
    model = tiny_bert(num_labels=1)
    with unchanged(model), pytest.raises(ValueError, match=f"noise_std > 0, .* got {noise_std}"):
        attach(model, subspace="last_block", noise_std=noise_std)


def test_examples_without_a_label_are_no_terms() -> None:
    model, layout, theta, subspace = prepared("bert-lora")
    inputs = labelled("bert-lora")
    inputs["labels"][1] = -100
    losses, _ = separate_gradients(model, layout, theta, [inputs] * 3)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        result = bayesian(**inputs, theta=theta)
        statistics, _ = bayesian.evaluate_batch(inputs)
    torch.testing.assert_close(result.loss, losses, rtol=1e-12, atol=0)
    assert result.num_terms.tolist() == [2, 2, 2]
    assert {len(values) for values in statistics.values()} == {2}


@pytest.mark.parametrize("name", ["llama-lora", "gpt2-last-block", "bert-lora", "llama-tagger-last-block", "vit-lora"])
def test_statistics_of_evaluation_are_those_of_the_mixture(name: str) -> None:
    model, layout, theta, subspace = prepared(name)
    inputs = labelled(name)
    logits = separate_logits(model, layout, theta, {k: v for k, v in inputs.items() if k != "labels"})
    labels = inputs["labels"]
    if name in CAUSAL:
        logits, labels = logits[:, :, :-1], labels[:, 1:]
    terms = labels != -100
    logits, labels = logits[:, terms], labels[terms]
    chosen = logits.log_softmax(-1).gather(-1, labels.expand(3, -1)[..., None])[..., 0]
    total, aleatoric, epistemic = entropies(logits)
    confidence, best = mixture(logits).exp().max(-1)
    with attach(model, theta, subspace=subspace) as bayesian:
        statistics, none = bayesian.evaluate_batch(inputs)
        with_logits, kept = bayesian.evaluate_batch(inputs, keep_logits=True)
        expected_logits = bayesian(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    expected = {"nll": math.log(3) - chosen.logsumexp(0), "member_nll": -chosen.mean(0), "total": total,
                "aleatoric": aleatoric, "epistemic": epistemic, "confidence": confidence,
                "correct": (best == labels).double()}  # fmt: skip
    for key, value in expected.items():
        torch.testing.assert_close(statistics[key].double(), value, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(with_logits[key], statistics[key])
    assert none is None
    torch.testing.assert_close(kept, expected_logits)


# -- attach and detach -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-last-block", "bert-lora"])
def test_an_error_in_a_forward_leaves_nothing_behind(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    last = [
        module for module in core_of(model).modules() if type(module).__name__.endswith(("Attention", "SelfOutput"))
    ][-1]

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    with unchanged(model):
        with attach(model, theta, subspace=subspace) as bayesian:
            expected = bayesian(**batch()).logits
            handle = last.register_forward_pre_hook(broken)
            with pytest.raises(RuntimeError, match="broken"):
                bayesian(**batch())
            handle.remove()
            assert torch.equal(bayesian(**batch()).logits, expected)
        with pytest.raises(RuntimeError, match="broken"), attach(model, theta, subspace=subspace):
            broken()


def test_an_error_while_members_are_installed_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(part: WeightMethods) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(WeightMethods, "install", broken)
    model = with_lora(tiny_llama())
    with unchanged(model), pytest.raises(RuntimeError, match="broken"):
        attach(model)


@pytest.mark.parametrize("change", ["to", "bfloat16", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_members_keep_their_dtype_when_the_base_is_narrowed(change: str, dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    theta = scattered(model, select(model, "last_block"))
    narrow = torch.float16 if change == "half" else torch.bfloat16
    with torch.no_grad(), attach(model, theta, subspace="last_block") as bayesian:
        exact = bayesian(**batch()).logits
        same = bayesian.to(torch.bfloat16) if change == "to" else getattr(bayesian, change)()
        assert same is bayesian
        assert bayesian.theta.dtype == dtype
        assert torch.equal(bayesian.theta, theta)
        assert model.lm_head.weight.dtype == narrow
        found = bayesian(**batch()).logits.exp()
    assert not torch.equal(theta.to(narrow).to(dtype), theta)  # what rounding would have left
    assert 0 < (found - exact.exp()).abs().max() < 0.2  # probabilities of a base in 8 bits


def test_bfloat16_rounding_looks_epistemic_unlike_float32() -> None:
    """docs/uncertainty.md says so, and where: far below 1e-4 nats the floor is all there is, far above it nothing."""

    def epistemic(std: float, dtype: torch.dtype) -> float:
        model = with_lora(tiny_llama(dtype=torch.bfloat16)).to(dtype)
        theta = scattered(model, select(model), 8, std)
        with torch.no_grad(), attach(model, theta) as bayesian:
            return float(bayesian(**batch()).epistemic.mean())

    for std, floor in ((1e-4, True), (0.1, False)):
        rounded, exact = epistemic(std, torch.bfloat16), epistemic(std, torch.float32)
        assert (exact < 1e-6) == floor
        assert (1e-5 < rounded < 1e-3) == floor
        assert floor or abs(rounded / exact - 1) < 0.1  # 8 bits of a base whose layers all differ
    assert epistemic(1e-4, torch.float16) < 0.1 * epistemic(1e-4, torch.bfloat16)  # three bits more, squared: a 64th


def test_members_follow_a_base_that_is_widened() -> None:
    with attach(tiny_llama(), subspace="last_block") as bayesian:
        assert bayesian.double().theta.dtype == torch.float64
        assert bayesian.float().theta.dtype == torch.float64


@pytest.mark.parametrize("name", ["llama-lora-last-block", "gpt2-everything", "bert-lora-and-saved-head"])
def test_a_deep_copy_is_a_model_of_its_own(name: str) -> None:
    model, _, theta, subspace = prepared(name)
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        expected = bayesian(**batch()).logits
        twin = copy.deepcopy(bayesian)
        twin.theta.data.mul_(2)
        changed = twin(**batch()).logits
        assert torch.equal(bayesian(**batch()).logits, expected)
        assert relative_error(changed, expected) > 0.01
        plain = twin.detach()
        assert torch.equal(bayesian(**batch()).logits, expected)
    with torch.no_grad():
        assert torch.equal(core_of(plain)(**batch()).logits, core_of(model)(**batch()).logits)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in plain.modules())


# -- what is refused -------------------------------------------------------------------------------------------------


class BareForSequenceClassification(GPT2Model):
    """A class from elsewhere whose name promises a head."""


def test_a_backbone_that_answers_no_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="GPT2Model is loaded by AutoModel"):
        attach(GPT2Model(tiny_gpt2().config), subspace="last_block")
    model = attach(BareForSequenceClassification(tiny_gpt2().config), subspace="last_block")
    with pytest.raises(ValueError, match="BareForSequenceClassification returns no logits"):
        model(**batch())


def test_calling_the_wrapped_model_past_its_members_is_refused() -> None:
    model = tiny_llama()
    with (
        attach(model, subspace="last_layer"),
        pytest.raises(RuntimeError, match=r"lm_head.weight is random: call the Bay"),
    ):
        model(**batch())


def test_a_parameter_that_no_forward_reads_is_named() -> None:
    model = tiny_llama()
    model.model.layers[1].spare = nn.Linear(2, 2)
    with attach(model, subspace=r"layers\.1\.") as bayesian, pytest.raises(ValueError, match=r"first .*spare.bias"):
        bayesian(**labelled("llama-lora"), theta=bayesian.theta)


def test_memory_of_a_forward_is_bounded_by_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bayes.members.engine.FOLDED_ROWS", 50)  # 7 positions x 3 rows: two members a pass
    rows: list[int] = []
    model, _, theta, subspace = prepared("llama-lora", num_members=5)
    handle = core_of(model).model.norm.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[0]))
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        bayesian(**batch())
    handle.remove()
    assert rows == [6, 6, 3]


def test_both_kinds_of_model_say_what_they_are() -> None:
    for name in ("llama-lora", "bert-lora"):
        model, _, theta, subspace = prepared(name)
        with attach(model, theta, subspace=subspace) as bayesian:
            assert isinstance(bayesian, BayesianModel)
            assert isinstance(bayesian, BayesianModelForCausalLM) == (name not in CLASSIFIERS)
            assert bayesian.num_members == 3
            assert bayesian.core is core_of(model)
