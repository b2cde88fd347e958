"""The loss of a student, and its training: AdamW with a falling rate, stopped by held-out terms."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from hf_bayes.fit.distil_targets import Targets
from hf_bayes.uncertainty.decomposition import Prediction
from hf_bayes.uncertainty.student_head import StudentHead

UPDATES = 1500
BATCH = 256
LEARNING_RATE = 2e-3
FLOOR = 1e-5
"""The uncertainty in nats below which differences do not count."""
NUM_CHECKS = 30
MAX_JUDGED = 2048
"""The largest number of held-out terms that a check of the loss takes."""
PATIENCE = 6
"""Checks without a lower held-out loss, after which training stops."""

Output = Callable[[Tensor], Tensor]


def kl(targets: Targets, prediction: Prediction) -> Tensor:
    """Return [n] KL(mixture || student) in nats, with the classes that were not kept as one class."""
    known = prediction.log_probs.gather(-1, targets.classes)
    probs = targets.log_probs.exp()
    found = (probs * (targets.log_probs - known).masked_fill(probs == 0, 0.0)).sum(-1)
    if targets.classes.shape[-1] == prediction.log_probs.shape[-1]:
        return found
    rest, known_rest = (1 - probs.sum(-1)).clamp_min(1e-6), (1 - known.exp().sum(-1)).clamp_min(1e-6)
    return found + rest * (rest.log() - known_rest.log())


def deviance(value: Tensor, predicted: Tensor, floor: float) -> Tensor:
    """Return [n] value / predicted - log(value / predicted) - 1: a proper score of the mean of a positive number.

    It is the deviance of the gamma distribution, half of it. It depends on the ratio only, so terms with small and with
    large uncertainties count alike, and its minimum in ``predicted`` is the conditional mean.

    Args:
        floor: added to both; uncertainties far below it count as equal.
    """
    ratio = (value.clamp_min(0) + floor) / (predicted.clamp_min(0) + floor)
    return ratio - ratio.log() - 1


def losses(head: StudentHead, targets: Targets, output: Output) -> Tensor:
    """Return [n] the loss of each term: of the probabilities, and of the disagreement at these probabilities."""
    prediction: Prediction = head(targets.hidden, output)
    _, aleatoric, epistemic = prediction.uncertainty
    mixture = kl(targets, prediction) + deviance(targets.aleatoric, aleatoric + epistemic - epistemic.detach(), FLOOR)
    return mixture + deviance(targets.epistemic, epistemic, FLOOR)


def train(targets: Targets, heldout: Targets, output: Output, *, width: int, seed: int, progress: bool) -> StudentHead:
    """Return the head with the lowest held-out loss.

    Args:
        output: the output layer of the network, [n, h] -> [n, C].
        seed: the seed of the first weights, and of the order of the terms.
    """
    generator = torch.Generator().manual_seed(seed)
    share = float((targets.epistemic.sum() / (targets.epistemic + targets.aleatoric).sum()).clamp(0.01, 0.99))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = StudentHead(targets.hidden.shape[-1], width, share).to(targets.hidden.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / UPDATES)
    best, best_state, since = math.inf, copy.deepcopy(head.state_dict()), 0
    every, judged = UPDATES // NUM_CHECKS, heldout.at(torch.arange(min(len(heldout.row), MAX_JUDGED)))
    bar = tqdm(range(UPDATES), desc="student", disable=not progress, leave=False)
    for step in bar:
        index = torch.randint(len(targets.row), (BATCH,), generator=generator).to(targets.row.device)
        loss = losses(head, targets.at(index), output).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % every == 0:
            found = heldout_loss(head, judged, output)
            bar.set_postfix(loss=f"{found:.4f}")
            if found < best:
                best, best_state, since = found, copy.deepcopy(head.state_dict()), 0
            elif (since := since + 1) >= PATIENCE:
                break
    bar.close()
    head.load_state_dict(best_state)
    return head.eval().requires_grad_(False)


@torch.no_grad()
def heldout_loss(head: StudentHead, targets: Targets, output: Output) -> float:
    """Return the mean loss of the held-out terms."""
    pieces = [losses(head, targets.at(index), output) for index in chunks(targets)]
    return float(torch.cat(pieces).mean())


def chunks(targets: Targets) -> list[Tensor]:
    """Return the numbers of the terms in pieces of a few batches."""
    return list(torch.arange(len(targets.row), device=targets.row.device).split(4 * BATCH))
