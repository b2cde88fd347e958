from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding, default_data_collator

from hf_bayes import EnsembleConfig, LaplaceConfig, fit_laplace
from hf_bayes.models.attaching import attach
from hf_bayes.training.data.heldout_rows import HeldOutData
from hf_bayes.training.trainer_host import TrainerHost
from tests import tiny_models as models
from tests.runs import label_rows, trainer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "fits by the rows of eval_dataset, got None: give eval_dataset="),
        ({"test": label_rows(2)}, r"none of its data sets \(test\) is named 'heldout'"),
        (label_rows(1), "needs at least 2, got 1"),
        ([{**row, "label": 3} for row in label_rows(2)], r"row 0 of eval_dataset has a label outside 0\.\.2"),
    ],
)
def test_a_trainer_without_held_out_rows_refuses_before_training(given: Any, message: str, tmp_path: Path) -> None:
    model = models.tiny_bert(num_labels=3, hidden_size=4)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, LaplaceConfig(fit_prior="heldout"), model=model, train=label_rows(4), eval_dataset=given,
                subspace="last_layer")  # fmt: skip


LONG = {**label_rows(1, length=40)[0]}


@pytest.mark.parametrize("name", ["", "far"])
@pytest.mark.parametrize(("wrong", "message"), [({"label": 3}, "has a label outside"), (LONG, "has 40 tokens, more")])
def test_rows_for_metrics_alone_are_checked_before_training(
    name: str, wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = models.tiny_bert(num_labels=3, hidden_size=4, max_position_embeddings=32)
    rows = label_rows(70)
    rows[66] |= wrong
    given: Any = {"near": Dataset.from_list(label_rows(2)), name: Dataset.from_list(rows)} if name else rows
    where = f"eval_dataset {name!r}" if name else "eval_dataset"
    with pytest.raises(ValueError, match=f"row 66 of {where} {message}"):
        trainer(
            tmp_path, EnsembleConfig(), model=model, train=label_rows(4), eval_dataset=given, subspace="last_layer",
            collator=DataCollatorWithPadding(models.tiny_tokenizer()),
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:the weights are no MAP", "ignore:held-out rows", "ignore:.*worse than a MAP")
@pytest.mark.parametrize("several", [False, True])
def test_the_trainer_fits_the_held_out_prior_like_fit_laplace(several: bool, tmp_path: Path) -> None:
    train, rows = label_rows(6), label_rows(6, seed=3)
    config = LaplaceConfig(fit_prior="heldout", prior_scope="tensor", structure="kronecker", num_chains=2)
    common = {"subspace": "last_layer", "max_steps": 3}
    model = models.tiny_bert(num_labels=3, hidden_size=4)
    given = {"heldout": Dataset.from_list(rows), "test": Dataset.from_list(label_rows(3))} if several else rows
    run = trainer(tmp_path, config, model=model, train=train, eval_dataset=given, **common)
    run.train()
    (first, second) = run.posterior.config.diagnostics["laplace"]
    assert first["heldout_nll"] == second["heldout_nll"]  # of the mixture
    assert first["prior_precision"] == second["prior_precision"]
    run.bayesian.detach()
    with attach(model, run.posterior.approximation.means, subspace="last_layer") as bayesian:
        again = fit_laplace(bayesian, train, config, heldout=rows, seed=run.args.seed)
    (note, _) = again.config.diagnostics["laplace"]
    assert note["prior_precision"] == pytest.approx(first["prior_precision"], rel=1e-4)  # other batches: float32
    assert note["prior_precision"] != pytest.approx([1.0, 1.0], rel=1e-2)  # the twin: the given one


def test_processes_with_other_held_out_rows_are_refused(tmp_path: Path) -> None:
    def of_process(seed: int) -> HeldOutData:
        model = models.tiny_bert(num_labels=3, hidden_size=4)
        rows = {"train": label_rows(4), "eval_dataset": label_rows(6, seed=seed)}
        return HeldOutData(TrainerHost(trainer(tmp_path, EnsembleConfig(), model=model, **rows, subspace="last_layer")))

    def mesh(*found: Any) -> Any:
        return SimpleNamespace(num_processes=len(found), share=lambda _: list(found))

    own = of_process(3)
    own.require_same(mesh(own.describe(), of_process(3).describe()))
    with pytest.raises(ValueError, match=r"process 1 has another eval_dataset than process 0 \(fingerprint: got"):
        own.require_same(mesh(own.describe(), of_process(4).describe()))


def test_rows_by_number_are_the_same_at_any_time(tmp_path: Path) -> None:
    """A run fits a temperature and its noise on them, and a resumed run finds other states of the generators."""

    def hiding(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = default_data_collator(rows)
        ids = batch["input_ids"]
        return batch | {"input_ids": torch.where(torch.rand(ids.shape) < 0.5, 5, ids)}

    host = trainer(tmp_path, EnsembleConfig(), model=models.tiny_bert(num_labels=3, hidden_size=4), collator=hiding,
                   train=label_rows(4), eval_dataset=label_rows(7), subspace="last_layer")  # fmt: skip
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        batches = list(HeldOutData(TrainerHost(host)).by_number(range(7)))
        found.append(torch.cat([batch["input_ids"] for batch in batches]))
        after = torch.rand(())
        torch.manual_seed(seed)
        assert torch.equal(torch.rand(()), after)
    assert torch.equal(*found)
