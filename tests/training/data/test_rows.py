from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_bayes.core.types import Evaluation
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.objectives.data_scale import DataScale
from tests import runs
from tests.tiny_models import tiny_llama, with_lora
from tests.training.trained import Stream, full_data, relative


def mean_of(evaluations: list[Evaluation]) -> Evaluation:
    return Evaluation(*(torch.stack([evaluation[i] for evaluation in evaluations]).mean(0) for i in (0, 1)))


UNEQUAL = [8, 128, 8, 128, 8, 8, 128, 128]


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (4, 1), (1, 4), (4, 2)])
def test_mean_gradient_over_all_batches_is_the_full_gradient(tmp_path, evaluations, batch, accumulation):
    def build() -> Any:
        return with_lora(tiny_llama(dtype=torch.float64))

    rows = runs.token_rows(UNEQUAL)
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        model=build(),
        train=rows,
        collator=runs.padding_collator(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=len(rows) // (batch * accumulation),
    )
    trainer.train()
    found, expected = mean_of(evaluations), full_data(build, trainer, rows)
    # transformers' RMSNorm and rotary embedding compute in float32
    assert relative(found.log_lik, expected.log_lik) < 1e-6
    assert relative(found.grad_log_lik, expected.grad_log_lik) < 1e-6


@pytest.mark.parametrize("batch", [1, 4])
def test_normalising_by_the_terms_of_the_update_is_caught(tmp_path, evaluations, monkeypatch, batch):
    """The twin: transformers' sum of losses over sum of tokens, times N."""
    monkeypatch.setattr(DataScale, "factor", lambda self, terms: self.num_data / float(terms[0]))

    def build() -> Any:
        return with_lora(tiny_llama())

    rows = runs.token_rows([8, 128, 8, 128, 8, 8, 8, 128])  # 3 long ones: no two batches of 4 are alike
    settings = {"per_device_train_batch_size": batch, "max_steps": len(rows) // batch}
    trainer = runs.trainer(
        tmp_path, SGHMCConfig(num_chains=1), train=rows, collator=runs.padding_collator(), model=build(), **settings
    )
    trainer.train()
    assert relative(mean_of(evaluations).grad_log_lik, full_data(build, trainer, rows).grad_log_lik) > 0.02


def test_num_data_and_data_unit_scale_the_likelihood(tmp_path, evaluations):
    rows, found = runs.token_rows(8, length=5), {}
    for name, changes in {"token": {}, "sequence": {"data_unit": "sequence"}, "given": {"num_data": 64.0}}.items():
        evaluations.clear()
        trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=1), train=rows, max_steps=1, **changes)
        trainer.train()
        found[name] = trainer.rows.num_data, float(evaluations[0].log_lik)
    assert [value[0] for value in found.values()] == [32.0, 8.0, 64.0]
    assert found["sequence"][1] == pytest.approx(found["token"][1] / 4)
    assert found["given"][1] == pytest.approx(found["token"][1] * 2)


def test_workers_of_the_data_loader_change_nothing(tmp_path):
    def posterior(workers: int) -> Any:
        trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), max_steps=3, dataloader_num_workers=workers)
        trainer.train()
        return trainer.posterior.approximation

    assert runs.equal(posterior(0), posterior(1))


def test_an_order_of_rows_that_chains_do_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train_sampling_strategy='group_by_length' is refused, expected 'random'"):
        runs.trainer(tmp_path, SGHMCConfig(), train_sampling_strategy="group_by_length")


@pytest.mark.parametrize("stream", [False, True])
def test_workers_fetch_as_far_ahead_as_they_are_told(tmp_path, stream):
    rows = runs.token_rows(6)
    changes = {"train": Stream(rows), "minibatch": "shared", "num_data": 7.0} if stream else {"train": rows}
    trainer = runs.trainer(tmp_path, SGHMCConfig(), dataloader_num_workers=1, dataloader_prefetch_factor=3, **changes)
    loader = trainer.get_train_dataloader()
    assert (loader.dataset.loader if stream else loader).prefetch_factor == 3


@pytest.mark.parametrize("data", ["list", "torch", "datasets"])
def test_any_sized_data_set_can_be_trained_on(tmp_path, data):
    rows = [{**row, "comment": "not for the model"} for row in runs.token_rows(6)]

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict:
            return rows[index]

    train = {"list": tuple(rows), "torch": Rows(), "datasets": Dataset.from_list(rows)}[data]
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), train=train, max_steps=2)
    trainer.train()
    assert trainer.rows.num_data == 6 * 7


@pytest.mark.parametrize(
    ("epochs", "updates"),
    [(1, 3), (0.5, 2), (1.5, 5), (3, 9)],  # 10 rows, 4 an update: 3 updates an epoch, none of them short
)
def test_epochs_may_be_fractions(tmp_path, epochs, updates):
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        max_steps=-1,
        num_train_epochs=epochs,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    assert trainer.train().global_step == updates
    assert trainer.run.num_updates == updates
    assert len(trainer.run.draws) == 1
