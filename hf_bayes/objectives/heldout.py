"""The score of draws on held-out rows: the NLL of their mixture, and its gradient in every draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from hf_bayes.core.types import RowScores
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.passes import value_and_gradient

Nats = TypeVar("Nats", float, Tensor)


class HeldOutRows:
    """The held-out rows of a run, and the scores of draws on them, see ``core.types.DataPasses``.

    Args:
        batches: numbers of rows -> these rows, in this order, in batches.
        num_rows: the number of held-out rows.
        mesh: the processes. Those that share chains share the rows, too, and each returns the result for all rows.
        context: the context of each forward pass, for autocast.
        hide: True shows no progress bar; None shows one only on a terminal.
    Raises:
        ValueError: if the model does not predict by the networks of its members.
    """

    def __init__(
        self,
        model: BayesianModel,
        batches: Callable[[Sequence[int]], Iterable[dict[str, Any]]],
        num_rows: int,
        *,
        mesh: ChainMesh | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        hide: bool | None = None,
    ) -> None:
        if not model.predictor.mixes_networks:
            raise ValueError(
                "held-out rows judge the networks with the weights of draws, got a model whose prediction is "
                f"{model.predictor.prediction!r}: call linearise(None) first"
            )
        self.model, self.batches, self.num_rows = model, batches, num_rows
        self.mesh, self.context = mesh, context
        self._bar = tqdm(desc="held-out rows", unit="pass", disable=hide, leave=False)

    def close(self) -> None:
        """Close the progress bar."""
        self._bar.close()

    def of_mixture(
        self, theta: Tensor, part: str, *, num_members: int | None = None, gradient: bool = False
    ) -> tuple[float, Tensor | None]:
        """Return the NLL of the mixture of draws ``theta`` [M, d], in nats per term, and its gradient [M, d]."""
        model = self.model
        theta = theta.to(model.theta)
        rows = self._own(self._rows(part))
        sums = torch.zeros(3, dtype=torch.float64, device=theta.device)
        grad = torch.zeros_like(theta) if gradient else None
        with model.showing(theta), evaluating(model):
            for batch, log_lik in self._log_liks(rows):
                mixture = log_lik.double().logsumexp(-1) - math.log(len(theta))
                single = log_lik.double().mean(-1)
                sums += torch.stack([sums.new_tensor(len(mixture)), -mixture.sum(), -single.sum()])
                if grad is not None:
                    self._add_gradient(grad, theta, batch, log_lik)
        if self.mesh is not None:
            self.mesh.sum_over_data(sums)
            if grad is not None:
                self.mesh.sum_over_data(grad)
        nats_mixed, nats_single = (float(total / sums[0]) for total in sums[1:])
        nats = _of_members(nats_mixed, nats_single, len(theta), num_members)
        self._bar.update()
        self._bar.set_postfix(nats=f"{nats:.4f}")
        return nats, None if grad is None else (grad / sums[0].to(grad)).cpu()

    def by_row(
        self, theta: Tensor, part: str, *, num_groups: int = 1, num_members: int | None = None
    ) -> list[RowScores]:
        """Return the scores of every row, in the order of the rows, for each group of draws."""
        model, theta = self.model, theta.to(self.model.theta)
        whole = self._rows(part)
        rows = self._own(whole)
        numbers = torch.tensor(range(len(whole)))[slice(None) if self.mesh is None else self._share]
        nll = torch.zeros(num_groups, len(whole), dtype=torch.float64)
        terms, start = torch.zeros(len(whole), dtype=torch.int64), 0
        with model.showing(theta), evaluating(model):
            for batch, log_lik in self._log_liks(rows):
                counts = model.terms_per_row(batch).cpu()
                places = numbers[start : start + len(counts)]
                start += len(counts)
                groups = log_lik.double().unflatten(-1, (num_groups, -1))
                size = groups.shape[-1]
                mixed, single = math.log(size) - groups.logsumexp(-1), -groups.mean(-1)
                nats = _of_members(mixed, single, size, num_members).sum(1)
                nll.index_add_(1, places.repeat_interleave(counts), nats.T.cpu())
                terms[places] = counts
        if self.mesh is not None:
            nll, terms = (self.mesh.sum_over_data(sums.to(theta.device)).cpu() for sums in (nll, terms))
        self._bar.update()
        return [RowScores(row.numpy(), terms.numpy()) for row in nll]

    def _rows(self, part: str) -> range:
        """Return the numbers of the rows of a part."""
        first, step = {"all": (0, 1), "even": (0, 2), "odd": (1, 2)}[part]
        return range(first, self.num_rows, step)

    def _own(self, rows: range) -> range:
        """Return the rows that this process scores."""
        return rows if self.mesh is None else rows[self._share]

    @property
    def _share(self) -> slice:
        assert self.mesh is not None
        return slice(self.mesh.data_rank, None, self.mesh.data_size)

    def _log_liks(self, rows: range) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield batches of these rows, and log-likelihoods [n, P, M] of the members that the model shows.

        n is the number of terms. A term has P independent factors (``Likelihood.log_prob_parts``), such as the labels
        of a row with several labels, and each factor has a mixture of its own.
        """
        for batch in self.batches(rows) if len(rows) else ():
            with torch.no_grad(), self.context():
                log_lik = self.model.evaluate_batch(batch)[0]["member_log_lik"]
            yield batch, log_lik

    def _add_gradient(self, grad: Tensor, theta: Tensor, batch: dict[str, Any], log_lik: Tensor) -> None:
        """Add -sum_t r_mt d log p_m(t), with r_mt = p_m(t) / sum_k p_k(t), the share of draw m in factor t."""
        shares = log_lik.to(theta).softmax(-1).movedim(-1, 0)
        size = len(next(iter(self.model.passes(batch))))
        for start in range(0, len(theta), size):
            some = slice(start, start + size)

            def loss_of(leaf: Tensor, weights: Tensor = shares[some]) -> Tensor:
                with self.context():
                    return self.model.log_lik(leaf, batch, folded=False, weights=weights).loss

            found = value_and_gradient(loss_of, theta[some])[1]
            assert found is not None
            grad[some] += found


def _of_members(mixed: Nats, single: Nats, num_draws: int, num_members: int | None) -> Nats:
    """Return the estimated NLL of a mixture of ``num_members`` draws; None is ``num_draws``.

    Args:
        mixed: the NLL of the mixture of ``num_draws`` draws.
        single: the mean NLL of single draws.
    """
    if num_members is None or num_members == num_draws or num_draws == 1:
        return mixed
    limit = (num_draws * mixed - single) / (num_draws - 1)
    return limit + (single - limit) / num_members
