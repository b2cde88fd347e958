"""Rows of two texts through a model with one output."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import BayesianModelForSequenceClassification, LaplaceConfig, fit_laplace
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import COVARIANCES, dense
from hf_bayes.models.attaching import attach
from hf_bayes.models.linearised.outputs import gaussian_outputs
from hf_bayes.models.text_pairs import GroupCheck, flattened, grouped, holds_groups
from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from tests.models.linear_cases import random_covariance
from tests.tiny_models import tiny_bert, with_lora

IDS = torch.randint(3, 300, (3, 2, 5), generator=torch.Generator().manual_seed(0))


def test_the_texts_of_a_row_lie_side_by_side() -> None:
    flat = flattened({"input_ids": IDS, "note": "kept"})
    assert torch.equal(flat["input_ids"][2], IDS[1, 0])
    assert torch.equal(flat["input_ids"][3], IDS[1, 1])
    assert flat["note"] == "kept"
    assert grouped(torch.arange(6.0).view(1, 6, 1), 2).tolist() == [[[0, 1], [2, 3], [4, 5]]]
    assert holds_groups({"input_ids": IDS})
    assert not holds_groups({"input_ids": IDS[0]})


def test_a_pair_has_the_rewards_of_its_texts() -> None:
    model = tiny_bert(num_labels=1)
    with attach(model, num_members=3, subspace="last_layer", likelihood=BradleyTerry()) as bayesian:
        bayesian.theta.data += torch.randn_like(bayesian.theta)
        pairs = bayesian.member_logits({"input_ids": IDS})  # type: ignore[operator]
        singles = bayesian.member_logits({"input_ids": IDS.flatten(0, 1)})  # type: ignore[operator]
        # the same float32 sums, in batches of another size
        assert torch.allclose(pairs, singles[..., 0].view(3, 3, 2), atol=1e-6)
        output = bayesian(input_ids=IDS, labels=torch.tensor([0, 1, 0]))
        expected = pairs.log_softmax(-1).exp().mean(0).log()
        assert torch.allclose(output.logits, expected, atol=1e-6)
        assert torch.allclose(output.loss, -expected[[0, 1, 2], [0, 1, 0]].mean(), atol=1e-6)


def test_single_texts_have_a_mean_and_a_deviation() -> None:
    with attach(tiny_bert(num_labels=1), num_members=3, subspace="last_layer", likelihood=BradleyTerry()) as bayesian:
        bayesian.theta.data += torch.randn_like(bayesian.theta)
        rewards = bayesian.member_logits({"input_ids": IDS[:, 0]})  # type: ignore[operator]
        output = bayesian(input_ids=IDS[:, 0])
        assert torch.allclose(output.logits, rewards.mean(0))
        assert torch.allclose(output.epistemic_std, rewards.std(0, correction=0))
        assert output.total is None
        with pytest.raises(ValueError, match="single texts, whose outputs are rewards"):
            bayesian(input_ids=IDS[:, 0], labels=torch.zeros(3, dtype=torch.long))


def test_inputs_of_pairs_are_checked_text_by_text() -> None:
    check = GroupCheck(tiny_bert(num_labels=1), 2)
    check({"input_ids": IDS})
    wrong = IDS.clone()
    wrong[1, 1, 0] = 10_000
    with pytest.raises(ValueError, match="row 3 of the texts of train_dataset has the token id 10000"):
        check({"input_ids": wrong}, where="train_dataset")
    with pytest.raises(ValueError, match="has 3 texts, expected 2"):
        check({"input_ids": torch.ones(2, 3, 4, dtype=torch.long)})


# -- linearised -------------------------------------------------------------------------------------------------------

CASES = {
    "lora": (lambda: with_lora(reward_bert()), "trainable"),
    "head": (lambda: reward_bert(), "last_layer"),
    "norm and positions": (lambda: reward_bert(), "position_embeddings|layer.1.output"),
}


def reward_bert() -> Any:
    return tiny_bert(dtype=torch.float64, num_labels=1, hidden_size=4, intermediate_size=6)


def padded_pairs() -> dict[str, Tensor]:
    mask = torch.ones(3, 2, 5, dtype=torch.long)
    mask[0, 1, 3:] = mask[2, 0, 4:] = 0
    return {"input_ids": IDS, "attention_mask": mask}


def rewards_of(bayesian: Any, theta: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return [B], the rewards of single texts under weights [d], differentiable in them."""
    with bayesian.members.bind(theta[None]):
        return bayesian.outputs(inputs)[0, :, 0]  # type: ignore[no-any-return]


def jacobian_of(bayesian: Any, theta: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return [B, d], by reverse differentiation of the members' own forward."""
    return torch.autograd.functional.jacobian(lambda leaf: rewards_of(bayesian, leaf, inputs), theta)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize("case", CASES)
def test_linear_rewards_of_a_pair_are_those_of_its_texts(case: str, kind: str) -> None:
    build, subspace = CASES[case]
    with attach(build(), subspace=subspace, likelihood=BradleyTerry()) as bayesian:
        theta, inputs = bayesian.theta[0].detach(), padded_pairs()
        covariance = random_covariance(kind, bayesian.layout)
        found = gaussian_outputs(bayesian, Gaussian(theta[None], (covariance,)), inputs)
        jacobian = jacobian_of(bayesian, theta, flattened(inputs)).view(3, 2, -1)
        expected = jacobian @ dense(covariance, theta) @ jacobian.mT
        # float64 sums in another order
        assert (found.covariance[0] - expected).abs().max() < 1e-9 * expected.abs().max()
        # the broken twin: texts whose rewards are independent
        assert (torch.diag_embed(expected.diagonal(dim1=1, dim2=2)) - expected).abs().max() > 0.01
        single = gaussian_outputs(bayesian, Gaussian(theta[None], (covariance,)), flattened(inputs))
        variance = expected.diagonal(dim1=1, dim2=2).flatten()
        assert torch.allclose(single.covariance.flatten(), variance, rtol=1e-9)


def test_drawn_rewards_of_a_linearised_model_are_linear(tmp_path: Path) -> None:
    base, (build, subspace) = reward_bert(), CASES["lora"]
    base.save_pretrained(tmp_path / "base")
    with attach(build(), subspace=subspace, likelihood=BradleyTerry()) as bayesian:
        rows = [{name: value[number] for name, value in padded_pairs().items()} | {"label": 1} for number in range(3)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the weights are no MAP
            posterior = fit_laplace(bayesian, rows, LaplaceConfig(structure="full", prior_std=0.5))
    assert posterior.config.head["likelihood"] == {"name": "bradley_terry"}
    posterior.save_pretrained(tmp_path / "posterior")
    loaded = BayesianModelForSequenceClassification.from_pretrained(
        tmp_path / "posterior", base_model=str(tmp_path / "base"), check_base=False, members=3, prediction="linearised"
    )
    inputs, mean = flattened(padded_pairs()), posterior.approximation.means[0]  # type: ignore[union-attr]
    jacobian = jacobian_of(loaded, mean, inputs)
    expected = rewards_of(loaded, mean, inputs) + (loaded.theta.detach() - mean) @ jacobian.mT
    found = loaded.drawn_outputs(inputs)[..., 0]
    assert torch.allclose(found, expected, atol=1e-9)  # float64 sums in another order
    assert (loaded.member_logits(inputs)[..., 0] - expected).abs().max() > 1e-3  # and the model is not linear
    with pytest.raises(ValueError, match="a single pass does not predict by the likelihood bradley_terry"):
        loaded.single_pass()
    output = loaded(**inputs)
    variance = (jacobian @ dense(posterior.approximation.covariances[0], mean) * jacobian).sum(1)  # type: ignore[union-attr]
    assert torch.allclose(output.epistemic_std[:, 0].square(), variance, rtol=1e-9)
    assert torch.allclose(output.logits[:, 0], rewards_of(loaded, mean, inputs))
