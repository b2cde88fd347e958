from __future__ import annotations

import pytest
import torch

from hf_bayes.models.attaching import attach
from hf_bayes.models.language import causal_members
from tests.models.prepared import TOLERANCE, prepared
from tests.tiny_models import batch, tiny_llama, with_lora


@pytest.mark.parametrize("name", ["llama-lora", "llama-head", "gpt2-last-block"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_rows_have_the_likelihood_of_each_row_alone(name: str, padding: str) -> None:
    model, _, theta, subspace = prepared(name)
    inputs = batch(rows=4, padding=padding)
    mask = inputs["attention_mask"].bool()
    together = {**inputs, "labels": inputs["input_ids"].masked_fill(~mask, -100)}
    with torch.no_grad(), attach(model, theta, subspace=subspace) as bayesian:
        found, statistics = bayesian.log_lik(theta, together, folded=False), bayesian.evaluate_batch(together)[0]
        rows = [{"input_ids": ids[None], "labels": ids[None]}
                for ids in (row[kept] for row, kept in zip(inputs["input_ids"], mask, strict=True))]  # fmt: skip
        alone = [bayesian.log_lik(theta, row, folded=False) for row in rows]
        nll = torch.cat([bayesian.evaluate_batch(row)[0]["nll"] for row in rows])
        loss = bayesian(**together).loss
    assert torch.equal(bayesian.terms_per_row(together), torch.tensor([6, 5, 4, 3]))
    assert torch.equal(found.num_terms, torch.full((3,), 18))
    total = sum(one.loss for one in alone)
    torch.testing.assert_close(found.loss, total, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(statistics["nll"], nll, rtol=TOLERANCE, atol=TOLERANCE)
    if name != "gpt2-last-block":  # forward is transformers' own: learnt positions count padding by default
        torch.testing.assert_close(loss, nll.mean().to(loss), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_batch_in_pieces_gives_what_it_gives_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attach(with_lora(tiny_llama()), num_members=3).eval()
    model.theta.data += 0.1 * torch.randn_like(model.theta)
    inputs = batch(rows=5, length=24, padding="right")
    labelled = {**inputs, "labels": inputs["input_ids"].where(inputs["attention_mask"].bool(), -100)}
    found = []
    for held in (1 << 30, 0):
        monkeypatch.setattr(causal_members, "HIDDEN_BYTES", held)
        pieces = len([*model.row_slices(labelled)])
        with torch.no_grad():
            statistics, logits = model.evaluate_batch(labelled, keep_logits=True)
        found.append((pieces, {**statistics, "logits": logits, **model.score(**inputs)._asdict()}))
    assert [pieces for pieces, _ in found] == [1, 2]
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, equal_nan=True)
