from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from hf_bayes.core.layout import select
from hf_bayes.models.attaching import attach
from hf_bayes.pipelines.factory import pipeline
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.mixture_density import MixtureDensity
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests import tiny_models as models
from tests.members.reference import scattered
from tests.pipelines.built import PARTS, approximately


def test_classes_have_the_probabilities_of_the_mixture(classify: Any) -> None:
    records = classify(models.TEXTS[0], top_k=None)
    inputs = classify.tokenizer(models.TEXTS[0], return_tensors="pt")
    output = classify.model(**inputs)
    members = classify.model.member_logits(dict(inputs)).double().softmax(-1).mean(0)[0]
    found = {record["label"]: record["score"] for record in records}
    # 1e-6: softmax of log-probabilities in float32
    assert found == {f"LABEL_{index}": pytest.approx(p, abs=1e-6) for index, p in enumerate(members.tolist())}
    for record in records:
        assert record["uncertainty"] == {part: getattr(output, part).item() for part in PARTS}
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_classification_returns_the_shapes_of_transformers(classify: Any) -> None:
    (single,) = classify(models.TEXTS[0])
    assert list(single) == ["label", "score", "uncertainty"]
    assert classify(models.TEXTS[0], top_k=1) == [single]
    several = classify(list(models.TEXTS), batch_size=4)
    assert several == approximately([classify(text)[0] for text in models.TEXTS])
    assert len({record["uncertainty"]["epistemic"] for record in several}) == len(models.TEXTS)


def test_a_regression_head_is_not_squashed() -> None:
    model = attach(models.with_lora(models.tiny_bert(num_labels=1)), num_members=2, noise_std=1.0)
    model.config.problem_type = None  # as in most checkpoints; transformers takes the output for a logit then
    regress = pipeline("bayesian-text-classification", model, models.tiny_tokenizer())
    (record,) = regress(models.TEXTS[0])
    expected = model(**regress.tokenizer(models.TEXTS[0], return_tensors="pt")).logits.item()
    uncertainty = {"predictive_std": pytest.approx(1.0), "epistemic_std": 0.0}  # the members are alike
    assert record == {"label": "LABEL_0", "score": pytest.approx(expected, abs=1e-6), "uncertainty": uncertainty}


def test_each_output_of_a_regression_has_its_own_deviations() -> None:
    plain = models.tiny_bert(num_labels=2, problem_type="regression")
    plain.config.label2id = {}  # as checkpoints have it that name outputs by id2label alone
    model = attach(plain, scattered(plain, select(plain, "last_layer")), subspace="last_layer", noise_std=0.5).eval()
    regress = pipeline("bayesian-text-classification", model, models.tiny_tokenizer())
    records = {record["label"]: record for record in regress(models.TEXTS[0], top_k=None)}
    with torch.no_grad():
        output = model(**regress.tokenizer(models.TEXTS[0], return_tensors="pt"))
    for index in range(2):
        record = records[f"LABEL_{index}"]
        assert record["score"] == pytest.approx(output.logits[0, index].item(), abs=1e-6)
        assert record["uncertainty"]["predictive_std"] == pytest.approx(output.predictive_std[0, index].item())
        assert record["uncertainty"]["epistemic_std"] == pytest.approx(output.epistemic_std[0, index].item())
    assert records["LABEL_0"]["uncertainty"] != records["LABEL_1"]["uncertainty"]


@pytest.mark.parametrize(
    ("head", "function", "message"),
    [
        ({}, "sigmoid", "'sigmoid' has no meaning for a Categorical likelihood: expected 'softmax' or 'none'"),
        ({"problem_type": "multi_label_classification"}, "softmax", "Bernoulli likelihood: expected 'sigmoid' or"),
        ({"num_labels": 1, "noise_std": 1.0}, "SIGMOID", "Normal likelihood: expected 'none'"),
    ],
)
def test_functions_without_a_posterior_quantity_are_refused(head: dict[str, Any], function: str, message: str) -> None:
    noise_std, config = head.get("noise_std"), {key: value for key, value in head.items() if key != "noise_std"}
    model = attach(models.with_lora(models.tiny_bert(**config)), num_members=2, noise_std=noise_std)
    texts = pipeline("bayesian-text-classification", model, models.tiny_tokenizer())
    with pytest.raises(ValueError, match=message):
        texts(models.TEXTS[0], function_to_apply=function)
    assert texts(models.TEXTS[0], function_to_apply="NONE")


def test_the_logarithms_of_the_mixture_can_be_had(classify: Any) -> None:
    found = {record["label"]: record["score"] for record in classify(models.TEXTS[0], top_k=None)}
    logs = classify(models.TEXTS[0], top_k=None, function_to_apply="none")
    # 1e-6: softmax of log-probabilities in float32
    assert {r["label"]: math.exp(r["score"]) for r in logs} == pytest.approx(found, abs=1e-6)


def records_under(likelihood: LikelihoodConfig, num_outputs: int, **config: Any) -> tuple[Any, Any, Any]:
    """Return the records of a text under a likelihood, the output of the model, and the pipeline."""
    plain = models.tiny_bert(num_labels=num_outputs, **config)
    theta = scattered(plain, select(plain, "last_layer"))
    model = attach(plain, theta, subspace="last_layer", likelihood=likelihood).eval()
    read = pipeline("bayesian-text-classification", model, models.tiny_tokenizer())
    with torch.no_grad():
        output = model(**read.tokenizer(models.TEXTS[0], return_tensors="pt"))
    return read(models.TEXTS[0], top_k=None), output, read


@pytest.mark.parametrize(
    ("likelihood", "num_outputs", "names"),
    [
        (Poisson(num_counts=2), 2, ["lakes", "rivers"]),
        (Heteroscedastic(), 2, ["LABEL_0"]),
        (MixtureDensity(2, num_numbers=3), 14, ["LABEL_0", "LABEL_1", "LABEL_2"]),
    ],
)
def test_numbers_of_a_likelihood_have_three_deviations(
    likelihood: LikelihoodConfig, num_outputs: int, names: list[str]
) -> None:
    given = {0: "lakes", 1: "rivers"} if num_outputs == 2 else {number: str(number) for number in range(num_outputs)}
    records, output, read = records_under(likelihood, num_outputs, id2label=given)
    assert sorted(record["label"] for record in records) == names
    for record in records:
        index = names.index(record["label"])
        assert record["score"] == pytest.approx(output.logits[0, index].item(), abs=1e-6)
        parts = ("predictive_std", "aleatoric_std", "epistemic_std")
        assert record["uncertainty"] == {part: getattr(output, part)[0, index].item() for part in parts}
    assert read.model.config.id2label == given


def test_classes_of_a_likelihood_have_probabilities() -> None:
    records, output, read = records_under(Ordinal(num_classes=4), 3)
    probabilities = output.logits[0].exp().tolist()
    found = {record["label"]: record["score"] for record in records}
    assert found == {f"LABEL_{index}": pytest.approx(p, abs=1e-6) for index, p in enumerate(probabilities)}
    assert set(records[0]["uncertainty"]) == set(PARTS)
    with pytest.raises(ValueError, match="abstain= is for classes of a head"):
        read(models.TEXTS[0], abstain=True)


def test_weights_of_rows_do_not_change_a_record() -> None:
    weighted, _, _ = records_under(Weighted(), 3)
    plain = models.tiny_bert(num_labels=3)
    theta = scattered(plain, select(plain, "last_layer"))
    model = attach(plain, theta, subspace="last_layer").eval()
    read = pipeline("bayesian-text-classification", model, models.tiny_tokenizer())
    assert weighted == read(models.TEXTS[0], top_k=None)


def test_a_reward_is_no_record() -> None:
    with pytest.raises(ValueError, match="the likelihood here is bradley_terry: a reward is no probability"):
        records_under(BradleyTerry(), 1)
