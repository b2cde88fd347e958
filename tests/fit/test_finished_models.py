from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, default_data_collator

from hf_bayes import BayesianModelForSequenceClassification, MAPConfig, MCDropoutConfig, SWAGConfig, fit_mc_dropout
from hf_bayes.fit.finished_models import (
    as_bayesian,
    batches_by_number,
    check_first_rows,
    check_rows_and_batch_size,
    check_sizes,
    config_for,
    labelled_batches,
    model_to_fit,
    require_rows_by_number,
)
from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.fit.training_free import fit_training_free
from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests import runs
from tests.members.subject_models import bloom
from tests.tiny_models import tiny_bert, tiny_gpt2, tiny_llama, tiny_tokenizer, with_lora


def test_a_plain_model_is_detached_and_a_bayesian_one_is_not() -> None:
    plain = tiny_bert(num_labels=1)
    with as_bayesian(plain, "last_layer", 0.5) as model:
        assert model.members.attached
    assert not model.members.attached
    with attach(plain, subspace="last_layer", noise_std=0.5) as given:
        with as_bayesian(given, "last_layer", None) as model:
            assert model is given
        assert model.members.attached
        with pytest.raises(ValueError, match=r"noise_std=1\.0 is for a plain model"), as_bayesian(given, "", 1.0):
            pass


def test_a_place_is_loaded_by_the_loader(tmp_path: Path) -> None:
    with attach(tiny_bert(), subspace="last_layer") as given:
        places = []

        def load(place: Path, *, likelihood: LikelihoodConfig | None) -> BayesianModel:
            places.append((place, likelihood))
            return given

        with as_bayesian(tmp_path, "", None, load=load) as model:
            assert model is given
        assert places == [(tmp_path, None)]


def test_a_fit_takes_configs_of_its_method_alone() -> None:
    given = SWAGConfig(rank=3)
    assert config_for("swag", given, rank=5) is given
    assert config_for("swag", None, rank=5) == SWAGConfig(rank=5)
    for other in (MAPConfig(), "swag", SWAGConfig):
        with pytest.raises(ValueError, match=f"must be of the class SWAGConfig, got {type(other).__name__}: "):
            config_for("swag", other)  # type: ignore[arg-type]


def to_fit(model: Any, subspace: str) -> AbstractContextManager[tuple[BayesianModel, str]]:
    return model_to_fit(model, subspace, None, method=SWAGConfig(), tokenizer=None)


def test_the_subspace_of_a_posterior_is_that_of_its_model(tmp_path: Path) -> None:
    fit_mc_dropout(tiny_bert(), MCDropoutConfig(targets="weight"), subspace="last_layer").save_pretrained(tmp_path)
    load = BayesianModelForSequenceClassification.from_pretrained
    with load(tmp_path, base_model=tiny_bert()) as loaded, to_fit(loaded, "all") as (found, subspace):
        assert (found, subspace) == (loaded, "last_layer")
    with to_fit(tiny_bert(), "last_layer") as (_, subspace):
        assert subspace == "last_layer"


def test_rows_come_in_the_order_of_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    def collate(rows: list[int]) -> dict[str, torch.Tensor]:
        return {"rows": torch.tensor(rows)}

    with attach(tiny_bert(), subspace="last_layer") as model:
        found = list(batches_by_number(range(6), [4, 0, 2], model=model, collate=collate, batch_size=2))
        assert [batch["rows"].tolist() for batch in found] == [[4, 0], [2]]
        assert capsys.readouterr().err == ""
        list(batches_by_number(range(6), [4], model=model, collate=collate, batch_size=2, progress="a pass"))
    assert "a pass: " in capsys.readouterr().err


def test_rows_without_numbers_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="data is a DataLoader, and fit_it makes batches of its own"):
        require_rows_by_number("fit_it", "data", DataLoader([1, 2]))  # type: ignore[arg-type]
    for rows in (iter([1]), {"train": [1]}, torch):
        with pytest.raises(ValueError, match="data must have rows that can be counted"):
            require_rows_by_number("fit_it", "data", rows)
    with pytest.raises(ValueError, match="data has 0 rows; fit_it needs some: give it data"):
        require_rows_by_number("fit_it", "data", [])
    require_rows_by_number("fit_it", "data", [1, 2])
    with pytest.raises(ValueError, match=r"batch_size must be an integer >= 1, got 2\.0"):
        check_rows_and_batch_size("fit_it", "data", [1, 2], 2.0)


def test_labels_carry_the_columns_of_the_likelihood() -> None:
    rows = [{"input_ids": [3, 4], "labels": index, "weight": 0.5 * index} for index in range(3)]
    with attach(tiny_bert(), subspace="last_layer", likelihood=Weighted()) as model:
        found = list(labelled_batches(rows, model=model, collate=None, batch_size=2))
        assert [batch["labels"].tolist() for batch in found] == [[[0, 0], [1, 0.5]], [[2, 1]]]
        assert all("weight" not in batch for batch in found)
        for rows, words in (([{"input_ids": [3], "weight": 1.0}], "no labels"), ([{"labels": 1}], "column 'weight'")):
            with pytest.raises(ValueError, match=words):
                list(labelled_batches(rows, model=model, collate=None, batch_size=2))


@pytest.mark.parametrize(
    ("given", "words"),
    [((0, None, "token"), "batch_size"), ((1, -1.0, "token"), "num_data"), ((1, None, "row"), "data_unit")],
)
def test_wrong_sizes_are_refused(given: tuple[int, float | None, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_sizes(*given)


def test_documents_that_would_mix_are_refused_by_a_fit() -> None:
    rows, collate = runs.token_rows((5, 7, 4, 9)), DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    before = torch.get_rng_state()
    with (
        attach(bloom(torch.float32), subspace="last_block") as mixing,
        attach(tiny_gpt2(), subspace="last_block") as apart,
    ):
        with pytest.raises(ValueError, match="lets packed documents see each other"):
            check_first_rows(mixing, rows, collate)
        check_first_rows(apart, rows, collate)
        check_first_rows(mixing, rows, runs.padding_collator())
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_that_need_padding_are_named() -> None:
    rows = [{"input_ids": [3] * length, "labels": 0} for length in (8, 7)]
    with attach(tiny_bert(), subspace="last_layer") as model:
        batches = batches_by_number(rows, [0, 1], model=model, collate=default_data_collator, batch_size=2)
        with pytest.raises(ValueError, match=r"unequal length .* give a collator that pads"):
            next(iter(batches))


@pytest.mark.parametrize("fit", [fit_laplace, fit_training_free])
def test_a_fit_reads_no_row_of_a_model_that_no_posterior_holds(fit: Callable[..., Any]) -> None:
    class Unread(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            raise AssertionError("a row was read")

    model = with_lora(tiny_llama(), alpha_pattern={"q_proj": 0})
    with pytest.raises(ValueError, match="alpha_pattern must be an object of module names and numbers > 0"):
        fit(model, Unread(runs.token_rows()))
    assert not any(hasattr(module, "theta") for module in model.modules())


def test_a_fit_begins_with_the_check_of_its_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.init_kwargs = {"foo": object()}
    method = SWAGConfig()
    with pytest.raises(ValueError, match="cannot be saved with the posterior"):
        model_to_fit(tiny_bert(), "last_layer", None, method=method, tokenizer=tokenizer).__enter__()
