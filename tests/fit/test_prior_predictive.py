from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from transformers import PreTrainedModel

from hf_bayes.core.layout import Layout, initial, select
from hf_bayes.core.rng import generator
from hf_bayes.distributions.priors import build_prior
from hf_bayes.fit.prior_predictive import PriorPredictive, prior_predictive
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.runs import label_rows, padding_collator, token_rows
from tests.tiny_models import tiny_bert, tiny_llama, with_lora

METHOD = SGHMCConfig(prior="laplace", prior_std=0.5, prior_mean="initial")
DRAWS = 5


@torch.no_grad()
def log_probs(model: PreTrainedModel, layout: Layout, row: dict[str, list[int]], theta: Tensor) -> Tensor:
    """[..., C] of one row, with ``theta`` [d] as the model's own weights."""
    parameters = dict(model.named_parameters())
    for name, value in layout.unflatten(theta).items():
        parameters[name].copy_(value)
    return model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("make", [tiny_bert, tiny_llama])
def test_histograms_average_models_drawn_from_the_prior(make: object) -> None:
    assert callable(make)
    model = make()
    before = parameters_to_vector(model.parameters()).clone()
    rows = label_rows(7) if make is tiny_bert else token_rows([3, 9, 5, 7])
    options = {} if make is tiny_bert else {"collate": padding_collator()}
    found = prior_predictive(model, rows, METHOD, num_draws=DRAWS, batch_size=3, subspace="last_block", **options)
    assert torch.equal(parameters_to_vector(model.parameters()), before)

    layout = select(model, "last_block")
    start = initial(model, layout)
    thetas = build_prior(METHOD, layout, start, model).sample(DRAWS, layout.dim, generator(0, "prior"))
    logs = [torch.cat([log_probs(model, layout, row, theta).view(-1, found.per_draw.shape[1]) for row in rows])
            for theta in thetas]  # fmt: skip
    expected = torch.stack([log.exp().mean(0) for log in logs])
    assert torch.allclose(found.per_draw, expected, atol=1e-6)  # float32
    assert torch.allclose(found.mean, expected.mean(0), atol=1e-6)
    averaged_logits = torch.stack([log.mean(0).softmax(0) for log in logs])
    assert not torch.allclose(found.per_draw, averaged_logits, atol=1e-3)  # the twin


def test_narrow_prior_draws_agree_and_wide_prior_draws_do_not() -> None:
    model, found = tiny_bert(num_labels=3), {}
    for std in (1e-3, 30.0):
        method = SGHMCConfig(prior_std=std)
        found[std] = prior_predictive(model, label_rows(8), method, subspace="last_layer", num_draws=60)
        assert found[std].per_draw.sum(1).allclose(torch.ones(60))
    assert (found[1e-3].per_draw - 1 / 3).abs().max() < 0.01
    assert found[30.0].per_draw.max(1).values.mean() > 0.6  # a draw has its favourite class,
    assert found[30.0].mean.max() < 0.45  # all draws together none


@pytest.mark.parametrize("num_classes", [3, 50])
def test_the_plot_is_an_image(num_classes: int, tmp_path: Path) -> None:
    histograms = torch.rand(4, num_classes, generator=generator("histograms")).softmax(1)
    PriorPredictive(histograms).plot(tmp_path / "prior.png")
    assert (tmp_path / "prior.png").read_bytes()[:4] == b"\x89PNG"


def test_a_model_without_classes_is_refused_and_given_back() -> None:
    model = tiny_bert(num_labels=3)
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="over classes, got a model with a Bernoulli likelihood"):
        prior_predictive(model, label_rows(2), METHOD, subspace="last_layer")
    assert type(model.classifier).__name__ == "Linear"
    assert "forward" not in vars(model.classifier)


def test_a_name_is_no_method() -> None:
    with pytest.raises(
        ValueError, match=r"method must be a config, an instance of a class in hf_bayes\.METHODS, got 'sghmc'"
    ):
        prior_predictive(tiny_bert(), label_rows(2), "sghmc")  # type: ignore[arg-type]


@pytest.mark.parametrize(("data", "message"), [([], "data has 0 rows"), (5, "got int"), (["a"], "cannot read: 'a'")])
def test_data_without_inputs_are_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prior_predictive(with_lora(tiny_llama()), data, SGHMCConfig(), num_draws=1)


@pytest.mark.parametrize("name", ["num_draws", "batch_size"])
def test_no_draws_and_empty_batches_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got 0"):
        prior_predictive(tiny_bert(), label_rows(2), SGHMCConfig(), **{name: 0})  # type: ignore[arg-type]
