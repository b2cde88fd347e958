"""log p(y | logits) of one term, for every member: what a model's outputs mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


class Likelihood(Protocol):
    """log p(labels | logits), term by term, and which labels are terms at all."""

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [M, N, C], labels [M, N] or [M, N, C] -> [M, N] nats in float32 or better; 0 where not a term."""
        ...

    def is_term(self, labels: Tensor) -> Tensor:
        """labels [..., N] (or [..., N, C]) -> bool [..., N]."""
        ...

    def label_shapes(self, answers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes that labels of logits of shape ``answers`` [..., C] may have."""
        ...

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        """bool of the shape of ``labels``: which of them no likelihood of ``num_outputs`` outputs is defined for."""
        ...

    def support(self, num_outputs: int) -> str:
        """The others, in words."""
        ...

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        """logits [M, N, C] without what the likelihood does not see of them -> [M, N, C], or [M, N, k].

        Args:
            columns: [N, k], the outputs of each term that are wanted; None: all.
        """
        ...

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [n, C] and labels of n terms -> [n, C]: the gradient of ``log_prob`` in the logits."""
        ...

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """logits [n, C] -> labels drawn from the model, by inverting their distribution at ``uniforms``.

        Args:
            uniforms: on [0, 1), of the shape that labels have: [n], or [n, C] where ``labels_per_output``.
        """
        ...

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        """logits [n, C] -> [n, C]: a column of a root of each term's Fisher information in the logits."""
        ...

    def num_root_columns(self, num_outputs: int) -> int:
        """Columns that ``fisher_root`` has for C outputs."""
        ...

    @property
    def labels_per_output(self) -> bool:
        """Whether a label has a value for each output, rather than being the index of one."""
        ...


@dataclass(frozen=True)
class Categorical:
    """Class indices; -100 is no term."""

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        nll = F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1), ignore_index=IGNORE, reduction="none")
        return -nll.view(labels.shape)

    def is_term(self, labels: Tensor) -> Tensor:
        return labels != IGNORE

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        """A softmax does not see what is added to all logits: all of them less their mean, some as log-probabilities.

        The mean over a vocabulary would be of words that nobody predicts, and each column would be about those.
        """
        logits = widened(logits)
        if columns is None:
            return logits - logits.mean(-1, keepdim=True)
        return _gathered(logits, columns) - logits.logsumexp(-1, keepdim=True)

    def label_shapes(self, answers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (answers[:-1],)

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        if labels.is_floating_point():
            return torch.ones_like(labels, dtype=torch.bool)
        return (labels >= num_outputs) | ((labels < 0) & (labels != IGNORE))

    def support(self, num_outputs: int) -> str:
        return f"0..{num_outputs - 1} (integers; {IGNORE} for none)"

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        away = -widened(logits).softmax(-1)
        away[torch.arange(len(labels), device=labels.device), labels] += 1
        return away

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        # in pieces, since float64 steps of all terms would take more memory than a training step's logits
        drawn = []
        for some, uniform in zip(logits.chunk(8), uniforms.chunk(8), strict=True):
            steps = widened(some).softmax(-1).double().cumsum(-1)
            # the last class whatever rounding has left of 1
            where = torch.searchsorted(steps, (uniform.double() * steps[:, -1])[:, None], right=True)[:, 0]
            drawn.append(where.clamp_max(logits.shape[-1] - 1))
        return torch.cat(drawn)

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        """A Cholesky factor (Tanabe and Sagae 1992): diag(p) - p p' has rank C - 1.

        With q_k = p_k + ... + p_C, what is left for class k and the later ones, column k is
        (p_k q_{k+1} / q_k)^1/2 (e_k - p_{>k} / q_{k+1}).
        """
        probs = widened(logits).softmax(-1)
        here, later = probs[:, column], probs[:, column + 1 :]
        # summed anew, and not 1 - ..., which would be rounding where nearly all is gone; 0 / 0 where all of it is is 0
        left = later.sum(-1)
        smallest = torch.finfo(probs.dtype).tiny
        scale = (here * (left / (here + left).clamp_min(smallest))).sqrt()
        root = torch.zeros_like(probs)
        root[:, column] = scale
        root[:, column + 1 :] = -scale[:, None] * (later / left.clamp_min(smallest)[:, None])
        return root

    def num_root_columns(self, num_outputs: int) -> int:
        return max(1, num_outputs - 1)  # of a single class a column of zeros

    @property
    def labels_per_output(self) -> bool:
        return False


@dataclass(frozen=True)
class Bernoulli:
    """Independent binary labels [.., C] in {0, 1}; an example is one term."""

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        return -F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").sum(-1)

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        return _gathered(widened(logits), columns)

    def is_term(self, labels: Tensor) -> Tensor:
        return torch.ones(labels.shape[:-1], dtype=torch.bool, device=labels.device)

    def label_shapes(self, answers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (answers,)

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        # there the cross entropy has no lower bound, and exp(-U) is no density
        return ~((labels >= 0) & (labels <= 1))

    def support(self, num_outputs: int) -> str:
        return f"0 to 1 ({IGNORE} has no meaning among several labels)"

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        return labels.to(widened(logits).dtype) - widened(logits).sigmoid()

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        return (uniforms < widened(logits).sigmoid()).to(widened(logits).dtype)

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        probs = widened(logits).sigmoid()[:, column]
        root = torch.zeros_like(widened(logits))
        root[:, column] = (probs * (1 - probs)).sqrt()
        return root

    def num_root_columns(self, num_outputs: int) -> int:
        return num_outputs

    @property
    def labels_per_output(self) -> bool:
        return True


@dataclass(frozen=True)
class Normal:
    """y = logits + N(0, noise_std^2), the noise known.

    Attributes:
        noise_std: in units of the labels.
    """

    noise_std: float

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        z = (labels.to(logits.dtype).reshape(logits.shape) - logits) / self.noise_std
        return (-0.5 * z.square() - math.log(self.noise_std) - 0.5 * math.log(2 * math.pi)).sum(-1)

    def identified(self, logits: Tensor, columns: Tensor | None) -> Tensor:
        return _gathered(widened(logits), columns)

    def is_term(self, labels: Tensor) -> Tensor:
        lead = labels.shape if labels.ndim == 1 else labels.shape[:-1]
        return torch.ones(lead, dtype=torch.bool, device=labels.device)

    def label_shapes(self, answers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (answers, answers[:-1]) if answers[-1] == 1 else (answers,)

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        return ~labels.isfinite()

    def support(self, num_outputs: int) -> str:
        return "the finite numbers"

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        return (labels.to(logits.dtype).reshape(logits.shape) - logits) / self.noise_std**2

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        # a uniform of exactly 0 would be minus infinity
        noise = torch.special.ndtri(uniforms.double().clamp_min(2.0**-60)).to(widened(logits).dtype)
        return widened(logits) + self.noise_std * noise

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        root = torch.zeros_like(widened(logits))
        root[:, column] = 1 / self.noise_std
        return root

    def num_root_columns(self, num_outputs: int) -> int:
        return num_outputs

    @property
    def labels_per_output(self) -> bool:
        return True


def refuse_labels(
    likelihood: Likelihood, labels: Tensor, num_outputs: int, *, where: str = "the batch", first: int = 0
) -> None:
    """Raise where ``labels`` [B, ...] hold one that ``likelihood`` is not defined for, naming its row.

    Args:
        where: what the caller calls the rows.
        first: number of the first of them.
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


def _gathered(logits: Tensor, columns: Tensor | None) -> Tensor:
    """[M, N, C] -> [M, N, k] of ``columns`` [N, k]; all of them if there are none."""
    return logits if columns is None else logits.gather(2, columns.expand(len(logits), -1, -1))


def widened(logits: Tensor) -> Tensor:
    """In float32, or float64 where they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def next_tokens(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """[B, T] -> [B, T]: the label of position t is the token at t + 1; the last position and padding have none.

    A row's first token has padding before it or nothing, as the batch will have it, and is predicted by neither.

    Args:
        attention_mask: [B, T], 0 at padding, or [B, past + T]; others (4-dimensional ones) tell nothing of padding.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if attention_mask is None or attention_mask.ndim != 2:
        return targets
    return targets.masked_fill(attention_mask[:, -labels.shape[1] :] == 0, IGNORE)
