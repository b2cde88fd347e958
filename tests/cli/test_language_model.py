from __future__ import annotations

from pathlib import Path

import pytest

from hf_bayes import BayesianTrainingArguments
from hf_bayes.cli.arguments import DataArguments, ModelArguments
from hf_bayes.cli.language_model import WindowArguments, language_model
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer


def test_windows_overlap_by_half_and_fit_the_model(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "llama")
    tiny_tokenizer().save_pretrained(tmp_path / "llama")
    (tmp_path / "book.txt").write_text("\n".join(TEXTS * 20))
    model, data = ModelArguments(str(tmp_path / "llama"), lora_rank=2), DataArguments(str(tmp_path / "book.txt"))
    args = BayesianTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    found = language_model(model, data, WindowArguments(window=32), args)
    first, second = found.train_dataset[0], found.train_dataset[1]
    assert first["input_ids"][16:] == second["input_ids"][:16]
    assert len(found.eval_dataset) > 0
    assert sum(parameter.requires_grad for parameter in found.model.parameters()) == 8  # A and B of two layers, twice
    with pytest.raises(ValueError, match="window=256 is longer than the model's longest context, 128 tokens"):
        language_model(model, data, WindowArguments(), args)
