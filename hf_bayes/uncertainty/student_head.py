"""The head of a distilled student: from the last hidden state of one network to a mixture and its uncertainties.

A student predicts the mixture q = mean_m p_m of a posterior's members, and how far the members disagree, from one
forward pass of one network (compare Malinin, Mlodozeniec and Gales 2020, Ensemble distribution distillation). With h
the last hidden state, |h| its root mean square, and f the output layer of the network,

    a = gelu(W norm(h) + b),
    q = softmax(f(h + |h| D a) / t(a)),        log t(a) = c . a + c_0,
    TU = H[q],   EU = TU sigmoid(s . [a, log TU] + s_0),   AU = TU - EU.

So 0 <= EU <= TU and TU = AU + EU hold by construction, and TU is the entropy of the probabilities that are returned.
If only layers before f are random, the mean of the members' logits is f at the mean of their hidden states: it lies in
the family. The temperature t accounts for the spread around that mean. At the start D = c = 0, and q is the prediction
of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_bayes.uncertainty.decomposition import Prediction, Uncertainty
from hf_bayes.uncertainty.likelihoods import widened

_SMALLEST_ENTROPY = 1e-12
"""A lower bound on the entropy in nats, inside its logarithm: a certain prediction has entropy 0."""


class StudentHead(nn.Module):
    """The trainable part of a student, in float32.

    Args:
        hidden_size: length of h.
        width: length of a.
        share: the share EU / TU that an untrained head predicts, above 0 and below 1.
    """

    def __init__(self, hidden_size: int, width: int, share: float = 0.5) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.features = nn.Linear(hidden_size, width)
        self.shift = nn.Linear(width, hidden_size, bias=False)
        self.log_temperature = nn.Linear(width, 1)
        self.log_odds = nn.Linear(width + 1, 1)
        for layer in (self.shift, self.log_temperature, self.log_odds):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        nn.init.constant_(self.log_odds.bias, math.log(share / (1 - share)))

    def forward(self, hidden: Tensor, output: Callable[[Tensor], Tensor]) -> Prediction:
        """Return the prediction of the mixture for hidden states.

        Args:
            hidden: [n, h].
            output: [n, h] -> logits [n, C], the output layer of the network.
        """
        state = hidden.float()
        a = F.gelu(self.features(F.layer_norm(state, state.shape[-1:])))
        size = state.square().mean(-1, keepdim=True).sqrt()
        logits = widened(output((state + size * self.shift(a)).to(hidden.dtype)))
        log_probs = (logits * torch.exp(-self.log_temperature(a))).log_softmax(-1)
        total = entropy(log_probs)
        # the disagreement is fitted for given probabilities, so that it cannot bend them
        known = total.detach().clamp_min(_SMALLEST_ENTROPY)
        odds = self.log_odds(torch.cat([a, known.log()[:, None].float()], -1))[:, 0]
        epistemic = total.detach() * odds.sigmoid()
        aleatoric = total - epistemic
        return Prediction(log_probs, Uncertainty(aleatoric + epistemic, aleatoric, epistemic))


def entropy(log_probs: Tensor) -> Tensor:
    """Return the [...] entropy in nats of [..., C] log-probabilities; -inf is a probability of 0."""
    finite = log_probs.clamp_min(torch.finfo(log_probs.dtype).min)
    return -(finite.exp() * finite).sum(-1).clamp_max(0)


def head_shapes(hidden_size: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a ``StudentHead``."""
    with torch.device("meta"):
        head = StudentHead(hidden_size, width)
    return {name: tuple(value.shape) for name, value in head.state_dict().items()}


def head_from(tensors: Mapping[str, Tensor]) -> StudentHead:
    """Return the head with these tensors, frozen."""
    width, hidden_size = tensors["features.weight"].shape
    head = StudentHead(hidden_size, width)
    head.load_state_dict(dict(tensors))
    return head.eval().requires_grad_(False)
