"""Linearised predictions of a classifier that is loaded from a saved posterior."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import BayesianModelForSequenceClassification, LaplaceConfig, attach, fit_laplace
from hf_bayes.core.layout import initial, select
from hf_bayes.models.linearised.outputs import gaussian_outputs
from hf_bayes.uncertainty.gaussian_links import LINKS
from tests import tiny_models as models
from tests.models.linear_cases import lora_bert
from tests.runs import label_rows
from tests.tiny_models import tiny_bert, with_lora


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of two Kronecker-factored Laplace approximations on LoRA and the head."""
    directory = tmp_path_factory.mktemp("laplace")
    model = with_lora(tiny_bert())
    theta = initial(model, select(model))
    with attach(model, torch.stack([theta, theta + 0.05])) as bayesian:
        config = LaplaceConfig(structure="kronecker", prior_std=0.3, check_gradient=False)
        fit_laplace(bayesian, label_rows()).save_pretrained(directory / "diagonal")
        fit_laplace(bayesian, label_rows(), config).save_pretrained(directory / "kronecker")
    return directory


def load(directory: Path) -> BayesianModelForSequenceClassification:
    return BayesianModelForSequenceClassification.from_pretrained(directory, base_model=tiny_bert(), members=4)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_a_linearised_classifier_follows_its_models_dtype(classifier: Path) -> None:
    bayesian, inputs = load(classifier / "kronecker").linearise("probit"), models.batch()
    single = bayesian(**inputs)
    double = bayesian.to(torch.float64)(**inputs)
    assert double.total.dtype == torch.float64
    # members and covariances were stored in float32
    assert (double.total - single.total).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize("link", LINKS)
def test_a_saved_posterior_predicts_linearised(link: str, classifier: Path) -> None:
    bayesian, inputs = load(classifier / "kronecker"), models.batch()
    members = bayesian(**inputs)
    labels = torch.tensor([0, 2, -100])
    output = bayesian.linearise(link)(**inputs, labels=labels)
    expected = LINKS[link](*gaussian_outputs(bayesian, bayesian.posterior.approximation, inputs))
    assert torch.equal(output.logits, expected.log_probs)
    assert torch.equal(output.total, expected.total)
    assert not torch.allclose(output.logits, members.logits, atol=1e-4)
    assert torch.isclose(output.loss, -(output.logits[0, 0] + output.logits[1, 2]) / 2)
    statistics, _ = bayesian.evaluate_batch({**inputs, "labels": labels})
    assert torch.allclose(statistics["nll"].mean(), output.loss)
    defined = {"total"} if link == "probit" else {"total", "aleatoric", "epistemic"}
    assert set(statistics) == {"nll", "confidence", "correct", "brier"} | defined
    assert (output.epistemic is None) == (link == "probit")
    assert torch.equal(bayesian.linearise(None)(**inputs).logits, members.logits)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_a_loaded_laplace_classifier_predicts_linearised(classifier: Path) -> None:
    directory, inputs = classifier / "kronecker", models.batch()

    def loaded(**options: Any) -> BayesianModelForSequenceClassification:
        return BayesianModelForSequenceClassification.from_pretrained(directory, base_model=tiny_bert(), **options)

    assert json.loads((directory / "posterior_config.json").read_text())["prediction"] == "linearised"
    members, linearised = (load(directory).linearise(link)(**inputs).logits for link in (None, "monte_carlo"))
    assert not torch.allclose(members, linearised, atol=1e-3)
    assert torch.equal(loaded()(**inputs).logits, linearised)
    assert torch.equal(load(directory)(**inputs).logits, members)  # four members were asked for
    asked = loaded(prediction="members")(**inputs).logits
    assert torch.equal(asked, loaded(members=10)(**inputs).logits)
    probit = loaded(members=4, prediction="linearised_probit")
    assert torch.equal(probit(**inputs).logits, load(directory).linearise("probit")(**inputs).logits)
    with pytest.raises(ValueError, match=r"prediction must be one of members, linearised, .*, got 'mean'"):
        loaded(prediction="mean")


@pytest.mark.parametrize("prediction", [None, "members", "linearised_probit"])
def test_a_pipeline_predicts_as_stored_or_as_asked(prediction: str | None, classifier: Path) -> None:
    from hf_bayes.pipelines.factory import pipeline

    options: dict[str, Any] = {"base_model": tiny_bert(), "tokenizer": models.tiny_tokenizer()}
    classify = pipeline(model=str(classifier / "kronecker"), prediction=prediction, **options)
    link = {None: "monte_carlo", "members": None, "linearised_probit": "probit"}[prediction]
    assert classify.model.predictor.link == link
    assert len(classify("a chain")) == 1


def test_the_pipeline_gives_what_is_defined(classifier: Path) -> None:
    from hf_bayes.pipelines.factory import pipeline

    bayesian = load(classifier / "diagonal").linearise("probit")
    classify = pipeline("bayesian-text-classification", bayesian, tokenizer=models.tiny_tokenizer())
    assert list(classify("a chain")[0]["uncertainty"]) == ["total"]


def test_shown_members_of_a_mixture_have_no_linear_outputs(classifier: Path) -> None:
    bayesian, inputs = load(classifier / "kronecker").linearise(), models.batch()
    own = bayesian.drawn_outputs(inputs)
    members = bayesian.theta.detach()[1:]  # the first of these was drawn from the second component
    with (
        bayesian.showing(members),
        pytest.raises(ValueError, match="a mixture of 2 Gaussians, and a linearised member"),
    ):
        bayesian.drawn_outputs(inputs)
    assert torch.equal(bayesian.drawn_outputs(inputs), own)


@pytest.mark.parametrize("link", ["laplace", "", "mc"])
def test_unknown_links_are_refused(link: str, classifier: Path) -> None:
    with pytest.raises(ValueError, match="link must be one of monte_carlo, probit, bridge"):
        load(classifier / "diagonal").linearise(link)


def test_what_cannot_be_linearised_is_refused(classifier: Path) -> None:
    with attach(lora_bert()) as bayesian, pytest.raises(ValueError, match="needs a Gaussian posterior, got none"):
        bayesian.linearise()


@pytest.mark.parametrize("link", LINKS)
def test_each_of_several_labels_is_a_choice_of_two(link: str, classifier: Path) -> None:
    inputs, labels = models.batch(), torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]])
    with attach(with_lora(tiny_bert(problem_type="multi_label_classification"))) as bayesian:
        bayesian.posterior = load(classifier / "kronecker").posterior
        mean, covariance = gaussian_outputs(bayesian, bayesian.posterior.approximation, inputs)
        output = bayesian.linearise(link)(**inputs, labels=labels)
        statistics, _ = bayesian.evaluate_batch({**inputs, "labels": labels})
    std = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    grid = torch.linspace(-8, 8, 4001).view(-1, 1, 1, 1)
    weights = torch.exp(-0.5 * grid.square()) / torch.exp(-0.5 * grid.square()).sum()
    exact = (weights * torch.sigmoid(mean + grid * std)).sum(0).mean(0)
    found = output.logits.sigmoid()
    # 1000 antithetic draws of a sigmoid: 0.016; MacKay's probit is within 0.02 (docs/uncertainty.md)
    assert (found - exact).abs().max() < 0.02
    assert (mean.sigmoid().mean(0) - exact).abs().max() > 0.04  # the twin: without the spread
    nll = torch.nn.functional.binary_cross_entropy_with_logits(output.logits, labels, reduction="none").sum(-1)
    assert torch.allclose(statistics["nll"], nll)
    assert torch.isclose(output.loss, nll.mean())
    entropies = torch.distributions.Bernoulli(probs=found).entropy()
    torch.testing.assert_close(output.total, entropies.sum(-1))
