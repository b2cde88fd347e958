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
from hf_bayes.core.layout import select
from hf_bayes.models.attaching import attach
from hf_bayes.models.language.packing import refuse_mixed_documents
from tests import runs
from tests.members.reference import mixture, relative_error, scattered, separate_logits
from tests.members.subject_models import bamba, bloom, deepseek_v3, gemma3, gpt2, lfm2, llama, mixtral, opt
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


def check(model: nn.Module, lengths: tuple[int, ...], subspace: str = "last_block") -> None:
    theta = scattered(model, select(model, subspace), 2).float()
    with attach(model, theta, subspace=subspace) as bayesian:
        refuse_mixed_documents(bayesian, theta, DataCollatorWithFlattening()(runs.token_rows(lengths)))


MIXING = [
    (lfm2, torch.float32, (1000,) * 4),
    (lfm2, torch.bfloat16, LENGTHS),
    (lfm2, torch.bfloat16, (40,) * 3),
    (bamba, torch.float32, (1000,) * 4),
    (bamba, torch.bfloat16, (60, 60)),
    (opt, torch.float32, LENGTHS),
]


@pytest.mark.parametrize(("make", "dtype", "lengths"), MIXING)
def test_mixed_documents_are_found_whatever_their_length(make: Any, dtype: torch.dtype, lengths: Any) -> None:
    with pytest.raises(ValueError, match="lets packed documents see each other") as error:
        check(make(dtype), lengths)
    assert "attn_implementation" not in str(error.value)  # these models use it, or masks like it: it is no remedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [llama(), gpt2, gemma3, mixtral, deepseek_v3])
def test_models_that_keep_documents_apart_are_accepted(make: Any, dtype: torch.dtype) -> None:
    for lengths in ((2, 2), LENGTHS, (1, 50, 50)):
        check(make(dtype), lengths, r"layers\.1\.self_attn\..*proj" if make in (mixtral, deepseek_v3) else "last_layer")


def test_a_few_tokens_that_change_their_experts_are_no_mixing() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    calls = []

    def move_one_token(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(module)
        moved = output.clone()
        moved[:, 5] *= 1 + len(calls)  # the first token of the second document
        return moved

    handle = model.model.layers[0].mlp.register_forward_hook(move_one_token)
    check(model, LENGTHS)
    handle.remove()
    assert len(calls) == 2


@pytest.mark.parametrize("size", [None, 4, 2, 1])
def test_forward_keeps_documents_apart_in_any_number_of_passes(size: int | None) -> None:
    model = with_lora(tiny_llama(dtype=torch.float64))
    theta = scattered(model, select(model), 4)
    ids = torch.randint(3, 320, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(5), *range(7)]])
    alone = mixture(separate_logits(model, select(model), theta, {"input_ids": ids[:, 5:]}))
    with attach(model, theta) as bayesian, torch.no_grad():
        bayesian.members_per_pass = size
        packed = bayesian(input_ids=ids, position_ids=positions)
        whole = bayesian(input_ids=ids, position_ids=torch.arange(12)[None])  # no document ends in this row
    assert relative_error(packed.logits[:, 5:], alone) < 1e-9
    assert packed.past_key_values is None
    assert (whole.past_key_values is None) == (size in (1, 2))
