"""Prediction by a distilled student."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_bayes import (
    BayesianModelForCausalLM,
    BayesianModelForSequenceClassification,
    attach,
    fit_calibration,
)
from hf_bayes.models.base import BayesianModel
from hf_bayes.pipelines.text_generation import BayesianTextGenerationPipeline
from tests.fit.distilled import TEXTS, base, distilled, ensemble, inputs_of
from tests.runs import label_rows
from tests.tiny_models import tiny_bert, tiny_tokenizer

KINDS = {"classes": BayesianModelForSequenceClassification, "tokens": BayesianModelForCausalLM}


def load(task: str, **changes) -> BayesianModel:
    options = {"base_model": base(task), "prediction": "distilled"} | changes
    return KINDS[task].from_pretrained(distilled(task), **options)


def test_a_cache_changes_nothing() -> None:
    prompts = inputs_of(TEXTS[:3])
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    with load("tokens") as model:
        cached = model.generate(**prompts, **options)
        plain = model.generate(**prompts, **options, use_cache=False)
        scored = model.score(cached.sequences, first=prompts["input_ids"].shape[1])
    assert torch.equal(cached.sequences, plain.sequences)
    for name in ("total", "aleatoric", "epistemic", "logprobs"):
        # float32: another order of sums
        torch.testing.assert_close(cached[name], plain[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cached[name], getattr(scored, name), rtol=1e-5, atol=1e-5)


def test_beams_are_scored_by_the_student() -> None:
    prompts = inputs_of(TEXTS[:2])
    with load("tokens") as model:
        out = model.generate(**prompts, max_new_tokens=4, num_beams=2, return_dict_in_generate=True, output_scores=True)
        again = model.score(out.sequences, first=prompts["input_ids"].shape[1])
    torch.testing.assert_close(out.epistemic, again.epistemic, equal_nan=True)


def test_the_pipeline_shows_uncertainties_of_each_token() -> None:
    with load("tokens") as model:
        generate = BayesianTextGenerationPipeline(model, tiny_tokenizer(padding_side="left"))
        (record,) = generate("The cell", max_new_tokens=4, do_sample=False)
        scored = generate.score("The mitochondrion is the powerhouse.")
    for found in (record, scored):
        assert "num_members" not in found
        assert all(0 <= token["epistemic"] <= token["total"] for token in found["tokens"])
    assert any(token["epistemic"] > 0 for token in record["tokens"])


def test_predictions_do_not_depend_on_the_batch() -> None:
    inputs = inputs_of(label_rows(8, seed=2))
    with load("classes") as model:
        whole = model(**inputs)
        first = model(**{name: value[:1] for name, value in inputs.items()})
    torch.testing.assert_close(whole.epistemic[:1], first.epistemic)


def test_padding_changes_no_prediction() -> None:
    inputs = inputs_of(TEXTS[:2])
    padded = {name: torch.nn.functional.pad(value, (3, 0)) for name, value in inputs.items()}
    with load("tokens") as model:
        torch.testing.assert_close(model(**inputs).epistemic, model(**padded).epistemic[:, 3:], rtol=1e-4, atol=1e-5)


def test_the_temperature_is_that_of_the_imitated_mixture() -> None:
    rows = [{"labels" if name == "label" else name: v for name, v in row.items()} for row in label_rows(80, seed=5)]
    fitted, t = fit_calibration(distilled("classes"), rows, base_model=tiny_bert()), 2.0
    config = dataclasses.replace(fitted.config, calibration=fitted.config.calibration | {"temperature": t})
    fitted = dataclasses.replace(fitted, config=config)
    inputs = inputs_of(label_rows(5, seed=6))
    options = {"base_model": tiny_bert(), "prediction": "distilled"}
    with KINDS["classes"].from_pretrained(fitted, **options) as model:
        found = model(**inputs).logits
        assert model.mixture_temperature == t
    with KINDS["classes"].from_pretrained(fitted, **options, calibrated=False) as model:
        torch.testing.assert_close(found, (model(**inputs).logits / t).log_softmax(-1))
    with pytest.raises(ValueError, match="takes the temperature of the prediction that it imitates"):
        fit_calibration(distilled("classes"), rows, base_model=tiny_bert(), prediction="distilled")


def test_the_probability_of_a_whole_text_has_no_temperature() -> None:
    fitted, t = distilled("tokens"), 2.0
    rows = [dict(row, labels=row["input_ids"]) for row in TEXTS]
    fitted = fit_calibration(fitted, rows, base_model=base("tokens"), batch_size=20)
    config = dataclasses.replace(fitted.config, calibration=fitted.config.calibration | {"temperature": t})
    fitted = dataclasses.replace(fitted, config=config)
    options = {"base_model": base("tokens"), "prediction": "distilled"}
    found = []
    for calibrated in (True, False):
        with KINDS["tokens"].from_pretrained(fitted, calibrated=calibrated, **options) as model:
            found.append(model.score(inputs_of(TEXTS[:2])["input_ids"]))
    assert torch.equal(found[0].sequence_logprob, found[1].sequence_logprob)
    assert not torch.allclose(found[0].sequence_logprob_tokenwise, found[1].sequence_logprob_tokenwise, atol=0.1)


def test_a_posterior_without_a_student_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no distilled student: call hf_bayes.distil"):
        KINDS["classes"].from_pretrained(ensemble("classes"), base_model=tiny_bert(), prediction="distilled")
    with attach(tiny_bert(), subspace="all") as model, pytest.raises(ValueError, match="no distilled student"):
        model.predict_by("distilled")


def test_a_student_has_no_members() -> None:
    with pytest.raises(ValueError, match="members=2 with prediction='distilled'"):
        load("classes", members=2)
    with load("classes") as model:
        with pytest.raises(ValueError, match="holds one network: load the posterior again"):
            model.linearise(None)
        with pytest.raises(ValueError, match="cannot predict by other members"):
            model.show(model.theta)
    with load("classes", prediction="members") as model, pytest.raises(ValueError, match="the model holds members"):
        model.predict_by("distilled")


def test_the_drawn_outputs_of_a_student_are_its_networks() -> None:
    student = load("classes")
    inputs = inputs_of(label_rows(4))
    with torch.no_grad():
        assert torch.equal(student.drawn_outputs(inputs), student.member_logits(inputs))


def test_a_student_of_other_members_is_refused() -> None:
    other = ensemble("classes", seed=1)
    config = dataclasses.replace(other.config, student=distilled("classes").config.student)
    with pytest.raises(ValueError, match="distilled from other members"):
        dataclasses.replace(other, config=config, student=distilled("classes").student)
