"""A user's likelihood in the interface of ``likelihoods.Likelihood``: what is not written is derived.

The score is the gradient of ``log_prob`` by automatic differentiation. Classes are a finite set, so their Fisher
information needs nothing else, either:

    F = sum_k p_k s_k s_k'   with   s_k = grad log p_k,      so that sqrt(p_k) s_k are columns of a root of F.

For numbers the root is computed from ``fisher``, and labels are drawn with ``draw``, if the likelihood has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_bayes.uncertainty.custom.base import ClassLogProbs, CustomLikelihood, Moments
from hf_bayes.uncertainty.likelihoods import IGNORE, Likelihood, widened


@dataclass(frozen=True)
class Adapted(Likelihood):
    """The likelihood of a head with C outputs, as the rest of the package uses it.

    Attributes:
        config: the user's likelihood.
        num_outputs: C.
    Raises:
        ValueError: for a head with another number of outputs than the likelihood needs.
    """

    has_check = True
    config: CustomLikelihood = field()  # field(): without a default, which the base class has
    num_outputs: int

    def __post_init__(self) -> None:
        wanted = self.config.num_outputs
        if wanted is not None and wanted != self.num_outputs:
            raise ValueError(
                f"the likelihood {self.config.name} needs {wanted} outputs, and the head has {self.num_outputs}: set "
                f"num_labels={wanted} in the model's config, or change the settings {self.config}"
            )
        found = self.config.predict(torch.zeros(2, self.num_outputs))
        if not isinstance(found, (Moments, ClassLogProbs)):
            raise ValueError(
                f"{self.config.name}.predict must return Moments(mean, variance) or ClassLogProbs(log_probs), got "
                f"{type(found).__name__}"
            )
        size = self.config.label_size if found.num_classes is None else found.num_classes
        for part, value in found._asdict().items():
            if value.shape != (2, size):
                raise ValueError(
                    f"{self.config.name}.predict must return {part} [n, {size}] for outputs [n, "
                    f"{self.num_outputs}], got {list(value.shape)} for n = 2: there is one for each number of a label "
                    "(label_size), or for each class"
                )

    @cached_property
    def num_classes(self) -> int | None:
        """The number K of classes; None for numbers."""
        return self.config.predict(torch.zeros(1, self.num_outputs)).num_classes

    @property
    def predicts_numbers(self) -> bool:
        return self.num_classes is None

    @property
    def lacks(self) -> frozenset[str]:
        if self.num_classes is not None:
            return frozenset()
        own = type(self.config)
        return frozenset(name for name in ("draw", "fisher") if getattr(own, name) is getattr(CustomLikelihood, name))

    # -- labels ----------------------------------------------------------------------------------------------------

    def label_shapes(self, logits_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        lead = logits_shape[:-1]
        if self.num_classes is not None:
            return (lead,)
        size = self.config.label_size
        return (lead, (*lead, 1)) if size == 1 else ((*lead, size),)

    def is_term(self, labels: Tensor) -> Tensor:
        return super().is_term(labels) if self.num_classes is None else labels != IGNORE

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        if self.num_classes is None:
            return self.config.outside(labels)
        if labels.is_floating_point():
            return torch.ones_like(labels, dtype=torch.bool)
        return (labels >= self.num_classes) | ((labels < 0) & (labels != IGNORE))

    def support(self, num_outputs: int) -> str:
        if self.num_classes is not None:
            return f"0..{self.num_classes - 1} (integers; {IGNORE} for none)"
        return self.config.support

    def target(self, labels: Tensor, lead: tuple[int, ...]) -> Tensor:
        """Return labels as the user's likelihood takes them: [*lead], or [*lead, D] for D > 1 numbers."""
        size = self.config.label_size
        return labels.reshape(lead if size == 1 else (*lead, size))

    # -- probabilities ---------------------------------------------------------------------------------------------

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        lead = tuple(logits.shape[:-1])
        outputs, target = widened(logits), self.target(labels, lead)
        if self.num_classes is not None:
            found = self.config.log_prob(outputs, target.clamp_min(0))
            self._check_terms(found, lead)
            return torch.where(target == IGNORE, 0.0, found)
        found = self.config.log_prob(outputs, target.to(outputs.dtype))
        self._check_terms(found, lead)
        return found

    def max_log_prob(self, num_outputs: int) -> float:
        return 0.0 if self.num_classes is not None else self.config.max_log_prob()

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        """Return predicted means of numbers, or centred log-probabilities of classes.

        Outputs themselves would be blurred by symmetries that only the likelihood knows, such as the order of the
        components of a mixture.
        """
        return self.config.predict(widened(logits)).identified

    def predict_classes(self, logits: Tensor) -> ClassLogProbs:
        """Return the prediction of a likelihood whose labels are classes."""
        found = self.config.predict(widened(logits))
        assert isinstance(found, ClassLogProbs)
        return found

    # -- derivatives -----------------------------------------------------------------------------------------------

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._gradient(logits, lambda outputs: self.log_prob(outputs[None], labels[None])[0])

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Return drawn labels; of the uniforms [n, C] the first D are used."""
        if self.num_classes is None:
            size = self.config.label_size
            return self.config.draw(widened(logits), uniforms[:, 0] if size == 1 else uniforms[:, :size])
        cumulative = self.predict_classes(logits).log_probs.double().exp().cumsum(-1)
        drawn = torch.searchsorted(cumulative, (uniforms[:, 0].double() * cumulative[:, -1])[:, None], right=True)[:, 0]
        return drawn.clamp_max(self.num_classes - 1)

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        outputs = widened(logits)
        if self.num_classes is None:
            values, vectors = torch.linalg.eigh(self.config.fisher(outputs))
            root: Tensor = vectors[..., column] * values[:, column].clamp_min(0).sqrt()[:, None]
            return root
        found = self.predict_classes(outputs)
        labels = torch.full((len(outputs),), column, device=outputs.device)
        return self.score(outputs, labels) * (found.log_probs[:, column] / 2).exp()[:, None]

    def num_root_columns(self, num_outputs: int) -> int:
        return num_outputs if self.num_classes is None else self.num_classes

    @staticmethod
    def _gradient(logits: Tensor, function: Any) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            outputs = widened(logits.detach().clone()).requires_grad_()
            return torch.autograd.grad(function(outputs).sum(), outputs)[0]

    # -- checks before the first step ------------------------------------------------------------------------------

    def check(self, logits: Tensor, labels: Tensor) -> None:
        """Raise a ValueError if ``log_prob`` is no sum over terms, or not finite, at outputs [M, n, C] of the model."""
        logits = logits[:, :8]
        labels = labels[:8]
        spread = labels.expand(len(logits), *labels.shape)
        together = self.log_prob(logits, spread)
        alone = torch.cat([self.log_prob(logits[:, i : i + 1], spread[:, i : i + 1]) for i in range(len(labels))], 1)
        # 1e-3 relative: float32 sums in another order differ by 1e-6, and a mean over rows by its whole size
        if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError(
                f"{self.name}.log_prob of a row changes with the other rows of the batch ({float(alone[0, 0]):.4g} "
                f"alone, {float(together[0, 0]):.4g} among {len(labels)}), so the terms of batches do not add up to "
                "the N of the data: return one number for each row, and no mean or sum over rows"
            )
        if not bool(together.isfinite().all()):
            raise ValueError(
                f"{self.name}.log_prob is not finite for the outputs at the start of the run: {_values(together)}. "
                f"{self.config.advice or 'Check the scale of the labels and the settings of the likelihood'}"
            )
        score = self.score(logits.flatten(0, 1), spread.flatten(0, 1))
        if not bool(score.isfinite().all()):
            raise ValueError(
                f"the gradient of {self.name}.log_prob in the outputs is not finite at the start of the run: "
                f"{_values(score)}. Where a branch of torch.where is infinite, clamp its argument"
            )

    def _check_terms(self, found: Tensor, lead: tuple[int, ...]) -> None:
        if tuple(found.shape) != lead:
            raise ValueError(
                f"{self.name}.log_prob must return one number for each likelihood term, {list(lead)} for outputs "
                f"{[*lead, self.num_outputs]}, got {list(found.shape)}: N counts terms, and a label of several numbers "
                "is one term. Sum over the numbers of a label (.sum(-1)), and not over rows"
            )


def _values(tensor: Tensor) -> list[float]:
    """Return up to three values that are not finite."""
    return [float(value) for value in tensor[~tensor.isfinite()][:3]]
