from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, TextGenerationPipeline

from hf_bayes.models.attaching import attach
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.loading.base_model import fingerprint_tokenizer
from hf_bayes.pipelines.factory import BayesianTextGenerationPipeline, pipeline
from hf_bayes.posteriors.posterior import Posterior
from tests import tiny_models as models
from tests.members.subject_models import bert_tagger
from tests.pipelines.built import GREEDY, PROMPTS


def test_transformers_own_factory_knows_the_tasks(
    generate: BayesianTextGenerationPipeline, classify: Any, caplog: pytest.LogCaptureFixture
) -> None:
    transformers.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            stock = transformers.pipeline(
                "bayesian-text-generation", model=generate.model, tokenizer=generate.tokenizer
            )
            other = transformers.pipeline(
                "bayesian-text-classification", model=classify.model, tokenizer=classify.tokenizer
            )
            assert caplog.records == []
            TextGenerationPipeline(model=generate.model, tokenizer=generate.tokenizer)
            assert "is not supported" in caplog.text  # what ours do not log
    finally:
        transformers.logging.disable_propagation()
    assert stock(PROMPTS[0], **GREEDY) == generate(PROMPTS[0], **GREEDY)
    assert other(models.TEXTS[0]) == classify(models.TEXTS[0])


def test_a_model_that_is_not_bayesian_is_refused(generate: BayesianTextGenerationPipeline, classify: Any) -> None:
    tokenizer, plain = models.tiny_tokenizer(), models.tiny_llama()
    for factory in (pipeline, transformers.pipeline):
        with pytest.raises(ValueError, match="needs a BayesianModelForCausalLM, got LlamaForCausalLM"):
            factory("bayesian-text-generation", model=plain, tokenizer=tokenizer)
        with pytest.raises(ValueError, match="CausalLM, got BayesianModelForSequenceClassification"):
            factory("bayesian-text-generation", model=classify.model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="SequenceClassification, got BayesianModelForCausalLM"):
        pipeline("bayesian-text-classification", generate.model, tokenizer)


def test_wrong_arguments_are_refused(generate: BayesianTextGenerationPipeline) -> None:
    with pytest.raises(ValueError, match="unknown task 'text-generation': expected one of 'bayesian-text-generation'"):
        pipeline("text-generation", generate.model, generate.tokenizer)
    with pytest.raises(ValueError, match="give tokenizer="):
        pipeline("bayesian-text-generation", generate.model)
    for given in ({"members": 2}, {"calibrated": False}, {"check_base": False}):
        with pytest.raises(ValueError, match=f"{next(iter(given))}: the model is loaded already"):
            pipeline("bayesian-text-generation", generate.model, generate.tokenizer, **given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"num_members": 4}, "members"),
        ({"predict": "bogus"}, "prediction"),
        ({"calibrate": False}, "calibrated"),
        ({"basemodel": "llama"}, "base_model"),
        ({"sub_folder": "draft"}, "subfolder"),
        ({"local_file_only": True}, "local_files_only"),
    ],
    ids=str,
)
def test_misspelt_settings_for_loading_are_refused_at_once(given: dict[str, Any], meant: str) -> None:
    words = f"takes no {next(iter(given))}. Did you mean {meant}= of hf_bayes.pipeline, for loading a posterior?"
    with pytest.raises(ValueError, match=re.escape(words)):
        pipeline("bayesian-text-generation", "no/posterior", **given)  # before anything is loaded


def test_a_tokenizer_larger_than_the_embedding_has_no_pipeline(generate: BayesianTextGenerationPipeline) -> None:
    tokenizer = models.tiny_tokenizer()
    tokenizer.add_tokens(["<a>"])
    with pytest.raises(ValueError, match="token ids up to 320, the model's embedding has rows 0 to 319"):
        pipeline("bayesian-text-generation", generate.model, tokenizer)


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (lambda: models.tiny_llama(), "bayesian-text-generation"),
        (lambda: models.tiny_bert(), "bayesian-text-classification"),
        (lambda: bert_tagger(torch.float32), "bayesian-token-classification"),
    ],
    ids=["language model", "classifier", "tagger"],
)
def test_a_task_that_is_not_named_is_the_models(make: Callable[[], nn.Module], task: str) -> None:
    model = attach(make(), subspace="last_layer", num_members=2)
    named, found = (pipeline(each, model, models.tiny_tokenizer()) for each in (task, None))
    assert type(found) is type(named)
    assert found.task == named.task == task


def test_what_a_pipeline_is_made_of_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="needs a posterior: give model=, its directory or repository"):
        pipeline("bayesian-text-generation")
    with pytest.raises(ValueError, match=r"unknown task 'some/posterior': .* pipeline\(model=...\) finds its task"):
        pipeline("some/posterior")
    with pytest.raises(ValueError, match="or a Bayesian model, got LlamaForCausalLM"):
        pipeline(model=models.tiny_llama(), tokenizer=models.tiny_tokenizer())


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A posterior of three adapters on a base model of its own, each in a directory."""
    root = tmp_path_factory.mktemp("pipelines")
    models.tiny_llama().save_pretrained(root / "base")
    models.tiny_tokenizer().save_pretrained(root / "base")
    for index in range(3):
        adapted = models.with_lora(models.tiny_llama(), seed=index)
        adapted.peft_config["default"].base_model_name_or_path = str(root / "base")
        adapted.save_pretrained(root / f"adapter-{index}")
    ensemble = Posterior.from_adapters([root / f"adapter-{index}" for index in range(3)])
    base = {**ensemble.config.base_model, "dtype": "float32"}
    replace(ensemble, config=replace(ensemble.config, base_model=base)).save_pretrained(root / "posterior")
    return root / "posterior"


def test_a_directory_is_enough(posterior: Path) -> None:
    generate = pipeline("bayesian-text-generation", posterior)
    (record,) = generate(PROMPTS[0], **GREEDY)
    assert (generate.model.num_members, generate.model.calibrated) == (3, True)
    assert pipeline(model=posterior)(PROMPTS[0], **GREEDY) == [record]
    assert not pipeline(model=posterior, calibrated=False).model.calibrated
    model = BayesianModelForCausalLM.from_pretrained(posterior)
    assert pipeline("bayesian-text-generation", model, models.tiny_tokenizer())(PROMPTS[0], **GREEDY) == [record]
    fewer = pipeline("bayesian-text-generation", str(posterior), posterior.parent / "base", members=1)
    assert fewer(PROMPTS[0], **GREEDY)[0]["uncertainty"]["epistemic"] == pytest.approx(0.0, abs=1e-6)


def test_torch_dtype_is_dtype(posterior: Path) -> None:
    found = [
        make("bayesian-text-generation", model=str(posterior), **{name: torch.bfloat16}).model.dtype
        for make in (pipeline, transformers.pipeline)
        for name in ("dtype", "torch_dtype")
    ]
    assert found == [torch.bfloat16] * 4
    with pytest.raises(ValueError, match=r"got dtype=torch.bfloat16 and torch_dtype=float32: give dtype alone"):
        pipeline(model=posterior, dtype=torch.bfloat16, torch_dtype="float32")


def test_torch_dtype_comes_too_late_for_a_model_in_memory(generate: BayesianTextGenerationPipeline) -> None:
    with pytest.raises(ValueError, match="dtype: the model is loaded already"):
        pipeline("bayesian-text-generation", generate.model, generate.tokenizer, torch_dtype=torch.bfloat16)


def test_a_tokenizer_is_downloaded_as_its_posterior_is(posterior: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def load(place: str, **settings: Any) -> Any:
        given.update(settings, place=place)
        return models.tiny_tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    settings: dict[str, Any] = {"token": "mine", "cache_dir": str(posterior.parent), "local_files_only": True}
    assert pipeline(model=posterior, tokenizer="org/private", **settings)
    assert given == {"place": "org/private", "trust_remote_code": False, **settings}


def test_another_tokenizer_is_refused(posterior: Path) -> None:
    model = BayesianModelForCausalLM.from_pretrained(posterior)
    fingerprint = {**model.posterior.config.base_model["fingerprint"]}
    fingerprint["tokenizer"] = fingerprint_tokenizer(models.tiny_tokenizer())
    base = {**model.posterior.config.base_model, "fingerprint": fingerprint}
    model.posterior = replace(model.posterior, config=replace(model.posterior.config, base_model=base))
    assert pipeline("bayesian-text-generation", model, models.tiny_tokenizer())
    with pytest.raises(ValueError, match="is not the one the posterior was made with"):
        pipeline("bayesian-text-generation", model, models.tiny_tokenizer(["entirely other words, many of them"]))
