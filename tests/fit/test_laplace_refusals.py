"""``fit_laplace`` refuses bad input before the first pass over the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_bayes import LaplaceConfig, fit_laplace
from hf_bayes.models.attaching import attach
from tests.fit.fitted import LAST, NOISE, fit, regression
from tests.runs import label_rows, padding_collator, token_rows, trainer
from tests.tiny_models import tiny_bert, tiny_llama, with_lora


def test_weights_with_nan_are_refused() -> None:
    model, data, *_ = regression()
    model.classifier.bias.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the log-likelihood at the given weights is not finite"):
        fit(model, data, **LAST)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_data": -1.0}, "num_data must be finite and > 0"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"data_unit": "word"}, "data_unit must be one of"),
        ({"prior_mean": "initial"}, "a finished model no longer holds"),
        ({"noise_std": None}, "a regression head needs noise_std"),
    ],
)
def test_bad_arguments_are_refused_before_the_pass(changes: dict[str, Any], message: str) -> None:
    model, data, *_ = regression()
    with pytest.raises(ValueError, match=message):
        fit(model, data, **{**LAST, **changes})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataLoader(label_rows(2)),
            "data is a DataLoader, .* give data=loader.dataset .* collate=loader.coll",
        ),
        ((row for row in label_rows(2)), "data must have rows that can be .* asked for by number, got generator"),
        ({"train": label_rows(2)}, "asked for by number, got dict: .* one split"),
        (None, "asked for by number, got NoneType"),
        ([], "data has 0 rows"),
        ([{**row, "label": -100} for row in label_rows(2)], "no row of data has a likelihood term"),
        ([{**row, "label": 3} for row in label_rows(2)], r"row 0 of data has a label outside 0\.\.2"),
    ],
)
def test_data_that_are_no_rows_are_refused_by_their_name(data: Any, message: str) -> None:
    model, rows = tiny_bert(num_labels=3, hidden_size=4), label_rows(3)
    with pytest.raises(ValueError, match=message):
        fit(model, data, subspace="last_layer")
    if data is not None:
        with pytest.raises(ValueError, match=message.replace("data", "heldout", 1).replace("data=", "heldout=")):
            fit(model, rows, heldout=data, fit_prior="heldout", subspace="last_layer")


TOO_LARGE: list[tuple[str, str, dict[str, Any], str]] = [
    ("lm", "MAX_FULL", {"structure": "full"}, r"a matrix of \d+ x \d+; the limit is 20"),
    ("lm", "MAX_HESSIAN", {"estimator": "hessian"}, r"for each of \d+ elements; the limit is 20"),
    # rows of 4 and 6 tokens, in this order
    ("lm", "MAX_VJPS", {"num_samples": None}, "319 backward passes for each of 5 terms of a row, 1595 > 20"),
    ("classes", "MAX_VJPS", {"num_samples": None}, "29 backward passes for each of 1 terms of a row, 29 > 20"),
    ("regression", "MAX_VJPS", {"num_samples": None}, "30 backward passes for each of 1 terms of a row, 30 > 20"),
]


def too_large(task: str) -> dict[str, Any]:
    """A model, and rows of which the last is the longest."""
    if task == "lm":
        return {"model": with_lora(tiny_llama()), "train": token_rows([4, 4, 4, 6]), "collator": padding_collator()}
    rows = label_rows(4)
    if task == "regression":
        rows = [{**row, "label": [0.5] * 30} for row in rows]
    kind = {"problem_type": "regression"} if task == "regression" else {}
    model = tiny_bert(num_labels=30, hidden_size=4, **kind)
    noise = {"noise_std": NOISE} if task == "regression" else {}
    return {"model": model, "train": rows, "subspace": "last_layer", **noise}


class Watched(TrainerCallback):
    num_steps = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.num_steps += 1


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize(("task", "limit", "changes", "message"), TOO_LARGE)
def test_too_large_a_pass_is_refused_before_the_first_step(
    task: str, limit: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"hf_bayes.methods.laplace.supported.{limit}", 20)
    watched = Watched()
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, LaplaceConfig(**changes), callbacks=[watched], **too_large(task)).train()
    assert watched.num_steps == 0
    trainer(tmp_path, LaplaceConfig(), callbacks=[watched], max_steps=1, **too_large(task)).train()
    assert watched.num_steps == 1  # the twin: it does see steps


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize(("task", "limit", "changes", "message"), TOO_LARGE)
def test_too_large_a_pass_is_refused_before_the_first_batch(
    task: str, limit: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"hf_bayes.methods.laplace.supported.{limit}", 20)
    given = too_large(task)
    model, data, collator = given.pop("model"), given.pop("train"), given.pop("collator", None)
    calls: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match=message):
        fit(model, data, batch_size=1, collate=collator, **changes, **given)
    assert calls == []
    fit(model, data, batch_size=1, collate=collator, **given)
    assert calls  # the twin: forwards are seen


def test_held_out_halves_without_terms_are_refused() -> None:
    model, data = with_lora(tiny_bert()), label_rows(4)
    odd = [{**row, "label": -100} if number % 2 else row for number, row in enumerate(data)]
    for rows, half in ((odd, "odd"), (odd[1:], "even")):
        with pytest.raises(ValueError, match=f"the {half} rows of heldout hold no likelihood term, .* shuffle them"):
            fit(model, data, heldout=rows, fit_prior="heldout", prior_scope="tensor")
    fit(model, data, heldout=odd, fit_prior="heldout", check_gradient=False)  # one precision: all rows determine it


def test_held_out_rows_that_fit_no_temperature_are_refused() -> None:
    model, data, *_ = regression()
    with pytest.raises(ValueError, match="a temperature of the mixture, and the labels are numbers: leave heldout out"):
        fit(model, data, heldout=data, **LAST)
    model, data = tiny_bert(num_labels=3), label_rows(50)
    calls: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match="held-out rows with at least 50 labels, got 49"):
        fit(model, data[:4], heldout=data[1:], subspace="last_layer", check_gradient=False)
    assert calls == []  # before the pass
    with pytest.raises(ValueError, match="held-out rows with at least 50 labels, got 1: give more rows, or leave the"):
        fit(model, data[:4], heldout=data[:1], subspace="last_layer")


def test_a_finished_pass_is_not_lost_without_a_temperature() -> None:
    model, data = tiny_bert(num_labels=3), label_rows(60)
    impossible = -torch.inf  # the logit of the last class, whose labels have probability 0

    def without_last(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits + torch.tensor([0.0, 0.0, impossible])
        return output

    rows = [row for row in data if row["label"] != 2]
    with model.register_forward_hook(without_last), pytest.warns(UserWarning, match="are not calibrated: .* finite"):
        posterior = fit(model, rows, heldout=data, subspace="last_layer", structure="diagonal", check_gradient=False)
    assert posterior.config.calibration == {}


def test_noise_beside_a_model_that_has_its_own_is_refused() -> None:
    model, data, *_ = regression()
    words = rf"noise_std=2.0 is for a plain model: .* own \({NOISE}\)"
    with attach(model, subspace="last_layer", noise_std=NOISE) as bayesian, pytest.raises(ValueError, match=words):
        fit(bayesian, data, noise_std=2.0)
    with pytest.raises(ValueError, match=r"a regression head needs noise_std > 0, .* got 0"):
        fit(model, data, noise_std=0.0, fit_noise=True, subspace="last_layer")


def test_another_method_is_refused() -> None:
    from hf_bayes import SGHMCConfig

    model, data, *_ = regression()
    with pytest.raises(ValueError, match="method must be of the class LaplaceConfig, got SGHMCConfig"):
        fit_laplace(model, data, SGHMCConfig(), subspace="last_layer", noise_std=NOISE)
    with pytest.raises(ValueError, match="method must be of the class LaplaceConfig, got str"):
        fit_laplace(model, data, "laplace", subspace="last_layer", noise_std=NOISE)  # type: ignore[arg-type]
