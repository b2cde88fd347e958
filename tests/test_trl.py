"""The mixin before TRL's trainer, as its docstring promises. TRL is no dependency: ``make test-slow`` installs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from hf_bayes import BayesianModelForCausalLM, BayesianTrainingArguments, SGHMCConfig
from hf_bayes.trainer import BayesianTrainerMixin
from tests.models import TEXTS, tiny_llama, tiny_tokenizer, with_lora

pytestmark = pytest.mark.slow


def test_supervised_fine_tuning_ends_in_a_posterior(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    @dataclass
    class Arguments(BayesianTrainingArguments, SFTConfig): ...

    class BayesianSFTTrainer(BayesianTrainerMixin, SFTTrainer): ...

    args = Arguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=2, learning_rate=1e-2, max_length=24,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    texts = Dataset.from_list([{"text": text} for text in TEXTS * 4])
    tiny_llama().save_pretrained(tmp_path / "base")
    base = type(tiny_llama()).from_pretrained(tmp_path / "base")
    trainer = BayesianSFTTrainer(
        with_lora(base),
        SGHMCConfig(num_chains=2, prior_std=0.1),
        args=args,
        train_dataset=texts,
        eval_dataset=texts.select(range(4)),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    expected = trainer.evaluate()["eval_nll"]
    trainer.save_model(str(tmp_path / "posterior"))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = trainer.bayesian(ids).logits
        loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior")
        assert torch.equal(loaded(ids).logits, logits)
    assert trainer.posterior.config.metrics["nll"] == expected
