"""A model holds one predictor, exchanges it as a whole, and is freed without the garbage collector."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_bayes import attach
from hf_bayes.core.layout import select
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.models.base import BayesianModel
from tests.tiny_models import batch, tiny_bert, tiny_llama, with_lora


class Posterior:
    """The part of a posterior that ``linearise`` reads."""

    def __init__(self, approximation: Any) -> None:
        self.approximation = approximation
        self.config = SimpleNamespace(calibration={}, layer_factors={})


MAKE: dict[str, Callable[[], nn.Module]] = {"llama": tiny_llama, "bert": tiny_bert}


def gaussian_model(name: str) -> Any:
    model = with_lora(MAKE[name]())
    layout = select(model)
    gaussian = Gaussian.diagonal(torch.zeros(1, layout.dim), torch.full((1, layout.dim), 0.1))
    bayesian: Any = attach(model, gaussian.sample(3, torch.Generator().manual_seed(0)))
    bayesian.posterior = Posterior(gaussian)
    return bayesian


@pytest.mark.parametrize("name", MAKE)
def test_linearise_exchanges_the_predictor_and_back(name: str) -> None:
    with torch.no_grad(), gaussian_model(name) as bayesian:
        members = bayesian(**batch()).logits
        assert (bayesian.predictor.link, bayesian.predictor.prediction.startswith("linearised")) == (None, False)
        linear = bayesian.predict_by("linearised")(**batch()).logits
        assert (bayesian.predictor.link, bayesian.predictor.prediction.startswith("linearised")) == (
            "monte_carlo",
            True,
        )
        assert not torch.equal(linear, members)
        assert torch.equal(bayesian.predict_by("members")(**batch()).logits, members)


@pytest.mark.parametrize(
    ("prediction", "by_weights"), [("members", True), ("linearised", False), ("single_pass", True)]
)
def test_a_predictor_gives_an_output_for_each_member(prediction: str, by_weights: bool) -> None:
    with torch.no_grad(), gaussian_model("bert") as bayesian:
        outputs = bayesian.predict_by(prediction).drawn_outputs(batch())
        assert outputs.shape == bayesian.member_logits(batch()).shape
        assert torch.equal(outputs, bayesian.member_logits(batch())) == by_weights


@pytest.mark.parametrize("name", MAKE)
def test_a_refused_link_leaves_the_predictor_as_it_was(name: str) -> None:
    with gaussian_model(name) as bayesian:
        before = bayesian.linearise().predictor
        with pytest.raises(ValueError, match="link must be one of"):
            bayesian.linearise("nothing")
        bayesian.posterior = None
        with pytest.raises(ValueError, match="needs a Gaussian posterior"):
            bayesian.linearise()
        assert bayesian.predictor is before


@pytest.mark.parametrize("name", MAKE)
def test_a_predictor_keeps_no_model_alive(name: str) -> None:
    bayesian: BayesianModel = gaussian_model(name).linearise()
    gone, theta = weakref.ref(bayesian), weakref.ref(bayesian.theta)
    bayesian.detach()
    gc.disable()
    try:
        del bayesian
        assert gone() is None
        assert theta() is None
    finally:
        gc.enable()


def test_a_copy_predicts_by_its_own_members() -> None:
    bayesian: Any = attach(tiny_bert(), num_members=2, subspace="last_layer")
    other = copy.deepcopy(bayesian)
    with torch.no_grad():
        before = bayesian(**batch()).logits
        other.theta.add_(1.0)
        assert torch.equal(bayesian(**batch()).logits, before)
        assert not torch.equal(other(**batch()).logits, before)
