from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss
from tokenizers.processors import TemplateProcessing

from hf_bayes.cli.evaluation.case import Target
from hf_bayes.cli.evaluation.texts import TextArguments
from hf_bayes.cli.evaluation.words import WORD_CASE
from hf_bayes.metrics import evaluation_results
from hf_bayes.models.base import BayesianModel
from tests.cli.evaluated import SENTENCES, found_by, members_of, write_rows
from tests.members.subject_models import bert_tagger
from tests.tiny_models import tiny_tokenizer

NAMES = ["O", "B-PER", "I-PER"]
WORDS = [text.split() for text in SENTENCES]
TAGS = [[NAMES[len(word) % 3] for word in row] for row in WORDS]


@pytest.fixture
def model() -> BayesianModel:
    return members_of(bert_tagger(torch.float32))


def of_words(model: BayesianModel, row: list[str]) -> tuple[Any, list[int]]:
    """Return the output for one row of words, and the place of the first token of each word."""
    tokens = [tiny_tokenizer()(word, add_special_tokens=False)["input_ids"] for word in row]
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[token for word in tokens for token in word]]))
    return output, np.cumsum([0, *map(len, tokens)])[:-1].tolist()


def test_the_first_token_of_each_word_is_scored(tmp_path: Path, model: BayesianModel) -> None:
    found = found_by(WORD_CASE, model, write_rows(tmp_path, TAGS, text=WORDS), NAMES)
    probabilities, labels = [], [NAMES.index(tag) for row in TAGS for tag in row]
    for place, row in enumerate(WORDS):
        output, first = of_words(model, row)
        probabilities.append(output.logits[0, first].double().exp().numpy())
        for part in ("test", "other")[: 1 + (place < 5)]:
            values = found[part]["epistemic"][place]
            assert values[: len(row)] == pytest.approx(output.epistemic[0, first].numpy(), abs=1e-5)
            assert np.isnan(values[len(row) :]).all()
    results = evaluation_results(found["test"], {"other": found["other"]}, WORD_CASE.figures)
    every = np.concatenate(probabilities)
    assert results["accuracy"] == accuracy_score(labels, every.argmax(1))
    assert results["macro_f1"] == f1_score(labels, every.argmax(1), average="macro", zero_division=0)
    assert results["nll"] == pytest.approx(log_loss(labels, every / every.sum(1, keepdims=True)), abs=1e-5)
    assert results["rows"] == {"test": 7, "other": 5}


def test_words_are_lists_or_text_with_blanks(tmp_path: Path, model: BayesianModel) -> None:
    lists = found_by(WORD_CASE, model, write_rows(tmp_path, TAGS, text=WORDS), NAMES)
    files = write_rows(tmp_path, list(map(" ".join, TAGS)), text=list(map(" ".join, WORDS)))
    texts = found_by(WORD_CASE, model, files, NAMES, padding="batch")
    for name, values in lists["test"].items():
        np.testing.assert_allclose(texts["test"][name], values, atol=1e-5)


def test_words_beyond_the_last_token_are_left_out(tmp_path: Path, model: BayesianModel) -> None:
    files = write_rows(tmp_path, TAGS, text=WORDS)
    found = found_by(WORD_CASE, model, files, NAMES, max_length=4)["test"]
    assert (~np.isnan(found["nll"])).sum(1).max() <= 4 < max(map(len, WORDS))


@pytest.mark.parametrize(
    ("words", "tags", "arguments", "message"),
    [
        (["a b"], ["O"], {}, r"line 1 of .*test.jsonl has 2 words and 1 tags, expected a tag for each word"),
        (["a b"], ["O X"], {}, r"line 1 of .*test.jsonl has the label 'O X', expected tags out of the 3 classes"),
        ([""], [""], {}, r"line 1 of .*test.jsonl has '' in the column 'text', expected a list of words, or text"),
        ([3], ["O"], {}, r"line 1 of .*test.jsonl has 3 in the column 'text', expected a list of words"),
        (
            [["a", "b"], [""]],
            [["O", "O"], ["O"]],
            {},
            r"^line 2 of .*test.jsonl has no word with a token: drop the row$",
        ),
        (["a"], ["O"], {"label_column": "tags"}, r"test.jsonl has no column 'tags', only text, label: name one"),
        (["a"], ["O"], {"label_column": "text"}, "columns of the text, .* and the label must differ"),
        (["a"], ["O"], {"pair_column": "b"}, "--pair_column b: a tagger reads one text, leave it out"),
    ],
)
def test_rows_that_do_not_fit_end_in_one_sentence(
    tmp_path: Path, words: list[Any], tags: list[Any], arguments: dict[str, str], message: str
) -> None:
    files = write_rows(tmp_path, tags, text=words)
    with pytest.raises(ValueError, match=message) as caught:
        WORD_CASE.read(files, tiny_tokenizer(), Target({"labels": NAMES}, None), TextArguments(**arguments))
    assert "\n" not in str(caught.value)


def test_a_row_without_room_for_a_word_names_its_tokens(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    special = [("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    files = write_rows(tmp_path, ["O O"], text=["a b"])
    target, arguments = Target({"labels": NAMES}, None), TextArguments(max_length=2)
    with pytest.raises(ValueError, match=r"^line 1 of .* no word left in the 2 tokens .* of it: raise --max_length$"):
        WORD_CASE.read(files, tokenizer, target, arguments)
