"""The noise of a regression for which no ``noise_std`` was given, learnt from held-out rows.

A label is y = f(x) + N(0, sigma^2). The run needs sigma, because the posterior weighs the data by 1 / sigma^2. The
residuals of training rows are too small, because the model was fitted to them. So held-out rows determine sigma, at up
to three moments:

1. Before the first update: the root mean square of the residuals. For a new head this is nearly the spread of the
   labels.
2. Near a mode: at the end of a warm start by AdamW, before a Gaussian is fitted around a mode, or, where a method has
   neither, at the end of a short MAP estimate. Optimisers keep the first value, which only changes the weight of their
   prior.
3. At the end: the sigma with the smallest NLL of the predictions (``metrics.noise_fit``). Predictions use it, and the
   posterior stores it as its ``noise_std``.

The second value defines the posterior that is sampled. It contains how far the members are from the truth together with
the noise of the labels. Held-out rows cannot tell these apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.metrics.noise_fit import FACTORS, MIN_LABELS, NoiseFit, fit_noise
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.predictives.noise import nll_at_noise
from hf_bayes.models.predictors import Predictive
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.data.heldout_rows import HeldOutData, evenly_spread, reason_without_rows
from hf_bayes.training.trainer_host import TrainerHost, eval_sets, heldout_name
from hf_bayes.uncertainty.likelihoods import Normal

MOST_ROWS = 200
"""The largest number of held-out rows that determine the noise during a run. Its error is then a twentieth."""

MOST_DISTANCE = 3.0
"""The mean of the labels over their standard deviation, above which a run warns: a new head begins at 0."""


class LabelNoise:
    """The noise of a trainer's run. Its only state is the likelihood of the model.

    Args:
        host: the trainer.
        model: the model, whose current members are those of the run.
        saved: the noise of the checkpoint that the run resumes from; None measures it.
    """

    def __init__(self, host: TrainerHost, model: BayesianModel, saved: float | None) -> None:
        self._host, self._model, self._rows = host, model, HeldOutData(host)
        if saved is None:
            self.measure()
        else:
            self.use(saved)

    @property
    def std(self) -> float:
        """The standard deviation of the noise, in units of the labels."""
        found = self._model.likelihood.noise_std
        assert found is not None
        return found

    def use(self, noise_std: float) -> None:
        """Let the model use this noise."""
        self._model.likelihood = Normal(noise_std)

    def measure(self) -> None:
        """Take the root mean square of the residuals of the current members as the noise.

        Raises:
            ValueError: if it is 0 or not finite.
        """
        found = math.sqrt(float(self._read(_squares, MOST_ROWS).mean()))
        if not 0 < found < math.inf:
            raise ValueError(
                f"the residuals of the held-out rows have the root mean square {found:g}, so there is no noise to "
                "learn: check the labels of eval_dataset, or give noise_std"
            )
        self.use(found)

    def fit(self, most: int) -> NoiseFit:
        """Return the noise that fits the predictions that the model makes now.

        Args:
            most: the largest number of held-out rows to use.
        """
        before = self.std
        return fit_noise(self._read(lambda found, labels: nll_at_noise(found, labels, before * FACTORS), most), before)

    @contextmanager
    def fitted(self, most: int) -> Iterator[None]:
        """Use the noise that fits the current predictions until the end of the block.

        Args:
            most: the largest number of held-out rows to use.
        """
        before = self.std
        self.use(self.fit(most).noise_std)
        try:
            yield
        finally:
            self.use(before)

    def _read(self, read: Callable[[Predictive, Tensor], Tensor], most: int) -> Tensor:
        """Return [n, ...] what ``read`` makes of the predictions of held-out rows with labels."""
        model, host = self._model, self._host
        numbers = evenly_spread(len(self._rows.rows), most)
        with torch.no_grad(), evaluating(model), host.evaluation_autocast():
            found = [
                model.read_predictions(batch, lambda prediction, labels: {"": read(prediction, labels)})[0][""]
                for batch in self._rows.by_number(numbers)
            ]
        return torch.cat(found).double()


def needs_pilot(method: MethodConfig) -> bool:
    """Return whether a short MAP estimate has to show the noise, because the chains of the run itself are at no mode.

    A warm start by AdamW ends near one, and so do the updates before a final pass. A method at T = 0 weighs only its
    prior by the noise.
    """
    needs = method.requirements
    return method.temperature > 0 and not method.num_warm_start_steps and not needs.final_pass


def require_rows_for_noise(args: BayesianTrainingArguments, eval_dataset: Any) -> None:
    """Check that a trainer has enough held-out rows to learn the noise of a regression from.

    Raises:
        ValueError: if not; what is missing, in words.
    """
    reason, name = reason_without_rows(args, eval_dataset), heldout_name(eval_dataset)
    if reason is None and name is not None:
        count = len(eval_sets(eval_dataset)[name])
        reason = f"eval_dataset has {count}" if count < MIN_LABELS else None
    if reason is not None:
        raise ValueError(
            "a regression needs the standard deviation of its labels' noise. Without noise_std it is learnt from "
            f"{MIN_LABELS} held-out rows or more, and {reason}: give an eval_dataset with more rows, or noise_std > 0"
        )


def begin_with_spread(host: TrainerHost, model: BayesianModel) -> None:
    """Take the standard deviation of held-out labels as the noise, until a run begins. Warn of labels far from 0.

    Raises:
        ValueError: if rows have no labels, or all labels are equal.
    """
    rows = HeldOutData(host)
    rows.count_terms(model)  # refuses rows without labels
    batches = rows.by_number(evenly_spread(len(rows.rows), MOST_ROWS))
    labels = torch.cat([batch["labels"].double().reshape(len(batch["labels"]), -1) for batch in batches])
    spread = float(labels.std(0).mean())
    if not spread > 0:
        raise ValueError(
            f"all labels of eval_dataset are {float(labels[0, 0]):g}: a regression needs labels that differ"
        )
    model.likelihood = Normal(spread)
    distance = float((labels.mean(0).abs() / labels.std(0)).max())
    if distance > MOST_DISTANCE:
        host.warn(
            "the labels have mean %.3g and standard deviation %.3g. A new head begins at 0 and needs many updates to "
            "get there: subtract the mean from the labels, and divide them by the standard deviation",
            float(labels.mean()), spread,
        )  # fmt: skip


def _squares(found: Predictive, labels: Tensor) -> Tensor:
    """Return [n] the squared residuals, a mean over members and over the numbers of a label."""
    residuals = labels.to(found.logits).reshape(found.logits.shape) - found.logits
    return (residuals.square() + found.parts["epistemic_std"].square()).mean(-1)
