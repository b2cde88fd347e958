"""The NLL of a regression's predictions at other values of the labels' noise."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.models.predictives.built_in import GaussianNumbers, MemberNumbers
from hf_bayes.models.predictors import Predictive


def nll_at_noise(prediction: Predictive, labels: Tensor, noise_stds: Tensor) -> Tensor:
    """Return [n, G] nats of the n labels at G standard deviations of the noise, in place of the prediction's own.

    Args:
        prediction: a prediction of numbers under the normal likelihood.
        labels: [n] or [n, C] numbers.
        noise_stds: [G] standard deviations, in units of the labels.
    """
    assert isinstance(prediction, MemberNumbers | GaussianNumbers)  # the only predictions of a normal likelihood
    return torch.stack([prediction.with_noise(std).statistics(labels)["nll"] for std in noise_stds.tolist()], -1)
