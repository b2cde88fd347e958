"""A model that was detached has no members left: each use of members must raise, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.pipelines.factory import pipeline
from tests import runs
from tests.tiny_models import batch, tiny_bert, tiny_llama, tiny_tokenizer, with_lora

REFUSED = "was detached.*attach"


def detached(make: Callable[..., Any] = tiny_llama) -> BayesianModel:
    with attach(with_lora(make()), num_members=3) as model:
        model.theta.data.add_(0.3 * torch.randn_like(model.theta))
    return model.eval()


def labelled() -> dict[str, torch.Tensor]:
    inputs = batch()
    return {**inputs, "labels": inputs["input_ids"]}


ASKED: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(**batch()),
    "forward with theta": lambda model: model(**labelled(), theta=model.theta),
    "generate": lambda model: model.generate(**batch(), max_new_tokens=2),
    "score": lambda model: model.score(batch()["input_ids"]),
    "evaluate_batch": lambda model: model.evaluate_batch(labelled()),
    "each_term": lambda model: model.each_term(labelled(), lambda logits, labels: labels),
    "log_lik": lambda model: model.log_lik(model.theta, labelled(), folded=False),
    "show": lambda model: model.show(model.theta),
    "showing": lambda model: model.showing(model.theta).__enter__(),
}


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_detached_language_model_refuses(asked):
    with pytest.raises(ValueError, match=REFUSED):
        ASKED[asked](detached())


def test_a_detached_classifier_refuses():
    model = detached(tiny_bert)
    with pytest.raises(ValueError, match=REFUSED):
        model(**batch())
    with pytest.raises(ValueError, match=REFUSED):
        model.evaluate_batch({**batch(), "labels": torch.zeros(3, dtype=torch.long)})


@pytest.mark.parametrize("make", [tiny_llama, tiny_bert])
def test_a_detached_linearised_model_refuses(tmp_path, make):
    rows = None if make is tiny_llama else runs.label_rows()
    trainer = runs.trainer(tmp_path, MeanFieldConfig(), model=with_lora(make()), train=rows)
    trainer.train()
    posterior = trainer.posterior
    trainer.bayesian.detach()
    assert isinstance(posterior.approximation, Gaussian)
    kind = BayesianModelForCausalLM if make is tiny_llama else BayesianModelForSequenceClassification
    model: Any = kind.from_pretrained(posterior, base_model=make(), check_base=False, members=2).linearise()
    model.detach()
    with pytest.raises(ValueError, match=REFUSED):
        model(**batch())


@pytest.mark.parametrize(("task", "make"), [("text-generation", tiny_llama), ("text-classification", tiny_bert)])
def test_a_pipeline_of_a_detached_model_refuses(task, make):
    answer = pipeline(f"bayesian-{task}", detached(make), tiny_tokenizer())
    with pytest.raises(ValueError, match=REFUSED):
        answer("A chain that has not")


@pytest.mark.parametrize("call", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_a_trainer_of_a_detached_model_refuses(tmp_path, call, trained):
    trainer = runs.trainer(tmp_path, SGHMCConfig(), eval_dataset=runs.token_rows(3))
    if trained:
        trainer.train()
    trainer.bayesian.detach()
    with pytest.raises(ValueError, match=REFUSED):
        trainer.predict(trainer.eval_dataset) if call == "predict" else getattr(trainer, call)()
    assert trainer.state.global_step == (6 if trained else 0)


def test_what_a_detached_model_holds_stays_readable():
    model = detached()
    assert model.num_members == len(model.theta) == len(model.current) == 3
    assert model.layout.dim == model.theta.shape[1]
    assert model.config is model.core.config


def test_a_second_detach_leaves_a_later_attachment_alone():
    first = attach(with_lora(tiny_llama()), num_members=2)
    base = first.detach()
    second = attach(base, num_members=2)
    second.theta.data.add_(0.3 * torch.randn_like(second.theta))
    before = second(**batch()).logits
    assert first.detach() is base
    assert torch.equal(second(**batch()).logits, before)
    assert not any(parameter.requires_grad for parameter in base.parameters())
