from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_bayes.models.attaching import attach
from hf_bayes.objectives.gradient_variance import between_parts
from hf_bayes.objectives.passes import MemberPass
from tests.members.subject_models import resnet
from tests.objectives.classifier import brute_force, classifier, rows, theta_near
from tests.tiny_models import images, tiny_bert


def test_variance_of_a_gradient_is_that_of_its_micro_batches() -> None:
    objective = classifier(measures_noise=True)
    theta, sizes = theta_near(objective), objective.model.layout.sizes
    batches = [rows(seed, 2) for seed in range(4)]
    found = objective.evaluate(theta, batches)
    grads = torch.stack([brute_force(objective, theta, [one])[1] for one in batches])
    expected = [12.5**2 * 4 * part.var(0).mean(1) for part in grads.split(sizes, dim=2)]
    torch.testing.assert_close(found.grad_variance, torch.stack(expected, 1), rtol=1e-3, atol=0.0)


def test_two_parts_of_a_batch_give_the_variance_of_its_rows() -> None:
    objective = classifier(measures_noise=True)
    theta, sizes, one = theta_near(objective), objective.model.layout.sizes, rows(0, 9)
    found = objective.for_update([one], step=0)(theta, split_rows=True).grad_variance
    parts = [{name: value[part] for name, value in one.items()} for part in (slice(2), slice(2, 9))]
    first, second = (brute_force(objective, theta, [part])[1] for part in parts)
    difference = (first / 2 - second / 7).square()
    expected = [12.5**2 * 2 * 7 * part.mean(1) for part in difference.split(sizes, dim=1)]
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(("normed", "smaller"), [(False, 2), (True, 4)])
def test_only_parts_with_batch_normalisation_are_halves(normed: bool, smaller: int) -> None:
    """A part of few rows would be normalised by statistics of its own."""
    base, batch = (resnet(torch.float32), images(rows=8)) if normed else (tiny_bert(), rows(0, 8))
    model = attach(base, subspace="all" if normed else "last_layer", num_members=1)
    seen: list[int] = []

    def passes(part: dict[str, torch.Tensor], number: int) -> Iterator[MemberPass]:
        seen.append(len(next(iter(part.values()))))
        yield MemberPass(slice(0, 1), torch.zeros(1), torch.zeros_like(model.theta), None)

    model.eval()
    between_parts(model, batch, torch.zeros_like(model.theta), passes, num_groups=1)
    assert seen == [smaller]
