from __future__ import annotations

import itertools

import pytest
from transformers import DataCollatorWithFlattening, default_data_collator

from hf_bayes.objectives.likelihood_terms import count_terms
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood, Normal
from hf_bayes.uncertainty.several_labels import Bernoulli
from tests import runs


def test_language_model_terms_are_loss_tokens_after_the_shift():
    rows = runs.token_rows([3, 8, 5])
    rows[1]["labels"] = [-100, -100, -100, *rows[1]["labels"][3:]]
    # 2 + 5 + 4: the first token of a row is predicted by none, nor is a masked one
    assert count_terms(rows, runs.padding_collator(), Categorical(), shift=True, progress=False) == (11, 5)


def test_left_padding_is_no_context_of_a_first_token():
    rows = runs.token_rows([3, 8, 5])
    for side, size in itertools.product(("left", "right"), (1, 3)):
        collate = runs.padding_collator(side)
        found = count_terms(rows, collate, Categorical(), shift=True, progress=False, batch_size=size)
        assert found == (2 + 7 + 4, 7)


def test_packed_rows_are_refused_where_single_rows_matter():
    rows = [{k: v for k, v in row.items() if k != "attention_mask"} for row in runs.token_rows([3, 8, 5])]
    options = {"shift": True, "progress": False}
    packed = DataCollatorWithFlattening()
    assert count_terms(rows, packed, Categorical(), **options).total == 2 + 7 + 4
    with pytest.raises(ValueError, match=r"made 1 rows of 3 of train_dataset, and chains have their own"):
        count_terms(rows, packed, Categorical(), by_row="chains have their own", **options)
    alone = count_terms(rows, packed, Categorical(), batch_size=1, by_row="chains have their own", **options)
    assert alone == (2 + 7 + 4, 7)


@pytest.mark.parametrize("shift", [True, False])
def test_a_refusal_names_the_shift_only_where_there_is_one(shift: bool) -> None:
    rows = [{"input_ids": [5, 6], "labels": [-100, -100]}] * 4
    words = "all labels are -100 after the causal shift" if shift else "all labels are -100"
    with pytest.raises(ValueError, match=rf"a likelihood term \({words}\): check labels"):
        count_terms(rows, default_data_collator, Categorical(), shift=shift, progress=False)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Normal(1.0)])
def test_labels_without_columns_are_counted_by_row(likelihood: Likelihood) -> None:
    # so that the check of shapes against the logits refuses them in words
    rows = [{"x": [0.0], "labels": 1}] * 5
    assert count_terms(rows, default_data_collator, likelihood, shift=False, num_outputs=3, progress=False) == (5, 1)


def test_terms_of_a_classifier_are_its_examples():
    rows = runs.label_rows(130)
    found = count_terms(rows, default_data_collator, Categorical(), shift=False, num_outputs=3, progress=False)
    assert found == (130, 1)
    rows = [{"x": [0.0], "labels": [0.0, 1.0]}] * 5
    for likelihood in (Bernoulli(), Normal(1.0)):
        assert count_terms(rows, default_data_collator, likelihood, shift=False, progress=False) == (5, 1)


def test_rows_without_labels_are_refused_with_what_to_give():
    advice = r"DataCollatorForLanguageModeling\(tokenizer, mlm=False\) as data_collator= .* add a column labels"
    with pytest.raises(ValueError, match=rf"no labels \(keys \['input_ids'\]\).*{advice}"):
        count_terms([{"input_ids": [1, 2]}], default_data_collator, Categorical(), shift=True)


@pytest.mark.parametrize(("column", "named"), [({"intent": 1}, "intent"), ({}, "its name")], ids=["known", "unknown"])
def test_labels_under_another_name_are_to_be_renamed(column: dict[str, int], named: str) -> None:
    rows = [{"input_ids": [5, 6], **column}] * 4
    with pytest.raises(ValueError, match=rf"gives no labels .*data.rename_column\(\"{named}\", \"labels\"\)$"):
        count_terms(rows, default_data_collator, Categorical(), shift=False, progress=False)
