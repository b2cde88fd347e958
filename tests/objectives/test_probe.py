from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_bayes.objectives.probe import PROBE_TERMS
from tests import runs
from tests.runs import token_rows
from tests.tiny_models import tiny_bert, tiny_llama, with_lora
from tests.training.diagnosed import ONE_DRAW, run


def direct(rows: list[dict[str, Any]], theta: Tensor) -> Tensor:
    """[M, n]: log-probabilities of the labels, each member as a plain peft model."""
    labels = torch.tensor([row["input_ids"] for row in rows])[:, 1:, None]
    return torch.stack([found.gather(2, labels).flatten() for found in all_words(rows, theta)]).double()


def all_words(rows: list[dict[str, Any]], theta: Tensor) -> list[Tensor]:
    """[rows, T, V] log-probabilities of each member as a plain peft model."""
    found = []
    model = with_lora(tiny_llama())
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = dict(model.named_parameters())
    for row in theta:
        begin = 0
        for name in names:
            size = parameters[name].numel()
            parameters[name].data = row[begin : begin + size].view(parameters[name].shape)
            begin += size
        ids = torch.tensor([row["input_ids"] for row in rows])
        found.append(model(input_ids=ids).logits[:, :-1].log_softmax(-1).detach())
    return found


def test_the_probe_holds_log_probabilities_of_the_first_rows(tmp_path: Path) -> None:
    trainer = run(tmp_path, ONE_DRAW, max_steps=1, probe_steps=800, train=token_rows(40))
    theta = trainer.run.state.theta
    found = trainer.monitor.probe(theta)
    assert [len(batch["input_ids"]) for batch in trainer.monitor.probe.batches] == [3] * 10 + [2]  # those of evaluation
    # 800 updates of 2 rows allow for 32 rows of 7 terms
    torch.testing.assert_close(found.log_lik, direct(token_rows(40)[:32], theta), rtol=1e-4, atol=1e-4)


def test_a_probe_of_many_terms_stops_at_240(tmp_path: Path) -> None:
    trainer = run(tmp_path, ONE_DRAW, max_steps=1, probe_steps=100, train=token_rows(10, length=100))
    assert trainer.monitor.probe(trainer.run.state.theta).log_lik.shape == (3, 240)
    assert sum(len(batch["input_ids"]) for batch in trainer.monitor.probe.batches) == 3  # of 99 terms


def test_the_probe_takes_words_that_were_likely_at_the_start(tmp_path: Path) -> None:
    trainer = run(tmp_path, ONE_DRAW, learning_rate=0.3, train=token_rows(10))
    theta = trainer.run.state.theta
    look = trainer.monitor.probe(theta)
    (start,) = all_words(token_rows(10), trainer.setup.start[None])
    labels = torch.tensor([row["input_ids"] for row in token_rows(10)])[:, 1:, None]
    words = start.scatter(2, labels, -1.0e9).topk(4).indices  # beside the label, whose log p is known
    expected = torch.stack([found.gather(2, words).flatten() for found in all_words(token_rows(10), theta)])
    assert look.logits.dtype == torch.float32
    torch.testing.assert_close(look.logits, expected, rtol=1e-4, atol=1e-4)
    other = all_words(token_rows(10), theta)[0].scatter(2, labels, -1.0e9).topk(4).indices
    assert not torch.equal(words, other)  # the chain's own favourites are others by now
    assert torch.equal(look.logits, trainer.monitor.probe_logits[-1])  # of the last update


def test_of_few_classes_all_logits_are_looked_at_less_their_mean(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model": tiny_bert(), "subspace": "last_layer", "train": runs.label_rows(10)}
    trainer = run(tmp_path, ONE_DRAW, max_steps=2, **fields)
    trainer.bayesian.show(None)
    theta = trainer.run.state.theta
    (batch, *_) = trainer.monitor.probe.batches
    logits = torch.stack([_member(trainer.bayesian, row, batch) for row in theta])
    expected = (logits - logits.mean(-1, keepdim=True)).flatten(1)
    torch.testing.assert_close(
        trainer.monitor.probe(theta).logits[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5
    )
    found = trainer.monitor.probe(theta + 0).logits.unflatten(1, (-1, 3))
    assert found.sum(2).abs().max() < 1e-5  # a softmax does not see what is added to all of them


def test_the_probe_takes_four_of_many_classes_for_any_head(tmp_path: Path) -> None:
    def columns(folder: str, seed: int) -> Tensor:
        torch.manual_seed(seed)
        model = tiny_bert(num_labels=12)
        torch.nn.init.normal_(model.classifier.weight, std=5.0)
        fields = {"model": model, "subspace": "last_layer", "train": runs.label_rows(10)}
        trainer = run(tmp_path / folder, ONE_DRAW, max_steps=2, **fields)
        trainer.monitor.probe(trainer.run.state.theta)
        assert trainer.monitor.probe.columns is not None
        return trainer.monitor.probe.columns

    found = columns("one", 1)
    assert found.shape == (10, 4)
    labels = torch.tensor([row["label"] for row in runs.label_rows(10)])
    assert not bool((found == labels[:, None]).any())  # whose log p is known
    assert all(len(set(row)) == 4 for row in found.tolist())
    assert torch.equal(found, columns("two", 2))  # as for a resumed run, whose head is drawn anew


def _member(model: Any, theta: Tensor, batch: dict[str, Tensor]) -> Tensor:
    model.show(theta[None])
    try:
        with torch.no_grad():
            return model.member_logits({name: value for name, value in batch.items() if name != "labels"})[0]
    finally:
        model.show(None)


def test_of_a_regression_the_predicted_means_are_looked_at(tmp_path: Path) -> None:
    rows = [{**row, "label": float(row["label"])} for row in runs.label_rows(10)]
    model = tiny_bert(num_labels=1, problem_type="regression")
    trainer = run(tmp_path, ONE_DRAW, max_steps=2, noise_std=0.5, model=model, subspace="last_layer", train=rows)
    theta = trainer.run.state.theta
    expected = [_member(trainer.bayesian, theta[0], batch)[:, 0] for batch in trainer.monitor.probe.batches]
    torch.testing.assert_close(trainer.monitor.probe(theta).logits[0], torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_classifiers_have_probes_of_one_term_a_row(tmp_path: Path) -> None:
    """A fiftieth of the rows since the last look, 16 at least and 240 at most."""
    fields: dict[str, Any] = {"model": tiny_bert(), "subspace": "last_layer", "train": runs.label_rows(300)}
    trainer = run(tmp_path, ONE_DRAW, probe_steps=700, max_steps=1, **fields)
    theta = trainer.run.state.theta
    assert trainer.monitor.probe(theta).log_lik.shape == (3, 28)
    assert trainer.active.probe_of_draws(theta).log_lik.shape == (3, 16)  # of a run of one update
    for interval, rows in ((5, 16), (5000, 200), (10_000, 240)):
        found = trainer.active._probe(interval)._choose(PROBE_TERMS)
        assert sum(len(batch["input_ids"]) for batch in found) == rows
