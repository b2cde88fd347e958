"""The head of a distilled student."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.uncertainty.decomposition import predict
from hf_bayes.uncertainty.student_head import StudentHead, entropy, head_from, head_shapes


def random_head(seed: int = 0) -> StudentHead:
    torch.manual_seed(seed)
    head = StudentHead(6, 4)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)
    return head


def states(rows: int = 9) -> tuple[Tensor, nn.Linear]:
    torch.manual_seed(1)
    return 3 * torch.randn(rows, 6), nn.Linear(6, 5)


def test_an_untrained_head_predicts_as_its_network() -> None:
    hidden, output = states()
    found = StudentHead(6, 4, share=0.25)(hidden, output)
    torch.testing.assert_close(found.log_probs, output(hidden).log_softmax(-1))
    torch.testing.assert_close(found.uncertainty.epistemic, 0.25 * entropy(found.log_probs))


@pytest.mark.parametrize("seed", range(3))
def test_uncertainties_add_up_and_none_is_negative(seed: int) -> None:
    hidden, output = states(50)
    log_probs, (total, aleatoric, epistemic) = random_head(seed)(hidden, output)
    assert torch.equal(total, aleatoric + epistemic)
    assert bool((aleatoric >= 0).all())
    assert bool((epistemic >= 0).all())
    torch.testing.assert_close(total, predict(log_probs[None]).uncertainty.total)


def test_the_loss_of_disagreement_cannot_bend_probabilities() -> None:
    hidden, output = states()
    head = random_head()
    head(hidden, output).uncertainty.epistemic.sum().backward()
    assert head.shift.weight.grad is None
    assert head.log_odds.weight.grad is not None


def test_hidden_states_of_any_scale_are_read_alike() -> None:
    hidden, output = states()
    head, scaled = random_head(), nn.Linear(6, 5)
    scaled.load_state_dict({"weight": output.weight / 100, "bias": output.bias})
    # layer_norm's eps of 1e-5 is the difference
    torch.testing.assert_close(head(hidden, output)[0], head(100 * hidden, scaled)[0], rtol=1e-3, atol=1e-4)


def test_classes_of_probability_zero_leave_numbers_finite() -> None:
    hidden, output = states()
    head = random_head()
    found = head(hidden, lambda x: torch.cat([output(x), torch.full((len(x), 1), -torch.inf)], -1))
    for value in found.uncertainty:
        assert bool(value.isfinite().all())
    found.uncertainty.total.sum().backward()
    assert bool(head.shift.weight.grad.isfinite().all())


def test_a_head_comes_back_from_its_tensors() -> None:
    hidden, output = states()
    head = random_head()
    assert head_shapes(6, 4) == {name: tuple(value.shape) for name, value in head.state_dict().items()}
    assert torch.equal(head_from(head.state_dict())(hidden, output)[0], head(hidden, output)[0])
