"""The training data of a student."""

from __future__ import annotations

import pytest
import torch

from hf_bayes import BayesianModelForCausalLM, BayesianModelForSequenceClassification, LaplaceConfig, fit_laplace
from hf_bayes.fit import distil_targets
from hf_bayes.fit.distil_targets import InputReader, TokenReader, collect
from tests.fit.distilled import ROWS, TEXTS, base, ensemble, inputs_of
from tests.tiny_models import tiny_bert


def test_terms_of_a_classifier_are_its_predictions() -> None:
    inputs = inputs_of(ROWS[:7])
    with BayesianModelForSequenceClassification.from_pretrained(ensemble("classes"), base_model=tiny_bert()) as model:
        network = model.theta[:1].detach()
        with torch.no_grad():
            (found,) = collect(InputReader(model, inputs, network), [inputs, inputs], [network])
            expected = model(**inputs)
            alone = model.member_logits(inputs)[0]
            reader = InputReader(model, inputs, network)
            with model.members.bind(network):
                torch.testing.assert_close(reader.logits(found.hidden[:7]), alone)
    assert found.row.tolist() == list(range(14))
    torch.testing.assert_close(found.epistemic[:7], expected.epistemic)
    torch.testing.assert_close(found.log_probs[7:], expected.logits.gather(-1, found.classes[7:]))


def test_positions_of_a_text_are_drawn_without_padding() -> None:
    inputs = inputs_of(TEXTS[:4])
    inputs["attention_mask"][0, :3] = 0
    with BayesianModelForCausalLM.from_pretrained(ensemble("tokens"), base_model=base("tokens")) as model:
        network = model.theta[:1].detach()
        with torch.no_grad():
            (all_there,) = collect(TokenReader(model, per_row=100, seed=0), [inputs], [network])
            (some,) = collect(TokenReader(model, per_row=2, seed=0), [inputs], [network])
            (other,) = collect(TokenReader(model, per_row=2, seed=1), [inputs], [network])
            expected = model(**inputs).epistemic
    assert all_there.row.bincount().tolist() == [5, 8, 8, 8]
    torch.testing.assert_close(all_there.epistemic, expected[inputs["attention_mask"].bool()], rtol=1e-4, atol=1e-6)
    assert some.row.bincount().tolist() == other.row.bincount().tolist() == [2, 2, 2, 2]
    assert not torch.equal(some.hidden, other.hidden)


def test_the_most_probable_classes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distil_targets, "MAX_CLASSES", 5)
    inputs = inputs_of(TEXTS[:2])
    load = BayesianModelForCausalLM.from_pretrained
    with torch.no_grad(), load(ensemble("tokens"), base_model=base("tokens")) as model:
        (found,) = collect(TokenReader(model, per_row=100, seed=0), [inputs], [model.theta[:1].detach()])
        logits = model(**inputs).logits.flatten(0, 1)
    torch.testing.assert_close(found.log_probs, logits.topk(5).values)


def test_a_prediction_without_epistemic_uncertainty_is_refused() -> None:
    posterior = fit_laplace(tiny_bert(), ROWS[:20], LaplaceConfig(prior_std=1.0), subspace="last_layer")
    load = BayesianModelForSequenceClassification.from_pretrained
    inputs = inputs_of(ROWS[:4])
    with load(posterior, base_model=tiny_bert(), prediction="linearised_probit") as model, torch.no_grad():
        network = model.theta[:1].detach()
        with pytest.raises(ValueError, match="this prediction has total: distil a classifier"):
            InputReader(model, inputs, network).read(inputs, [network])
