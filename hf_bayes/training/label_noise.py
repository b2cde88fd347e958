"""The noise of a regression for which no ``noise_std`` was given, learnt from held-out rows.

A label is y = f(x) + N(0, sigma^2). The run needs sigma, because the posterior weighs the data by 1 / sigma^2. The
residuals of training rows are too small, because the model was fitted to them. So held-out rows determine sigma, up to
three times:

1. Before the first update: the root mean square of the residuals. For a new head this is nearly the spread of the
   labels.
2. Near a mode: at the end of a warm start by AdamW, before a Gaussian is fitted around a mode, or, where a method has
   neither, at the end of a short MAP estimate. Optimisers keep the first value, which only changes the weight of their
   prior.
3. At the end: the sigma with the smallest NLL of the predictions (``metrics.noise_fit``). Predictions use it, and the
   posterior stores it as its ``noise_std``.

The second value defines the posterior that is sampled. It contains the errors of the members as well as the noise of
the labels. Held-out rows cannot tell these apart.
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

LEAST_PILOT = 20
"""The smallest number of updates of a MAP estimate for the noise. A kernel's run may have few updates."""

MAX_RELATIVE_MEAN = 3.0
"""The mean of the labels over their standard deviation, above which a run warns: a new head begins at 0."""


class LabelNoise:
    """The noise of a trainer's run, which is also that of its model.

    Args:
        host: the trainer.
        model: the model, whose current members are those of the run.
        resumed: the noise in the checkpoint that the run resumes from; None measures it.
    Attributes:
        of_run: the standard deviation of the noise that the run samples with now, in units of the labels.
    """

    of_run: float

    def __init__(self, host: TrainerHost, model: BayesianModel, resumed: float | None) -> None:
        self._host, self._model, self._rows = host, model, HeldOutData(host)
        if resumed is None:
            self.measure()
        else:
            self._set_of_run(resumed)

    @property
    def likelihood(self) -> Normal:
        """The likelihood of the run, also after a fit at its end."""
        return Normal(self.of_run)

    def measure(self) -> None:
        """Take the root mean square of the residuals of the current members as the noise of the run.

        Raises:
            ValueError: if it is 0 or not finite.
        """
        found = self._root_mean_square()
        if not 0 < found < math.inf:
            raise ValueError(
                f"the residuals of the held-out rows have the root mean square {found:g}, so there is no noise to "
                "learn: check the labels of eval_dataset, or give noise_std"
            )
        self._set_of_run(found)

    def best_fit(self, max_rows: int) -> NoiseFit | None:
        """Return the noise that fits the current predictions best; None, with a warning, if it cannot be fitted.

        Args:
            max_rows: the largest number of held-out rows to use.
        """
        stds = self._root_mean_square() * FACTORS

        def nll(prediction: Predictive, labels: Tensor) -> Tensor:
            return nll_at_noise(prediction, labels, torch.cat([stds, stds.new_tensor([self.of_run])]))

        try:
            return fit_noise(self._of_rows(nll, max_rows), stds, self.of_run)
        except ValueError as error:  # a finished run must not be lost
            self._host.warn("noise_std stays at %.3g, that of the run: %s", self.of_run, error)
            return None

    @contextmanager
    def using(self, noise_std: float | None) -> Iterator[None]:
        """Let the model use another noise until the end of the block; None changes nothing."""
        before = self._model.likelihood
        if noise_std is not None:
            self._model.likelihood = Normal(noise_std)
        try:
            yield
        finally:
            self._model.likelihood = before

    def _set_of_run(self, noise_std: float) -> None:
        self.of_run = noise_std
        self._model.likelihood = self.likelihood

    def _root_mean_square(self) -> float:
        return math.sqrt(float(self._of_rows(_squared_residuals, MOST_ROWS).mean()))

    def _of_rows(self, read: Callable[[Predictive, Tensor], Tensor], max_rows: int) -> Tensor:
        """Return [n, ...], the results of ``read`` for held-out rows: (prediction, labels) -> [rows, ...]."""
        model, host = self._model, self._host
        numbers = evenly_spread(len(self._rows.rows), max_rows)
        with torch.no_grad(), evaluating(model), host.evaluation_autocast():
            found = [
                model.read_predictions(batch, lambda prediction, labels: {"": read(prediction, labels)})[0][""]
                for batch in self._rows.by_number(numbers)
            ]
        return torch.cat(found).double()


def needs_pilot(method: MethodConfig) -> bool:
    """Return whether the noise is measured at a short MAP estimate, because chains of the method begin far from a mode.

    A warm start by AdamW ends near one, and so do the updates before a final pass. For a method at T = 0, the noise
    only changes the weight of the prior.
    """
    needs = method.requirements
    return method.temperature > 0 and not method.num_warm_start_steps and not needs.final_pass


def pilot_updates(method: MethodConfig, num_steps: int) -> int:
    """Return the number of updates of that MAP estimate: a tenth of the run's gradients, or ``LEAST_PILOT``.

    Args:
        method: the method of the run.
        num_steps: the number of its updates.
    """
    gradients = num_steps * method.requirements.gradients_per_update * method.num_chains
    return max(LEAST_PILOT, min(num_steps, math.ceil(gradients / 10)))


def require_rows_for_noise(args: BayesianTrainingArguments, eval_dataset: Any) -> None:
    """Check that a trainer has enough held-out rows to learn the noise of a regression from.

    Raises:
        ValueError: if not; what is missing, in words.
    """
    reason, name = reason_without_rows(args, eval_dataset), heldout_name(eval_dataset)
    if reason is None and name is not None:
        count = len(eval_sets(eval_dataset)[name])
        reason = f"eval_dataset has {count} rows" if count < MIN_LABELS else None
    if reason is not None:
        raise ValueError(
            "a regression needs the standard deviation of its labels' noise. Without noise_std it is learnt from "
            f"{MIN_LABELS} held-out rows or more, and {reason}. Hold out more rows as an eval_dataset "
            "(--validation_fraction or --validation_file of hf-bayes), or give noise_std > 0"
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
    means, stds = labels.mean(0), labels.std(0)
    if not bool((stds > 0).any()):
        raise ValueError(
            f"all labels of eval_dataset are {float(labels[0, 0]):g}, expected numbers that differ: check the data"
        )
    model.likelihood = Normal(float(stds.square().mean().sqrt()))
    relative = torch.where(stds > 0, means.abs() / stds, 0.0)
    worst = int(relative.argmax())
    if relative[worst] > MAX_RELATIVE_MEAN:
        which = f"number {worst} of the labels has" if len(means) > 1 else "the labels have"
        host.warn(
            "%s mean %.3g and standard deviation %.3g. A new head begins at 0 and needs many updates to get there: "
            "subtract the mean from the labels, and divide them by the standard deviation",
            which, float(means[worst]), float(stds[worst]),
        )  # fmt: skip


def _squared_residuals(prediction: Predictive, labels: Tensor) -> Tensor:
    """Return [n] means over the members and over the numbers of a label."""
    residuals = labels.to(prediction.logits).reshape(prediction.logits.shape) - prediction.logits
    return (residuals.square() + prediction.parts["epistemic_std"].square()).mean(-1)
