"""Pairs of texts as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import default_data_collator

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.decide.rewards import RewardModel
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.training.data.preferences import PairRows
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from hf_bayes.uncertainty.custom.direct_preferences import DirectPreferences
from hf_bayes.uncertainty.custom.poisson import Poisson
from tests import runs
from tests.tiny_models import TEXTS, tiny_bert, tiny_llama, tiny_tokenizer, with_lora


def halves(rows: list[Any]) -> dict[str, Any]:
    """Collate as TRL does: the preferred texts first."""
    ids = torch.tensor([row[0] for row in rows] + [row[1] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_the_texts_of_a_pair_become_one_row() -> None:
    batch = PairRows(halves)([([1, 2], [3, 4]), ([5, 6], [7, 8])])
    assert batch["input_ids"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert batch["attention_mask"].shape == (2, 2, 2)
    assert batch["labels"].tolist() == [0, 0]


def test_reference_columns_are_read_where_they_were_computed() -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        return {**halves(rows), "ref_chosen_logps": torch.tensor([1.0]), "ref_rejected_logps": torch.tensor([2.0])}

    rows = [([1, 2], [3, 4])]
    assert PairRows(collate, precomputed=True)(rows)["ref_logps"].tolist() == [[1.0, 2.0]]
    assert PairRows(collate)(rows).keys() == {"input_ids", "attention_mask", "labels"}


def test_rows_of_two_texts_pass_unchanged() -> None:
    given = {"input_ids": torch.ones(3, 2, 4, dtype=torch.long), "labels": torch.tensor([0, 1, 0])}
    assert PairRows(lambda rows: given)([0, 1, 2]) == given


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"labels": torch.zeros(2)}, r"preferences need pairs of texts, got a batch with \['labels'\]"),
        ({"input_ids": torch.ones(4, 2), "margin": torch.ones(2)}, "margins of preferences"),
        ({"input_ids": torch.ones(2, 2)}, "made 2 texts of 2 rows, expected 2 for each"),
    ],
)
def test_other_batches_are_refused(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PairRows(lambda rows: batch)([0, 1])


def pairs(count: int = 8) -> Dataset:
    """Rows of two texts; a label is the index of the preferred one."""
    texts = runs.token_rows(2 * count, length=5)
    ids = [[texts[2 * n]["input_ids"], texts[2 * n + 1]["input_ids"]] for n in range(count)]
    return Dataset.from_dict({"input_ids": ids, "labels": [n % 2 for n in range(count)]})


def preferring(folder: Path, method: MethodConfig | None = None, **changes: Any) -> BayesianTrainer:
    return BayesianTrainer(
        tiny_bert(num_labels=1),
        method or SGHMCConfig(num_chains=3, prior_std=1.0),
        runs.arguments(folder, **changes),
        train_dataset=pairs(),
        eval_dataset=pairs(),
        subspace="last_block",
        likelihood=BradleyTerry(),
        data_collator=default_data_collator,
    )


def test_a_trainer_counts_pairs_and_saves_their_likelihood(tmp_path: Path) -> None:
    run = preferring(tmp_path)
    run.train()
    assert run.rows.num_data == 8
    metrics = run.evaluate()
    assert metrics["eval_total"] == pytest.approx(metrics["eval_aleatoric"] + metrics["eval_epistemic"], abs=1e-6)
    run.save_model(str(tmp_path / "posterior"))
    loaded = BayesianModelForSequenceClassification.from_pretrained(
        tmp_path / "posterior", base_model=tiny_bert(num_labels=1)
    )
    ids = torch.tensor(pairs()["input_ids"])
    assert torch.equal(loaded(input_ids=ids).logits, run.bayesian(input_ids=ids).logits)
    assert "total" in loaded(input_ids=ids)
    assert "total" not in loaded(input_ids=ids[:, 0])


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
def test_folded_pairs_have_the_gradient_of_single_models(tmp_path: Path, minibatch: str) -> None:
    run = preferring(tmp_path, minibatch=minibatch)
    active = runs.started(run)
    assert run.rows is not None
    (batch,) = run.rows.take(iter(run.rows.loader()), 1)
    theta = run.bayesian.theta.detach().clone()
    found = active.objective.evaluate(theta, [batch])
    copies = (
        {name: value.unflatten(0, (3, -1)) for name, value in batch.items()} if minibatch == "independent" else None
    )
    model = tiny_bert(num_labels=1)
    for chain, row in enumerate(theta):
        own = batch if copies is None else {name: value[chain] for name, value in copies.items()}
        model.zero_grad()
        named = dict(model.named_parameters())
        for name, value in run.bayesian.layout.unflatten(row[None]).items():
            named[name].data = value[0]
        rewards = model(input_ids=own["input_ids"].flatten(0, 1)).logits.view(-1, 2)
        chosen = rewards.gather(1, own["labels"][:, None]) - rewards.gather(1, 1 - own["labels"][:, None])
        (8 / len(chosen) * torch.nn.functional.logsigmoid(chosen).sum()).backward()
        expected = torch.cat([named[name].grad.flatten() for name in run.bayesian.layout.names])  # type: ignore[union-attr]
        assert found.grad_log_lik is not None
        # float32 sums in another order, of gradients of about 1
        assert torch.allclose(found.grad_log_lik[chain].float(), expected, atol=1e-4)


def test_a_memory_of_single_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trunk_memory_gib=1\.0 is refused with preferences"):
        preferring(tmp_path, trunk_memory_gib=1.0)


def drawn_gradients(run: BayesianTrainer, theta: Tensor) -> Tensor:
    """Return [N, 2, d]: for each pair the gradients of both texts' parts of its log-likelihood at a drawn label."""
    model, data, found = tiny_bert(num_labels=1), pairs(), []
    named = dict(model.named_parameters())
    layout = run.bayesian.layout  # type: ignore[union-attr]
    for name, value in layout.unflatten(theta).items():
        named[name].data = value.clone()
    for number, ids in enumerate(torch.tensor(data["input_ids"])):
        rewards = model(input_ids=ids).logits[:, 0]
        uniform = torch.rand(1, generator=generator(run.args.seed, "labels", 0, number), dtype=torch.float64)
        first = rewards.softmax(0)[0].detach()
        score = float(float(uniform) < float(first)) - first
        own = [
            torch.cat([g.flatten() for g in torch.autograd.grad(sign * score * reward, [named[n] for n in layout.names],
                                                                retain_graph=True)])
            for sign, reward in zip((1, -1), rewards, strict=True)
        ]  # fmt: skip
        found.append(torch.stack(own))
    return torch.stack(found)


def test_a_sampler_whitens_by_the_curvature_of_pairs(tmp_path: Path) -> None:
    method = SGHMCConfig(num_chains=1, prior_std=1.0, whitening="diagonal")
    # a run of 60 passes over the data can afford one more for the curvature
    run = preferring(
        tmp_path, method, learning_rate=None, max_steps=60, logging_steps=30, per_device_train_batch_size=8
    )
    run.train()
    state = run.active.run.state  # type: ignore[union-attr]
    gradients = drawn_gradients(run, state.origin[0])
    found = state.root[0].square()
    expected = 1 / (gradients.sum(1).square().sum(0) + 1)
    assert torch.allclose(found, expected, rtol=1e-3)  # float32 sums in another order
    # the broken twin: texts that are squared one by one
    alone = 1 / (gradients.square().sum((0, 1)) + 1)
    assert float((found / alone - 1).abs().max()) > 0.1
    assert any("step_size" in entry or "step_size/chain_0" in entry for entry in run.state.log_history)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_a_laplace_approximation_of_rewards_loads_and_predicts(tmp_path: Path, structure: str) -> None:
    run = preferring(tmp_path, LaplaceConfig(prior_std=1.0, structure=structure), max_steps=20)
    run.train()
    metrics = run.evaluate()
    run.save_model(str(tmp_path / "posterior"))
    loaded = BayesianModelForSequenceClassification.from_pretrained(
        tmp_path / "posterior", base_model=tiny_bert(num_labels=1)
    )
    ids = torch.tensor(pairs()["input_ids"])
    assert loaded.predictor.prediction.startswith("linearised")
    output = loaded(input_ids=ids, labels=torch.tensor(pairs()["labels"]))
    # the same Gaussian, in batches of another size
    assert float(output.loss) == pytest.approx(metrics["eval_nll"], abs=1e-5)
    assert float(output.epistemic.mean()) == pytest.approx(metrics["eval_epistemic"], abs=1e-5)
    found = RewardModel(loaded, tiny_tokenizer(), reference=TEXTS).score(TEXTS)
    assert bool((found.std > 0).all())
    assert torch.allclose(found.lower, found.mean - found.std)


@pytest.mark.parametrize("method", [SGHMCConfig(prior_std=1.0), LaplaceConfig(prior_std=1.0, structure="kronecker")])
def test_policies_need_no_learning_rate(tmp_path: Path, method: MethodConfig) -> None:
    data = pairs()
    ids = torch.tensor(data["input_ids"])
    mask = torch.ones_like(ids)
    answers = mask.clone()
    answers[..., :2] = 0
    rows = Dataset.from_dict({
        "input_ids": ids, "attention_mask": mask, "completion_mask": answers, "labels": data["labels"],
    })  # fmt: skip
    run = BayesianTrainer(
        with_lora(tiny_llama()), method,
        runs.arguments(tmp_path, learning_rate=None, max_steps=20, logging_steps=10, remove_unused_columns=False),
        train_dataset=rows, eval_dataset=rows, likelihood=DirectPreferences(beta=0.5),
        data_collator=default_data_collator,
    )  # fmt: skip
    run.train()
    assert run.evaluate()["eval_epistemic"] > 0
    run.save_model(str(tmp_path / "posterior"))
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path / "posterior", base_model=tiny_llama(), check_base=False)
    assert loaded(ids[:, 0]).epistemic.isfinite().all()


def test_an_attached_model_keeps_its_likelihood(tmp_path: Path) -> None:
    model = attach(tiny_bert(num_labels=1), subspace="last_layer", num_members=2, likelihood=BradleyTerry())
    given = {"train_dataset": pairs(), "data_collator": default_data_collator}
    method, args = SGHMCConfig(num_chains=2, prior_std=1.0), runs.arguments(tmp_path)
    run = BayesianTrainer(model, method, args, likelihood=BradleyTerry(), **given)
    assert run.bayesian is model
    with pytest.raises(ValueError, match="is given with a BayesianModel, which has one of its own"):
        BayesianTrainer(model, method, args, likelihood=Poisson(), **given)
