"""The likelihoods log p(y | logits): their base class, the categorical and the normal one.

A likelihood defines the meaning of a model's outputs. All its functions work on likelihood terms, for every member: a
term is a token, an example or a number, depending on the task.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


class LikelihoodSettings(Protocol):
    """The settings of a likelihood that was given with ``likelihood=``, see ``custom.base.LikelihoodConfig``."""

    @property
    def name(self) -> str: ...

    @property
    def stored_as(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def advice(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


class Likelihood(ABC):
    """A likelihood: log p(labels | logits) per term, and everything derived from it.

    The defaults are right for a term of one part whose labels [..., C] hold one value for each output.

    Attributes:
        config: the settings of a likelihood that was given with ``likelihood=``; None for the likelihood of a head.
        noise_std: the standard deviation of normal noise, in units of the labels, which a fit may learn; None for other
            likelihoods.
        texts_per_row: the number of texts in a row of the data.
    """

    config: LikelihoodSettings | None = None
    noise_std: float | None = None
    texts_per_row: int = 1

    @property
    def name(self) -> str:
        """The name of the likelihood, for messages."""
        return type(self).__name__ if self.config is None else self.config.name

    @property
    def predicts_classes(self) -> bool:
        """True if the outputs are the logits of classes, of which each term is one."""
        return False

    @property
    def predicts_numbers(self) -> bool:
        """True if the labels are numbers, which have a density and no probability."""
        return False

    @property
    def lacks(self) -> frozenset[str]:
        """The needs of curvature that the likelihood does not meet: "draw", "fisher"."""
        return frozenset()

    @property
    def has_check(self) -> bool:
        """True if ``check`` examines anything."""
        return False

    def check(self, logits: Tensor, labels: Tensor) -> None:  # noqa: B027
        """Raise a ValueError if ``log_prob`` is no finite sum over terms, at outputs [M, n, C] of the model."""

    @abstractmethod
    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the log-likelihood of each term in nats, [M, N], in float32 or better.

        Args:
            logits: [M, N, C].
            labels: [M, N] or [M, N, C]; a label that is not a term gives 0.
        """

    def log_prob_parts(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return [M, N, P], the log-likelihoods of a term's parts, without weights of rows.

        Predictions average each part over members. Several labels of an input are P parts, every other term is one.
        """
        return self.log_prob(logits, labels)[..., None]

    @abstractmethod
    def max_log_prob(self, num_outputs: int) -> float:
        """Return the largest possible log-likelihood of a term, given the number of outputs."""

    def is_term(self, labels: Tensor) -> Tensor:
        """Return [..., N] bool: True where a label is a likelihood term. ``labels`` is [..., N] or [..., N, C]."""
        # [N] without columns may be no shape of these labels; counted here, it is refused in words beside the logits
        return torch.ones(labels.shape[:-1] or labels.shape, dtype=torch.bool, device=labels.device)

    def weights(self, labels: Tensor) -> Tensor | None:
        """Return [..., N], the weights of the terms whose labels are [..., N, C]; None if each term counts once."""
        return None

    @abstractmethod
    def label_shapes(self, logits_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that labels may have, given the shape [..., C] of the logits."""

    @abstractmethod
    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        """Return a bool tensor of the shape of ``labels``: True where a label is not in ``support(num_outputs)``."""

    @abstractmethod
    def support(self, num_outputs: int) -> str:
        """Return the set of permitted labels in words."""

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        """Return logits [M, N, C] without the part that the likelihood ignores; the result is [M, N, C] or [M, N, k].

        Args:
            columns: [N, k], the wanted outputs of each term; None for all outputs.
        """
        return gathered(widened(logits), columns)

    @abstractmethod
    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return [n, C]: the gradient of ``log_prob`` in the logits [n, C], for the labels of n terms."""

    @abstractmethod
    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Return labels drawn from the model, by inverting the distribution function of logits [n, C] at ``uniforms``.

        Args:
            uniforms: numbers in [0, 1), in the shape of the labels: [n], or [n, C] if ``labels_per_output``.
        """

    @abstractmethod
    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        """Return [n, C]: one column of a root of each term's Fisher information in the logits [n, C]."""

    def num_root_columns(self, num_outputs: int) -> int:
        """Return the number of columns of ``fisher_root`` for C outputs."""
        return num_outputs

    @property
    def labels_per_output(self) -> bool:
        """True if a label has one value per output, False if a label is the index of an output."""
        return True


@dataclass(frozen=True)
class Categorical(Likelihood):
    """The categorical likelihood. Labels are class indices; a label of -100 is not a term."""

    predicts_classes = True

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        nll = F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1).long(), ignore_index=IGNORE, reduction="none")
        return -nll.view(labels.shape)

    def max_log_prob(self, num_outputs: int) -> float:
        return 0.0

    def is_term(self, labels: Tensor) -> Tensor:
        return labels != IGNORE

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        """Return logits freed of their common constant, because softmax ignores a constant added to all logits.

        If all columns are wanted, the mean of the logits is subtracted. Otherwise the wanted columns are returned as
        log-probabilities. Subtracting the mean over a vocabulary would make each column depend on the many words of
        negligible probability.
        """
        logits = widened(logits)
        if columns is None:
            return logits - logits.mean(-1, keepdim=True)
        return gathered(logits, columns) - logits.logsumexp(-1, keepdim=True)

    def label_shapes(self, logits_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (logits_shape[:-1],)

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        if labels.is_floating_point():
            return torch.ones_like(labels, dtype=torch.bool)
        return (labels >= num_outputs) | ((labels < 0) & (labels != IGNORE))

    def support(self, num_outputs: int) -> str:
        return f"0..{num_outputs - 1} (integers; {IGNORE} for none)"

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        score = -widened(logits).softmax(-1)
        score[torch.arange(len(labels), device=labels.device), labels.long()] += 1  # bool would be a mask
        return score

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        # in pieces: float64 sums of all terms together would take more memory than the logits of a training step
        drawn = []
        for piece, uniform in zip(logits.chunk(8), uniforms.chunk(8), strict=True):
            cumulative = widened(piece).softmax(-1).double().cumsum(-1)
            # multiplied by the last sum, because rounding may leave it different from 1
            classes = torch.searchsorted(cumulative, (uniform.double() * cumulative[:, -1])[:, None], right=True)[:, 0]
            drawn.append(classes.clamp_max(logits.shape[-1] - 1))
        return torch.cat(drawn)

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        """Return a column of the Cholesky factor of diag(p) - p p', which has rank C - 1 (Tanabe and Sagae 1992).

        With the tail sums q_k = p_k + ... + p_C, column k is (p_k q_{k+1} / q_k)^1/2 (e_k - p_{>k} / q_{k+1}).
        """
        probs = widened(logits).softmax(-1)
        this, later = probs[:, column], probs[:, column + 1 :]
        # summed directly: 1 minus the earlier probabilities would be rounding error where the tail is small. The lower
        # bounds turn 0 / 0 into 0.
        later_sum = later.sum(-1)
        smallest = torch.finfo(probs.dtype).tiny
        scale = (this * (later_sum / (this + later_sum).clamp_min(smallest))).sqrt()
        root = torch.zeros_like(probs)
        root[:, column] = scale
        root[:, column + 1 :] = -scale[:, None] * (later / later_sum.clamp_min(smallest)[:, None])
        return root

    def num_root_columns(self, num_outputs: int) -> int:
        return max(1, num_outputs - 1)  # for a single class there is one column of zeros

    @property
    def labels_per_output(self) -> bool:
        return False


@dataclass(frozen=True)
class Normal(Likelihood):
    """The normal likelihood of numbers y = logits + N(0, noise_std^2), with known noise.

    Attributes:
        noise_std: standard deviation of the noise, in units of the labels.
    """

    predicts_numbers = True
    noise_std: float = field()  # field() removes the default that the base class would give

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        z = (labels.to(logits.dtype).reshape(logits.shape) - logits) / self.noise_std
        return (-0.5 * z.square() - math.log(self.noise_std) - 0.5 * math.log(2 * math.pi)).sum(-1)

    def max_log_prob(self, num_outputs: int) -> float:
        """Return the density where the label is predicted exactly: a density is not bounded by 1."""
        zeros = torch.zeros(1, 1, num_outputs)
        return float(self.log_prob(zeros, zeros))

    def label_shapes(self, logits_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (logits_shape, logits_shape[:-1]) if logits_shape[-1] == 1 else (logits_shape,)

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        return ~labels.isfinite()

    def support(self, num_outputs: int) -> str:
        return "the finite numbers"

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        return (labels.to(logits.dtype).reshape(logits.shape) - logits) / self.noise_std**2

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        # a uniform of exactly 0 would give minus infinity
        noise: Tensor = torch.special.ndtri(uniforms.double().clamp_min(2.0**-60)).to(widened(logits).dtype)
        return widened(logits) + self.noise_std * noise

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        root = torch.zeros_like(widened(logits))
        root[:, column] = 1 / self.noise_std
        return root


def refuse_labels(
    likelihood: Likelihood, labels: Tensor, num_outputs: int, *, where: str = "the batch", first: int = 0
) -> None:
    """Raise an error that names the first row of ``labels`` [B, ...] whose label is outside the likelihood's support.

    Args:
        num_outputs: C.
        where: the caller's name for the rows, for the message.
        first: number of the first row.
    """
    outside = likelihood.outside(labels, num_outputs)
    if not bool(outside.any()):
        return
    row = int(outside.nonzero()[0, 0])
    raise ValueError(
        f"row {first + row} of {where} has a label outside {likelihood.support(num_outputs)}: "
        f"{labels[row][outside[row]][:5].tolist()}. Check the labels, the model's num_labels and problem_type, "
        "or the tokenizer against the model's vocabulary"
    )


def gathered(logits: Tensor, columns: Tensor | None) -> Tensor:
    """Return the ``columns`` [N, k] of logits [M, N, C], as [M, N, k]; all columns if ``columns`` is None."""
    return logits if columns is None else logits.gather(2, columns.expand(len(logits), -1, -1))


def widened(logits: Tensor) -> Tensor:
    """Return the logits in float32; float64 logits stay float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def next_tokens(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return [B, T] targets: the target of position t is the label at t + 1, and -100 at the last position.

    It is -100, too, where either token is padding: padding predicts nothing, and no likelihood term is padding.

    Args:
        labels: [B, T].
        attention_mask: [B, T] or [B, past + T], 0 at padding. A mask with other dimensions (such as 4) is ignored.
    """
    if attention_mask is not None and attention_mask.ndim == 2:
        is_padding = attention_mask[:, -labels.shape[1] :] == 0
        labels = labels.masked_fill(is_padding | F.pad(is_padding[:, :-1], (1, 0)), IGNORE)
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)
