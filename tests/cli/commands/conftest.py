from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import TEXTS, tiny_bert, tiny_llama, tiny_tokenizer, with_lora


@pytest.fixture
def llama(tmp_path: Path) -> str:
    tiny_llama().save_pretrained(tmp_path / "llama")
    tiny_tokenizer().save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


@pytest.fixture
def bert(tmp_path: Path) -> str:
    tiny_bert(num_labels=2).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


@pytest.fixture
def book(tmp_path: Path) -> str:
    (tmp_path / "book.txt").write_text("\n".join(TEXTS * 20))
    return str(tmp_path / "book.txt")


@pytest.fixture(scope="session")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A posterior of two members over a tiny language model."""
    folder = tmp_path_factory.mktemp("posterior")
    tiny_llama().save_pretrained(folder / "base")
    model = with_lora(LlamaForCausalLM.from_pretrained(folder / "base"))
    method = SGHMCConfig(num_chains=2, init_jitter=1.0)
    trainer = runs.trainer(folder / "out", method, model=model, processing_class=tiny_tokenizer())
    trainer.train()
    trainer.save_model()
    return str(folder / "out")
