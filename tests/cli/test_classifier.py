from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.arguments import DataArguments, ModelArguments
from hf_bayes.cli.classifier import LabelArguments, classifier
from tests.tiny_models import TEXTS, tiny_bert, tiny_tokenizer


def parts(folder: Path, base: Any, **model: Any) -> tuple[Any, ...]:
    """Return the arguments of ``classifier`` for this base model and rows of three classes."""
    base.save_pretrained(folder / "bert")
    tiny_tokenizer().save_pretrained(folder / "bert")
    rows = [{"text": TEXTS[i % 4][: 10 + i], "parity": ("even", "odd", "none")[i % 3]} for i in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataArguments(str(folder / "rows.jsonl"), validation_fraction=0)
    args = BayesianTrainingArguments(str(folder / "out"), use_cpu=True)
    return ModelArguments(str(folder / "bert"), **model), data, LabelArguments(label_column="parity"), args


def masked_lm() -> BertForMaskedLM:
    """A base model without the pooler that a classifier needs."""
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    own = tiny_bert().config.to_dict()
    return BertForMaskedLM(BertConfig(**{name: own[name] for name in fields}))


def test_the_head_has_the_classes_of_the_data(tmp_path: Path) -> None:
    found = classifier(*parts(tmp_path, tiny_bert(num_labels=2), lora_rank=2))
    assert found.model.config.id2label == {0: "even", 1: "none", 2: "odd"}
    assert found.eval_dataset is None
    batches = [found.data_collator([found.train_dataset[i]]) for i in (0, 11)]
    assert batches[0]["input_ids"].shape == batches[1]["input_ids"].shape  # padded to one length


def test_texts_are_cut_at_the_model_s_context(tmp_path: Path) -> None:
    """The tokenizer of the base model names no limit."""
    given = parts(tmp_path, tiny_bert(max_position_embeddings=8), lora_rank=2)
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": "a chain " * i, "parity": ("even", "odd")[i % 2]}) for i in range(1, 9))
    )
    found = classifier(*given)
    assert max(map(len, found.train_dataset["input_ids"])) == 8
    # the saved tokenizer cuts as that of the base model
    assert found.processing_class.model_max_length == tiny_tokenizer().model_max_length
    assert found.processing_class.backend_tokenizer.truncation is None
    given[2].max_length = 12
    with pytest.raises(ValueError, match=r"line \d of .*rows.jsonl has \d+ tokens, more than the model's context of 8"):
        classifier(*given)


def test_the_split_of_a_run_keeps_each_class(tmp_path: Path) -> None:
    model, data, labels, args = parts(tmp_path, tiny_bert(), lora_rank=2)
    rows = [{"text": TEXTS[0], "parity": f"class {i % 8}"} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data.validation_fraction = 0.5
    found = classifier(model, data, labels, args)
    assert found.model.config.num_labels == len(set(found.train_dataset["labels"])) == 8


def test_classes_that_the_model_predicts_keep_its_order(tmp_path: Path) -> None:
    base = tiny_bert(num_labels=3)
    base.config.id2label = {0: "odd", 1: "even", 2: "none"}
    base.config.label2id = {"odd": 0, "even": 1, "none": 2}
    found = classifier(*parts(tmp_path, base, lora_rank=2))
    assert found.model.config.id2label == base.config.id2label
    assert found.train_dataset["labels"][:3] == [1, 0, 2]  # even, odd, none


def test_other_classes_on_a_trained_head_are_named(tmp_path: Path) -> None:
    base = tiny_bert(num_labels=3)
    base.config.id2label = {0: "a", 1: "b", 2: "c"}
    base.config.label2id = {"a": 0, "b": 1, "c": 2}
    given = parts(tmp_path, base, lora_rank=2)
    with pytest.warns(UserWarning, match=r"predicts 3 classes \(a, b, c\).*other names \(even, none, odd\)"):
        assert classifier(*given).model.config.id2label == {0: "even", 1: "none", 2: "odd"}


@pytest.mark.filterwarnings("error:the model predicts")
def test_names_that_nobody_gave_are_no_classes(tmp_path: Path) -> None:
    given = parts(tmp_path, tiny_bert(num_labels=3), lora_rank=2)
    assert given[0].class_names() is None  # LABEL_0 and so on
    assert classifier(*given).model.config.id2label == {0: "even", 1: "none", 2: "odd"}


def test_all_parameters_that_are_new_are_learnt(tmp_path: Path) -> None:
    """Frozen ones would be random, and the posterior would not hold them."""
    found = classifier(*parts(tmp_path, masked_lm(), lora_rank=2))
    learnt = {name for name, parameter in found.model.named_parameters() if parameter.requires_grad}
    for module in ("classifier", "bert.pooler.dense"):
        assert f"base_model.model.{module}.modules_to_save.default.weight" in learnt


def test_new_parameters_that_stay_frozen_are_refused(tmp_path: Path) -> None:
    given = parts(tmp_path, masked_lm(), lora_rank=0)
    with pytest.raises(ValueError, match=r"no weights for bert.pooler.dense.bias, bert.pooler.dense.weight, which"):
        classifier(*given, subspace="last_layer")
    assert classifier(*given, subspace="classifier|pooler").train_dataset.num_rows == 12
