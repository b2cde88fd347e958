"""Unusual input that must work, some of it with a notice."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    DataCollatorWithPadding,
)

from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.bad_input.making import (
    labelled,
    run,
)
from tests.tiny_models import (
    PAD,
    batch,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    tiny_tokenizer,
    with_lora,
)


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "hf_bayes")
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def test_temperature_zero_optimises_and_warns(tmp_path, warnings_of):
    with pytest.warns(UserWarning, match="temperature 0 maximises the posterior"):
        run(tmp_path, SGHMCConfig(num_chains=2, temperature=0.0))
    assert "draws no posterior samples" in warnings_of()


def test_too_noisy_minibatches_stop_a_corrected_run_at_a_draw(tmp_path):
    """The noise is measured in the run: the first update warns, and the run stops after a hundred."""
    method = SGHMCConfig(correct_gradient_noise=True, temperature=1e-4, draws_per_chain=1)
    numbers = r"alone brings noise of h\^2 V = [\d.e-]+ against 2 gamma h T = 2e-05"
    with (
        pytest.warns(UserWarning, match=numbers),
        pytest.raises(ValueError, match=rf"no noise left to inject in \d+% .*{numbers}: .*Lower the learning rate"),
    ):
        run(tmp_path, method, gradient_accumulation_steps=2, per_device_train_batch_size=1, max_steps=100)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_lora_target_that_matches_nothing_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"target_modules \['gate'\] .* match no module"):
        run(tmp_path, model=with_lora(tiny_llama(), target_modules=["q_proj", "gate"]))


def test_lora_targets_that_match_are_not_reported(tmp_path, recwarn):
    run(tmp_path, model=with_lora(tiny_llama(), layers_to_transform=[1]))
    run(tmp_path, model=with_lora(tiny_llama(), target_modules="all-linear"))
    assert not [warning for warning in recwarn if "match no module" in str(warning.message)]


def test_tied_weights_are_sampled_once(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    trainer = run(tmp_path, model=model, subspace="last_layer")
    assert trainer.bayesian.layout.names == ("model.embed_tokens.weight",)
    assert trainer.bayesian.layout.dim == model.lm_head.weight.numel()
    trainer.save_model()
    assert {name for path in tmp_path.glob("members/*/*.safetensors") for name in load_file(path)} == {
        "model.embed_tokens.weight"
    }
    x = torch.arange(4, 12)[None]
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=tiny_llama(tie_word_embeddings=True))
    assert torch.equal(loaded(input_ids=x).logits, trainer.bayesian(input_ids=x).logits)


@pytest.mark.parametrize(("learning_rate", "warned"), [(1e-20, True), (1e-2, False)])
def test_updates_lost_in_rounding_are_reported(tmp_path, warnings_of, learning_rate, warned):
    run(tmp_path, learning_rate=learning_rate, max_steps=2)
    assert ("lost in their rounding" in warnings_of()) == warned


@pytest.mark.parametrize(("learning_rate", "warned"), [(1e-20, True), (1e-2, False)])
def test_preconditioner_estimates_are_not_reported_as_lost(tmp_path, warnings_of, learning_rate, warned):
    method = SGHMCConfig(num_chains=2, preconditioner="layerwise", preconditioner_batches=2)
    run(tmp_path, method, learning_rate=learning_rate, max_steps=6)
    assert ("lost in their rounding" in warnings_of()) == warned


def test_a_bfloat16_base_keeps_its_chains_in_float32(tmp_path):
    trainer = run(tmp_path, model=with_lora(tiny_llama(dtype=torch.bfloat16)), learning_rate=1e-5, max_steps=2)
    assert trainer.bayesian.theta.dtype == torch.float32
    assert all(draw.dtype == torch.float32 for draw in trainer.run.draws)
    assert float((trainer.run.draws[-1] == runs.origin(trainer)).double().mean()) < 1e-2


def test_padding_enters_neither_num_data_nor_the_loss(tmp_path):
    rows = runs.token_rows([3, 9, 5, 7])
    found = {}
    for name, train in {"collator": rows, "by hand": [padded(row) for row in rows]}.items():
        trainer = run(
            tmp_path, train=train, collator=runs.padding_collator(), max_steps=2, per_device_train_batch_size=4
        )
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[name] = trainer.rows.num_data, losses
    assert found["collator"][0] == found["by hand"][0] == 2 + 8 + 4 + 6
    assert found["collator"][1] == pytest.approx(found["by hand"][1], rel=1e-5)


def padded(row: dict) -> dict:
    missing = 12 - len(row["input_ids"])
    return {key: value + [fill] * missing for (key, value), fill in zip(row.items(), (PAD, 0, -100), strict=True)}


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
def test_a_batch_without_labels_has_zero_loss_and_no_nan(tmp_path, minibatch):
    silent = [{**row, "labels": [-100] * 8} for row in runs.token_rows(9)]
    trainer = run(tmp_path, train=[*silent, *runs.token_rows(1)], per_device_train_batch_size=1, minibatch=minibatch)
    losses = [entry[f"loss/chain_{k}"] for entry in trainer.state.log_history if "loss" in entry for k in range(2)]
    assert all(math.isfinite(loss) for loss in losses)
    assert 0.0 in losses
    assert trainer.rows.num_data == 7


def test_a_classifier_may_ignore_rows(tmp_path):
    trainer = run(
        tmp_path, model=tiny_bert(), subspace="last_layer", train=labelled(-100), per_device_train_batch_size=1
    )
    assert trainer.rows.num_data == 3


@pytest.mark.parametrize("bias", [-math.inf, 1e4])
def test_extreme_logits_keep_uncertainties_finite(tmp_path, bias):
    model = tiny_bert()
    model.classifier.bias.data[2] = bias
    rows = [{**row, "label": row["label"] % 2} for row in runs.label_rows(8)]
    trainer = run(tmp_path, model=model, subspace="classifier.weight", train=rows, eval_dataset=rows)
    metrics = trainer.evaluate()
    values = {name: metrics[f"eval_{name}"] for name in ("total", "aleatoric", "epistemic", "nll")}
    assert all(math.isfinite(value) for value in values.values())
    assert values["total"] == pytest.approx(values["aleatoric"] + values["epistemic"], abs=1e-6)
    assert values["epistemic"] >= -1e-6


def test_a_single_member_gives_a_warning(tmp_path, warnings_of):
    trainer = run(tmp_path, SGHMCConfig(num_chains=1), eval_dataset=runs.token_rows(3))
    assert "1 member: its epistemic uncertainty is 0" in warnings_of()
    assert trainer.evaluate()["eval_epistemic"] == 0.0


def test_a_gaussian_or_several_members_give_no_warning(tmp_path, warnings_of):
    run(tmp_path, MeanFieldConfig(num_chains=1))
    run(tmp_path, SGHMCConfig(num_chains=1, draws_per_chain=2))
    assert "1 member" not in warnings_of()


def test_a_laplace_fit_far_from_a_map_reports_the_distance(tmp_path):
    model = with_lora(tiny_llama())
    with pytest.warns(
        UserWarning, match=r"no MAP: the gradient .* has norm .* standard deviations away .* Train longer"
    ):
        run(tmp_path, LaplaceConfig(prior_std=0.1), model=model, learning_rate=0.5)


def test_an_indefinite_curvature_is_refused(tmp_path):
    model = tiny_bert(num_labels=3, hidden_size=4, intermediate_size=6)
    method = LaplaceConfig(estimator="hessian", structure="full", prior_std=100.0)
    with pytest.raises(ValueError, match=r"not positive definite \(.*lowest eigenvalue is -.*estimator='ggn'"):
        run(tmp_path, method, model=model, subspace="last_block", train=runs.label_rows(4), max_steps=1)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
def test_a_laplace_pass_disables_dropout_and_restores_it():
    model = with_lora(tiny_gpt2(resid_pdrop=0.5, attn_pdrop=0.5)).train()
    first, second = (fit_laplace(model, runs.token_rows(4), LaplaceConfig(), seed=3) for _ in range(2))
    assert runs.equal(first.approximation, second.approximation)
    assert all(module.training for module in model.modules())


PREDICTIONS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "forward": (False, lambda model: model(**batch()).logits),
    "evaluate_batch": (False, lambda model: model.evaluate_batch({**batch(), "labels": batch()["input_ids"]})[0]),
    "generate": (False, lambda model: model.generate(**batch(), output_logits=True, **GREEDY).logits),
    "score": (False, lambda model: model.score(batch()["input_ids"])._asdict()),
    "pipeline": (False, lambda model: pipeline("bayesian-text-generation", model, tiny_tokenizer())("A", **GREEDY)),
    "pipeline.score": (False, lambda model: pipeline("bayesian-text-generation", model, tiny_tokenizer()).score("A b")),
    "forward of a classifier": (True, lambda model: model(**batch())),
    "evaluate_batch of a classifier": (
        True, lambda model: model.evaluate_batch({**batch(), "labels": torch.tensor([0, 1, 2])})[0],
    ),
    "pipeline of a classifier": (
        True, lambda model: pipeline("bayesian-text-classification", model, tiny_tokenizer())("A b"),
    ),
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}


def has_equal(a: Any, b: Any) -> bool:
    """The same bits, in whatever they are."""
    if isinstance(a, Tensor):
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(has_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(has_equal, a, b))
    return a == b


@pytest.mark.parametrize("name", PREDICTIONS)
def test_a_model_trained_with_dropout_predicts_without_it(tmp_path, name):
    classifies, predict = PREDICTIONS[name]
    core, rows = (tiny_bert(), runs.label_rows()) if classifies else (tiny_llama(), runs.token_rows())
    model = run(tmp_path, model=with_lora(core, lora_dropout=0.5), train=rows, max_steps=2).bayesian
    assert model.training  # as transformers' trainer leaves it
    frozen = model.core.get_input_embeddings().eval()
    found = predict(model)
    assert [module for module in model.modules() if not module.training] == [frozen]
    assert has_equal(found, predict(model.eval()))
    assert not any(module.training for module in model.modules())


def test_metropolis_ratios_are_computed_without_dropout(tmp_path):
    errors = []
    for dropout in (0.5, 0.0):
        model = with_lora(tiny_gpt2(resid_pdrop=dropout, attn_pdrop=dropout))
        history = run(tmp_path, HMCConfig(num_chains=1), model=model, max_steps=1).state.log_history
        errors.append([entry["energy_error/chain_0"] for entry in history if "loss" in entry])
    assert errors[0] == errors[1]


def test_own_posteriors_and_checkpoints_may_be_overwritten(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "notes.txt").write_text("of the user")
    for _ in range(2):
        trainer = run(tmp_path, save_strategy="steps", save_steps=3)
        trainer.save_model()
    assert (tmp_path / "notes.txt").read_text() == "of the user"
    assert Posterior.from_pretrained(tmp_path).config.num_members == 2


def test_collators_of_transformers_are_understood(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "attention_mask"} for row in runs.label_rows(4)]
    trainer = run(
        tmp_path,
        model=tiny_bert(),
        subspace="last_layer",
        train=rows,
        collator=DataCollatorWithPadding(tiny_tokenizer()),
    )
    assert trainer.rows.num_data == 4
