"""Several documents in a row, as collators that pack give them: TRL's, and transformers' DataCollatorWithFlattening."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from hf_bayes import SGHMCConfig
from tests import runs
from tests.members.subject_models import bloom, lfm2
from tests.tiny_models import tiny_gpt2, tiny_llama, with_lora

LENGTHS = (5, 7, 4, 9)


def flattened(folder: Path, model: nn.Module, **changes: Any) -> Any:
    collator, rows = DataCollatorWithFlattening(return_flash_attn_kwargs=True), runs.token_rows(LENGTHS)
    changes = {"minibatch": "shared", "remove_unused_columns": False} | changes
    method = SGHMCConfig(num_chains=changes.pop("chains", 2))
    return runs.trainer(folder, method, model=model, train=rows, collator=collator, **changes)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_packed_documents_have_the_likelihood_of_single_ones(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    trainer = flattened(tmp_path, with_lora(make()))
    theta = torch.randn(3, trainer.bayesian.layout.dim) * 0.1
    batch = trainer.data_collator(runs.token_rows(LENGTHS))
    packed = trainer.bayesian(**batch, theta=theta, folded=False)
    rows = ({name: torch.tensor([values]) for name, values in row.items()} for row in runs.token_rows(LENGTHS))
    single = [trainer.bayesian(**row, theta=theta, folded=False) for row in rows]
    assert trainer.rows.num_data == sum(length - 1 for length in LENGTHS)
    torch.testing.assert_close(packed.loss, sum(one.loss for one in single))
    assert packed.num_terms.tolist() == [int(trainer.rows.num_data)] * 3


@pytest.mark.parametrize("chains", [1, 2])
def test_training_on_packed_rows_runs(tmp_path: Path, chains: int) -> None:
    minibatch = "shared" if chains > 1 else "independent"
    flattened(tmp_path, with_lora(tiny_llama()), chains=chains, minibatch=minibatch).train()


@pytest.mark.parametrize(("make", "size"), [(lfm2, 1), (lfm2, 2), (bloom, 2)], ids=["lfm2-1", "lfm2-2", "bloom-2"])
def test_a_model_that_mixes_packed_documents_is_refused(tmp_path: Path, make: Any, size: int) -> None:
    model = make(torch.float32)
    trainer = flattened(tmp_path, model, subspace="last_block", per_device_train_batch_size=size)
    with pytest.raises(ValueError, match=rf"{type(model).__name__} with attention '.*' lets packed documents see each"):
        trainer.train()
