"""The pass over held-out rows that fits the temperature of a model's mixture."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_bayes import attach
from hf_bayes.metrics.calibration import NUM_GROUPS, GroupSums, fit_calibration
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.calibrating import calibration_of, heldout_sums
from hf_bayes.uncertainty.mixture_temperature import INVERSE_TEMPERATURES, nll_at_temperatures
from tests.runs import label_rows, token_rows
from tests.tiny_models import tiny_bert, tiny_llama, with_lora


def batches(rows: list, size: int) -> list[dict[str, torch.Tensor]]:
    """Return rows in batches, ``label`` as ``labels``."""
    rows = [{"labels" if name == "label" else name: value for name, value in row.items()} for row in rows]
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [{name: torch.tensor([row[name] for row in part]) for name in part[0]} for part in parts]


def classifier():
    model = attach(tiny_bert(), subspace="last_layer")
    generator = torch.Generator().manual_seed(0)
    return model, model.theta.detach()[0] + torch.randn(3, model.layout.dim, generator=generator)


def test_classes_are_calibrated_by_their_mixture() -> None:
    model, theta = classifier()
    with model.showing(theta):
        found = calibration_of(model, batches(label_rows(60), 7))
        (batch,) = batches(label_rows(60), 60)
        log_probs = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    sums = GroupSums.empty()
    sums.add(nll_at_temperatures(log_probs, batch["labels"]), torch.arange(60) % NUM_GROUPS)
    expected = fit_calibration(sums, num_members=3, prediction="members")
    assert found.temperature == pytest.approx(expected.temperature, rel=1e-4)
    assert (found.num_terms, found.num_members, found.prediction) == (60, 3, "members")


def test_the_tokens_of_a_row_are_in_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(GroupSums, "add", lambda self, values, groups: seen.append(groups) or self.terms.add_(20))
    calibration_of(attach(with_lora(tiny_llama())), batches(token_rows(6), 4))
    assert torch.equal(torch.cat(seen), torch.arange(6).repeat_interleave(7))


def test_parts_of_the_rows_add_up_to_all_rows() -> None:
    model, theta = classifier()
    rows, parts = label_rows(60), []
    with model.showing(theta):
        whole = calibration_of(model, batches(rows, 60))
        for rank in range(2):
            kept = []
            calibration_of(
                model, batches(rows[rank::2], 6), numbers=itertools.count(rank, 2),
                add_up=lambda sums, kept=kept: kept.append(sums.clone()) or sums.fill_(100),
            )  # fmt: skip
            parts.append(kept)
    both = GroupSums(*(a + b for a, b in zip(*parts, strict=True)))
    assert fit_calibration(both, num_members=3, prediction="members").temperature == pytest.approx(whole.temperature)


def test_rows_without_labels_are_left_out() -> None:
    model, theta = classifier()
    labelled = batches(label_rows(60), 6)
    (unlabelled,) = batches(token_rows(3, length=6), 3)
    del unlabelled["labels"]
    with model.showing(theta):
        assert calibration_of(model, [unlabelled, *labelled]) == calibration_of(model, labelled)


def test_a_tempered_mixture_is_not_calibrated_again() -> None:
    model, theta = classifier()
    with model.showing(theta, temperature=0.5), pytest.raises(ValueError, match="load the posterior with calibrated=F"):
        calibration_of(model, batches(label_rows(60), 6))


def test_numbers_have_no_temperature() -> None:
    model = attach(tiny_bert(num_labels=1), subspace="last_layer", noise_std=1.0)
    rows = [{**row, "label": float(row["label"])} for row in label_rows(60)]
    with pytest.raises(ValueError, match="needs labels with probabilities, got numbers"):
        calibration_of(model, batches(rows, 6))


def several_labels() -> tuple[BayesianModel, torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Return a classifier of 4 labels, 3 members, and 120 rows with labels in one batch."""
    model = attach(tiny_bert(num_labels=4, problem_type="multi_label_classification"), subspace="last_layer")
    generator = torch.Generator().manual_seed(0)
    theta = model.theta.detach()[0] + torch.randn(3, model.layout.dim, generator=generator)
    (batch,) = batches(label_rows(120), 120)
    logits = 2.5 * model(**{name: value for name, value in batch.items() if name != "labels"}).logits.detach()
    batch["labels"] = (torch.rand(120, 4, generator=generator) < logits.sigmoid()).float()
    return model, theta, [batch]


def test_several_labels_have_one_temperature() -> None:
    model, theta, (batch,) = several_labels()
    with model.showing(theta):
        found = calibration_of(model, [batch])
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits.double()
    flat = torch.nn.functional.logsigmoid(torch.stack([-logits, logits], -1)).flatten(0, 1)
    values = nll_at_temperatures(flat, batch["labels"].long().flatten()).unflatten(0, (120, 4)).sum(1)
    sums = GroupSums.empty()
    sums.add(values, torch.arange(120) % NUM_GROUPS)
    expected = fit_calibration(sums, num_members=3, prediction="members")
    assert found.temperature == pytest.approx(expected.temperature, rel=1e-4)
    assert found.num_terms == 120


def test_labels_at_a_temperature_score_as_calibrated() -> None:
    model, theta, (batch,) = several_labels()
    with model.showing(theta):
        curve = heldout_sums(model, [batch]).curves[:, :, 0].sum(0) / 120
        flat = model(**batch).total
    number = 10
    temperature = 1 / float(INVERSE_TEMPERATURES[number])
    with model.showing(theta, temperature=temperature):
        output = model(**batch)
    assert float(output.loss) == pytest.approx(float(curve[number]), rel=1e-5)
    entropy = torch.distributions.Bernoulli(logits=output.logits).entropy().sum(-1)
    torch.testing.assert_close(output.total, entropy, rtol=1e-4, atol=1e-6)
    assert (output.total < flat).all()  # sharper than the mixture
    torch.testing.assert_close(output.aleatoric + output.epistemic, output.total)
