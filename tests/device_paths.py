"""The package's public ways on an accelerator, and what each has to find there.

Run by ``test_device.py`` in a process of its own, whose torch keeps a pretend device: ``device_paths.py OUT [LIBRARY]``
writes {path: what went wrong, or null} as JSON. Models go to a trainer as most users give them, on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.training_args
from torch import Tensor

import hf_bayes
from hf_bayes import (
    METHODS,
    BayesianModelForCausalLM,
    BayesianModelForImageClassification,
    BayesianModelForSequenceClassification,
    LaplaceConfig,
    MCDropoutConfig,
    MeanFieldConfig,
    SGHMCConfig,
    TrainingFreeConfig,
    fit_laplace,
    fit_mc_dropout,
    fit_swag,
    fit_training_free,
    pipeline,
)
from hf_bayes.distributions.covariance import moved
from hf_bayes.distributions.covariance.base import check_orthonormal
from hf_bayes.methods.laplace.kronecker_curvature import KroneckerCurvature, KroneckerFactors
from hf_bayes.training.announcement import _time_one_micro_batch
from hf_bayes.training.data.fingerprint import fingerprint_rows
from hf_bayes.uncertainty.decomposition import predict
from tests import (
    device_methods,  # noqa: F401  its paths enter the register
    pretend_device,
    runs,
)
from tests import tiny_models as models
from tests.device_checks import (
    DEVICE,
    PATHS,
    assert_same,
    from_disk,
    members,
    path,
    path_of_each,
    random_state,
    there,
    trainer,
    waits_of,
)
from tests.members.subject_models import bert_tagger, resnet
from tests.models.test_image_classification import image_rows
from tests.pipelines.test_classification import picture, processor
from tests.training.test_trainer import SAMPLER, SETTINGS

# -- prediction --------------------------------------------------------------------------------------------------------


@path
def uncertainty_is_that_of_the_cpu(folder: Path) -> None:
    logits = torch.randn(4, 6, 11, generator=torch.Generator().manual_seed(0))
    logits[..., 3] = -torch.inf
    assert_same(hf_bayes.mixture(logits.to(DEVICE)), hf_bayes.mixture(logits))
    for found, expected in zip(hf_bayes.decompose(logits.to(DEVICE)), hf_bayes.decompose(logits), strict=True):
        assert_same(found, expected)
    assert_same(predict(logits.to(DEVICE)).log_probs, predict(logits).log_probs)


@path
def a_language_model_says_what_it_says_on_the_cpu(folder: Path) -> None:
    bayesian, inputs = members(models.with_lora(models.tiny_llama())), models.batch(padding="left")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    expected = (bayesian(**inputs, labels=inputs["input_ids"]), bayesian.score(**inputs))
    text = bayesian.generate(**inputs, **options)
    bayesian.to(DEVICE)
    inputs = there(inputs)
    found = (bayesian(**inputs, labels=inputs["input_ids"]), bayesian.score(**inputs))
    assert_same(found[0].logits, expected[0].logits)
    assert_same(found[0].loss, expected[0].loss)
    for one, other in zip(found[1], expected[1], strict=True):
        assert_same(one, other)
    assert_same(bayesian.generate(**inputs, **options), text)


@path
def texts_are_generated_streamed_and_scored(folder: Path) -> None:
    model, tokenizer = members(models.with_lora(models.tiny_llama())), models.tiny_tokenizer()
    generate = pipeline("bayesian-text-generation", model, tokenizer, device=DEVICE)
    assert model.device == DEVICE
    texts = ["The mitochondrion is", "A chain"]
    generate(texts, batch_size=2, max_new_tokens=4, do_sample=True, num_return_sequences=2)
    generate(texts, max_new_tokens=4, num_beams=2)
    assert list(generate.stream(texts[1], max_new_tokens=3))
    generate.score(texts)


@path
def classifiers_have_pipelines(folder: Path) -> None:
    options: dict[str, Any] = {"tokenizer": models.tiny_tokenizer(), "device": DEVICE}
    text, tasks = "A chain that has not moved", ("text", "text", "token")
    numbers = members(models.with_lora(models.tiny_bert(num_labels=2, problem_type="regression")), noise_std=0.5)
    taggers = members(bert_tagger(torch.float32), subspace="last_block")
    for task, model in zip(tasks, (members(models.with_lora(models.tiny_bert())), numbers, taggers), strict=True):
        pipeline(f"bayesian-{task}-classification", model, **options)(text)
    images = members(models.tiny_vit(), subspace="last_block")
    pipeline("bayesian-image-classification", images, image_processor=processor(), device=DEVICE)(picture(0))


# -- training ----------------------------------------------------------------------------------------------------------


@path
def a_network_of_convolutions_is_trained_and_loaded(folder: Path) -> None:
    model = from_disk(folder, lambda: resnet(torch.float32))
    run = trainer(folder / "a", METHODS["ensemble"](num_chains=2), model=model, train=image_rows(), subspace="all",
                  max_steps=2)  # fmt: skip
    run.train()
    run.save_model()
    loaded = BayesianModelForImageClassification.from_pretrained(folder / "a")
    with torch.no_grad():
        expected = loaded(**models.images()).logits
        assert_same(run.bayesian(**there(models.images())).logits, expected)
        assert_same(loaded.to(DEVICE)(**there(models.images())).logits, expected)


@path_of_each("sghmc", "hmc", "mean_field", "laplace")
def a_run_is_saved_resumed_and_loaded(folder: Path, name: str) -> None:
    config = METHODS[name](**SETTINGS.get(name, SAMPLER))
    options: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    options["gradient_accumulation_steps"] = config.requirements.min_batches
    whole, again = (trainer(folder / o, config, model=models.with_lora(from_disk(folder)), **options) for o in "ab")
    whole.train()
    again.train(str(folder / "a/checkpoint-2"))
    states = [run.run.state._asdict() for run in (whole, again)]
    for field, value in states[0].items():
        assert value.device == states[1][field].device == DEVICE, field
        assert torch.equal(value, states[1][field]), field
    assert whole.posterior.sample(None).device.type == "cpu", "a posterior is where draws are, whatever made it"
    assert whole.evaluate(whole.train_dataset)["eval_nll"] > 0
    whole.save_model()
    count = None if whole.posterior.config.num_members else 2
    for place in ({"device_map": str(DEVICE)}, {"base_model": from_disk(folder).to(DEVICE)}, {}):
        loaded = BayesianModelForCausalLM.from_pretrained(folder / "a", members=count, **place)
        assert loaded.device == (DEVICE if place else torch.device("cpu"))
        assert loaded.to(DEVICE)(**there(models.batch())).logits.device == DEVICE


@path
def a_checkpoint_of_another_device_is_refused(folder: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer(folder / "a", SGHMCConfig(num_chains=2), **options).train()
    del os.environ["ACCELERATE_TORCH_DEVICE"]
    try:
        other = trainer(folder / "b", SGHMCConfig(num_chains=2), **options, use_cpu=True)
        with pytest.raises(ValueError, match=f"device: saved '{DEVICE.type}', now 'cpu'"):
            other.train(str(folder / "a/checkpoint-1"))
    finally:
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)


@path
def runs_in_bfloat16_with_accumulation_dropout_and_a_shared_trunk(folder: Path) -> None:
    dropout = models.with_lora(models.tiny_gpt2(resid_pdrop=0.1), lora_dropout=0.1)
    for options in (
        {"bf16": True, "gradient_accumulation_steps": 2, "probe_steps": 1},
        {"model": dropout, "minibatch": "shared"},
        {"model": models.tiny_llama().to(DEVICE), "subspace": "last_block", "trunk_memory_gib": 0.01},
    ):
        config = SGHMCConfig(num_chains=2, draws_per_chain=2)
        run = trainer(folder, config, collator=runs.padding_collator(), train=runs.token_rows([5, 7, 3, 6]), **options)
        run.train()
        run.evaluate(run.train_dataset)


@path
def what_a_micro_batch_takes_is_measured_to_its_end(folder: Path) -> None:
    active = runs.started(trainer(folder, SGHMCConfig(num_chains=2)))
    seconds: list[float] = []
    assert waits_of(lambda: seconds.append(_time_one_micro_batch(active))) == 2
    assert seconds[0] > 0


@path
def looking_at_rows_leaves_the_generators_of_the_device(folder: Path) -> None:
    run = trainer(folder, SGHMCConfig(num_chains=2))
    before = random_state()
    fingerprint_rows(*run.rows.data(), seed=run.args.seed)
    assert random_state() == before


@path
def a_posterior_is_the_prior_of_the_next_run(folder: Path) -> None:
    first = trainer(folder, MeanFieldConfig(), model=models.with_lora(from_disk(folder)), max_steps=2)
    first.train()
    for method in (SGHMCConfig(num_chains=2), LaplaceConfig()):
        options: dict[str, Any] = {"prior": first.posterior, "max_steps": 2}
        trainer(folder, method, model=models.with_lora(from_disk(folder)), **options).train()


@path_of_each(*(name for name, kind in METHODS.items() if kind().requirements.heldout == "none"))
def chains_of_an_energy_stay_where_they_start(folder: Path, name: str) -> None:
    few = {"low_rank_vi": {"rank": 2}, "ekf": {"init_std": 1.0}}  # an energy of five parameters, with its own prior
    config = METHODS[name](**few.get(name, {}))
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def energy(theta: Tensor, batch: Tensor | None) -> Tensor:
        return 4 * (theta[:, None] - (rows if batch is None else batch)).square().mean(1).sum(1)

    batched = {"batches": rows.split(2), "batches_per_step": 4, "batch_fraction": 0.25}
    steps = {"num_steps": 1} if name == "ekf" else {"num_steps": 8, "thin": 2}  # ekf: one pass, in updates of all rows
    found = hf_bayes.sample(
        energy, torch.zeros(5, device=DEVICE), config, **steps, learning_rate=1e-3, num_data=8,
        **({} if config.requirements.all_data_in_every_update else batched),
    )  # fmt: skip
    assert {found.draws.device, *(value.device for value in found.info.values())} == {DEVICE}


# -- Gaussians, and what needs no trainer ------------------------------------------------------------------------------


@path
def a_finished_adapter_is_bayesianised(folder: Path) -> None:
    model = models.with_lora(from_disk(folder, models.tiny_bert)).to(DEVICE)
    found = fit_training_free(model, runs.label_rows(40), TrainingFreeConfig(scales="layer"))
    assert found.approximation.means.device.type == "cpu"


@path_of_each("diagonal", "kronecker", "low_rank", "full")
def a_laplace_approximation_predicts_linearised(folder: Path, name: str) -> None:
    rows, inputs = runs.label_rows(6), there(models.batch())
    model = from_disk(folder, models.tiny_bert).to(DEVICE)
    fit_laplace(
        model, rows, LaplaceConfig(structure=name, fit_prior="evidence"), subspace="last_layer"
    ).save_pretrained(folder / "out")
    loaded = BayesianModelForSequenceClassification.from_pretrained(folder / "out", members=3)
    gaussian = loaded.posterior.approximation
    elsewhere, theta = moved(gaussian, DEVICE), gaussian.sample(2, torch.Generator().manual_seed(0))
    assert_same(elsewhere.sample(2, torch.Generator().manual_seed(0)), theta)
    assert_same(elsewhere.log_prob(theta.to(DEVICE)), gaussian.log_prob(theta))
    assert_same(elsewhere.grad(theta.to(DEVICE)), gaussian.grad(theta))
    for link in ("monte_carlo", "probit", "bridge"):
        expected = loaded.to("cpu").linearise(link)(**models.batch()).logits
        assert_same(loaded.to(DEVICE)(**inputs).logits, expected)


@path
def a_language_model_has_laplace_approximations(folder: Path) -> None:
    rows, inputs = runs.token_rows(4), there(models.batch(padding="right"))
    heldout = {"heldout": runs.token_rows(4, seed=1)}
    for number, (fields, more) in enumerate((({"structure": "kronecker"}, {}), ({"fit_prior": "heldout"}, heldout))):
        model = models.with_lora(from_disk(folder)).to(DEVICE)
        fit_laplace(model, rows, LaplaceConfig(**fields), **more).save_pretrained(folder / str(number))
        loaded = BayesianModelForCausalLM.from_pretrained(folder / str(number), members=2).to(DEVICE)
        loaded.linearise().evaluate_batch({**inputs, "labels": inputs["input_ids"]})


@path
def an_eigenbasis_is_looked_at_where_it_is(folder: Path) -> None:
    values, basis = torch.arange(1.0, 7.0).view(2, 3), torch.eye(2)
    curvature = KroneckerCurvature((KroneckerFactors(basis, None, values),))
    assert_same(moved(curvature, DEVICE).dense(), curvature.dense())
    check_orthonormal("basis", basis.to(DEVICE))


@path
def dropout_swag_and_a_prior_need_no_trainer(folder: Path) -> None:
    fit_mc_dropout(models.with_lora(models.tiny_llama()).to(DEVICE), MCDropoutConfig(dropout=0.1)).sample(None)
    run = trainer(folder, SGHMCConfig(num_chains=2, draws_per_chain=3))
    run.train()
    fit_swag(run.posterior, rank=2).sample(2)
    rows, model = runs.label_rows(6), models.tiny_bert().to(DEVICE)
    hf_bayes.prior_predictive(model, rows, SGHMCConfig(), num_draws=4, subspace="last_layer")


def evaluated(folder: Path, model: Any, test: str, *flags: str, **changes: Any) -> dict[str, Any]:
    """The results of the script for a posterior over the model, with the test file as another set, too."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    import evaluate_uncertainty

    options = {"processing_class": models.tiny_tokenizer(), **changes}
    run = trainer(folder / "a", SGHMCConfig(num_chains=2), model=model, **options)
    run.train()
    run.save_model()
    where = ["--posterior", str(folder / "a"), "--test", str(folder / test), "--output_dir", str(folder / "found")]
    with unittest.mock.patch("sys.argv", ["script", *where, "--ood", f"other={folder / test}", *flags]):
        evaluate_uncertainty.main()
    return json.loads((folder / "found/results.json").read_text())


@path
def a_script_evaluates_a_language_model(folder: Path) -> None:
    (folder / "test.txt").write_text("\n\n".join(models.TEXTS * 3))
    assert evaluated(folder, models.with_lora(from_disk(folder)), "test.txt", "--length", "16")["members"] == 2


@path
def a_script_evaluates_a_classifier(folder: Path) -> None:
    (folder / "rows.csv").write_text("\n".join(["text,label", *(f'"{text}",LABEL_1' for text in models.TEXTS)]))
    model = models.with_lora(from_disk(folder, models.tiny_bert))
    assert evaluated(folder, model, "rows.csv", train=runs.label_rows())["rows"] == {"test": 4, "other": 4}


def main(out: str, library: str | None = None) -> None:
    if library is not None:
        pretend_device.load(Path(library))
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(DEVICE)
    torch.backends.cudnn.allow_tf32 = False  # else a GPU's convolutions round their inputs to ten bits
    found: dict[str, str | None] = {}
    for name, function in PATHS.items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            try:
                function(Path(folder))
                found[name] = None
            except Exception:
                found[name] = traceback.format_exc()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
