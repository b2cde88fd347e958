from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets.utils.logging import disable_progress_bar

from hf_bayes.models.attaching import attach
from scripts.reproduce import last_word
from scripts.reproduce.last_word import Settings, last_attention
from scripts.reproduce.last_word_scores import score
from scripts.reproduce.last_word_statements import Statement, code_lines, rot13, shuffled, statements
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer

SENTENCES = "The first of these is not a statement! A model is asked for the last word of this one here. Nor is this."


@pytest.fixture
def base(tmp_path: Path) -> Path:
    disable_progress_bar()
    tiny_llama().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_statements_are_sentences_without_their_last_word() -> None:
    (found,) = statements([SENTENCES], 9)
    assert found == Statement("A model is asked for the last word of this one", "here")
    assert rot13(found).last == "urer"
    other = shuffled(found, 0)
    assert (other.last, sorted(other.prompt.split())) == (found.last, sorted(found.prompt.split()))
    assert other.prompt != found.prompt
    assert code_lines(["x = 1\nif a and b or c and d or e:"], 9)[0].last == "e:"
    assert len(statements([SENTENCES] * 40, 7)) == 7


def test_scores_are_of_the_last_words_first_token(base: Path) -> None:
    asked = [Statement("one two three four", "five"), Statement("a much longer line with many more words", "end")]
    tokenizer, model = tiny_tokenizer(), last_attention(base)
    expected = []
    for one in asked:
        ids = torch.tensor([tokenizer(one.prompt)["input_ids"]])
        (target, *_) = tokenizer(" " + one.last)["input_ids"]
        log_probs = model(ids).logits[0, -1].log_softmax(0)
        expected.append((-log_probs[target].item(), -(log_probs.exp() * log_probs).sum().item()))
    with attach(model) as bayesian:
        found = score(bayesian, tokenizer, asked)
    assert found["nll"] == pytest.approx([nll for nll, _ in expected], rel=1e-4)
    assert found["total"] == pytest.approx([total for _, total in expected], rel=1e-4)


def test_only_the_last_attention_layer_is_random(base: Path) -> None:
    names = [name for name, value in last_attention(base).named_parameters() if value.requires_grad]
    last = len(last_attention(base).model.layers) - 1
    assert names == [f"model.layers.{last}.self_attn.{kind}_proj.weight" for kind in "qkvo"]


def test_a_small_run_fills_the_tables_and_figure(monkeypatch, tmp_path: Path, base: Path) -> None:
    texts = [*TEXTS, SENTENCES] * 8
    code = ["if a and b or c and d or e:\n    x = a + b + c + d\n" * 3]
    monkeypatch.setattr(
        last_word, "corpora", lambda: {**dict.fromkeys(("finetune", "validation", "test"), texts), "code": code}
    )
    settings = Settings(
        updates=2, members=2, batch_size=2, length=16, statements=4, rates=(0.1,), prior_stds=(0.01,), searched=2,
        validation=4, num_seeds=2,
    )  # fmt: skip
    record = last_word.run(settings, base)
    assert set(last_word.blocks(record)) == {"table", "others", "diagnostics", "search"}
    assert [one["mean"]["test"]["epistemic"] > 0 for one in record["lines"]["parallel SGHMC"]] == [True, True]
    assert record["lines"]["SGD"][0]["mean"]["test"]["epistemic"] == 0
    last_word.figures(record, tmp_path)
    assert (tmp_path / "last_word.png").exists()
