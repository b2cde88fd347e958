"""More paths on an accelerator: every method in a trainer, predictions in one pass, and a base model in bfloat16."""

from __future__ import annotations

import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import (
    METHODS,
    BayesianModelForCausalLM,
    BayesianModelForSequenceClassification,
    LaplaceConfig,
    Posterior,
    SGHMCConfig,
    distil,
    fit_laplace,
    fit_variance_factor,
)
from hf_bayes.decide.acquisition import RULES, select_rows
from hf_bayes.decide.prediction_sets import fit_prediction_sets
from hf_bayes.fit import distil_training
from hf_bayes.methods.recommended import on_ladder
from tests import runs
from tests import tiny_models as models
from tests.device_checks import DEVICE, assert_same, from_disk, members, path, path_of_each, there, trainer
from tests.fit import distilled
from tests.training.test_trainer import SAMPLER, SETTINGS


@path_of_each(*METHODS)
def every_method_trains_and_predicts(folder: Path, name: str) -> None:
    config = METHODS[name](**SETTINGS.get(name, SAMPLER))
    batches = {"gradient_accumulation_steps": config.requirements.min_batches}
    rows = {"train": runs.token_rows(12), "eval_dataset": runs.token_rows(4, seed=1)}  # six updates are one pass
    run = trainer(folder / "a", config, model=models.with_lora(from_disk(folder)), **rows, **batches)
    run.train()
    assert {value.device for value in run.run.state if isinstance(value, torch.Tensor)} == {DEVICE}
    on_device = run.evaluate()["eval_nll"]
    run.save_model()
    count = None if run.posterior.config.num_members else 2
    loaded = BayesianModelForCausalLM.from_pretrained(folder / "a", members=count)
    expected = loaded(**models.batch())
    found = loaded.to(DEVICE)(**there(models.batch()))
    assert_same(found.logits, expected.logits)
    assert_same(found.epistemic, expected.epistemic)
    assert 0 < on_device < 20


@path
def a_run_gives_the_same_draws_twice(folder: Path) -> None:
    """Sums of a GPU may come in any order; those of a frozen base with LoRA do not."""
    draws = []
    for number in range(2):
        run = trainer(folder / str(number), SGHMCConfig(num_chains=2), model=models.with_lora(models.tiny_llama()))
        run.train()
        draws.append(run.posterior.sample(None))
    assert torch.equal(*draws)


@path
def a_ladder_chooses_on_heldout_rows(folder: Path) -> None:
    run = trainer(
        folder, on_ladder(), train=runs.token_rows(24), eval_dataset=runs.token_rows(60, seed=1), num_train_epochs=1.0,
        max_steps=120, gradient_checkpointing=True,
    )  # fmt: skip
    run.train()
    assert run.posterior.sample(None).isfinite().all()
    assert run.evaluate()["eval_nll"] > 0


@path_of_each("backward", "low_rank", "diagonal", "full")
def a_single_pass_says_what_it_says_on_the_cpu(folder: Path, name: str) -> None:
    base, rows = from_disk(folder, models.tiny_bert), runs.label_rows(12)
    subspace, laplace = "last_layer", LaplaceConfig(check_gradient=False)
    fit_laplace(base.to(DEVICE), rows, laplace, subspace=subspace).save_pretrained(folder / "a")
    labelled = [{"labels" if key == "label" else key: value for key, value in row.items()} for row in rows]
    posterior = Posterior.from_pretrained(folder / "a")
    fit_variance_factor(posterior, labelled, base_model=base).save_pretrained(folder / "b")
    kind = BayesianModelForSequenceClassification
    moved, there_at_once = (
        kind.from_pretrained(folder / "b"),
        kind.from_pretrained(folder / "b", device_map=str(DEVICE)),
    )
    for model in (moved, there_at_once):
        model.single_pass(structure=name)
    expected = moved(**models.batch())
    for model in (moved.to(DEVICE), there_at_once):
        found = model(**there(models.batch()))
        assert_same(found.logits, expected.logits)
        assert_same(found.epistemic, expected.epistemic)


@path
def text_is_generated_in_single_passes(folder: Path) -> None:
    run = trainer(folder / "a", METHODS["mean_field"](num_chains=1), model=models.with_lora(from_disk(folder)))
    run.train()
    run.save_model()
    loaded = BayesianModelForCausalLM.from_pretrained(folder / "a", prediction="single_pass")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    expected = loaded.generate(**models.batch(padding="left"), **options)
    assert_same(loaded.to(DEVICE).generate(**there(models.batch(padding="left")), **options), expected)


@path_of_each("classes", "tokens")
def a_student_is_taught_and_asked(folder: Path, name: str) -> None:
    kind = BayesianModelForSequenceClassification if name == "classes" else BayesianModelForCausalLM
    rows = distilled.ROWS if name == "classes" else distilled.TEXTS
    base = distilled.base(name).to(DEVICE)
    with unittest.mock.patch.object(distil_training, "UPDATES", 30):
        taught = distil(distilled.ensemble(name), rows, base_model=base, batch_size=50, progress=False)
    taught.save_pretrained(folder)
    student = kind.from_pretrained(folder, base_model=distilled.base(name), prediction="distilled")
    expected = student(**models.batch())
    found = student.to(DEVICE)(**there(models.batch()))
    assert_same(found.logits, expected.logits)
    assert_same(found.epistemic, expected.epistemic)


@path
def decisions_are_those_of_the_cpu(folder: Path) -> None:
    random = torch.Generator().manual_seed(0)
    log_probs = torch.randn(60, 5, generator=random).log_softmax(-1)
    labels = torch.multinomial(log_probs.exp(), 1, generator=random)[:, 0]
    rules = []
    for place in ("cpu", DEVICE):
        torch.manual_seed(3)  # of the numbers that are drawn by default
        rule = fit_prediction_sets(log_probs.to(place), labels.to(place), coverage=0.9)
        rules.append((rule, rule(log_probs.to(place)).cpu()))
    assert rules[0][0].limit == pytest.approx(rules[1][0].limit, rel=1e-12)
    assert torch.equal(rules[0][1], rules[1][1])
    logits = 2 * torch.randn(4, 20, 11, generator=random)  # three labels have more than ``_MAX_JOINT`` configurations
    for by in RULES:
        chosen = [
            select_rows(logits.to(place), 5, by=by, generator=torch.Generator().manual_seed(0))
            for place in ("cpu", DEVICE)
        ]
        assert chosen[0] == chosen[1], by


@path
def folded_members_equal_each_member_alone(folder: Path) -> None:
    """In bfloat16, whose numbers have eight bits: logits of order one differ by a few thousandths."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        model = models.tiny_llama(dtype=dtype, hidden_size=64, intermediate_size=96)
        bayesian = members(models.with_lora(model)).to(DEVICE)
        inputs = there(models.batch(padding="left"))
        logits = bayesian(**inputs, labels=inputs["input_ids"]).logits
        alone = []
        for theta in bayesian.theta.detach().clone():
            bayesian.theta.data = theta[None]
            alone.append(bayesian(**inputs).logits.exp())
        seen = inputs["attention_mask"].bool()
        expected = torch.stack(alone).mean(0).log()
        torch.testing.assert_close(logits[seen], expected[seen], rtol=tolerance, atol=tolerance)


@path
def a_base_model_in_bfloat16_is_trained_and_generates(folder: Path) -> None:
    model = models.with_lora(from_disk(folder, lambda: models.tiny_llama(dtype=torch.bfloat16)))
    run = trainer(folder / "a", SGHMCConfig(num_chains=2), model=model)
    run.train()
    assert run.run.theta.dtype == torch.float32
    run.save_model()
    loaded = BayesianModelForCausalLM.from_pretrained(folder / "a", device_map=str(DEVICE))
    found = loaded.generate(**there(models.batch(padding="left")), max_new_tokens=4)
    assert found.device == DEVICE
