from __future__ import annotations

import json
from pathlib import Path

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.arguments import DataArguments, ModelArguments
from hf_bayes.cli.classifier import LabelArguments, classifier
from tests.tiny_models import TEXTS, tiny_bert, tiny_tokenizer


def test_the_head_has_the_classes_of_the_data(tmp_path: Path) -> None:
    tiny_bert(num_labels=3).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    rows = [{"text": TEXTS[i % 4][: 10 + i], "parity": ("even", "odd", "none")[i % 3]} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = ModelArguments(str(tmp_path / "bert"), lora_rank=2)
    data = DataArguments(str(tmp_path / "rows.jsonl"), validation_fraction=0)
    args = BayesianTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    found = classifier(model, data, LabelArguments(label_column="parity"), args)
    assert found.model.config.id2label == {0: "even", 1: "none", 2: "odd"}
    assert found.eval_dataset is None
    batches = [found.data_collator([found.train_dataset[i]]) for i in (0, 11)]
    assert batches[0]["input_ids"].shape == batches[1]["input_ids"].shape  # padded to one length
