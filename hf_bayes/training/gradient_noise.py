"""How noisy a minibatch gradient is where an update has a single micro-batch: its rows in two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.members.trunk import num_rows_of
from hf_bayes.models.base import BayesianModel
from hf_bayes.training.mixin import AnyTrainer


class HalvesMixin(AnyTrainer):
    """The trainer's gradients of halves; ``ChainOptimizer.observe_halves`` makes a variance of them."""

    bayesian: BayesianModel
    chains: range
    _trunk_once: Callable[..., Any]
    _seed_dropout: Callable[..., None]
    _member_chunks: Callable[[dict[str, Any]], list[slice]]
    _rows_of: Callable[[dict[str, Any], slice], dict[str, Any]]

    def _observe_halves(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """The gradient of the first half of a micro-batch's rows, beside the update's own, which stays what it is.

        Half a gradient: that of the other half is what is left. Not where masks are drawn, which the same rows would
        find different in the two passes: there both are asked for, and what masks do is part of the noise.
        """
        first, second, sizes = self._halves(inputs)
        if min(sizes) == 0:
            return
        chains, dropout = self._chains_optimizer, self.bayesian.members.trunk.has_dropout
        chunks = self._member_chunks(inputs)  # those of the update: more of half the rows would need more memory
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if not dropout:  # a few chains at a time: gradients of all would be as much memory again
                for members, grad in self._gradients_of(model, first, chunks, 0):
                    chains.observe_halves(members, [grad], sizes)
                return
            both = [
                list(self._gradients_of(model, part, chunks, number)) for number, part in enumerate((first, second))
            ]
        for (members, one), (_, other) in zip(*both, strict=True):
            chains.observe_halves(members, [one, other], sizes)

    def _gradients_of(
        self, model: nn.Module, inputs: dict[str, Any], chunks: list[slice], part: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Some chains and [m, d]: of minus the log-likelihood of their rows, as ``training_step`` takes it.

        Args:
            part: of the update, so that masks differ from those of another.
        """
        chains = self._chains_optimizer
        with self._trunk_once(inputs, shared=True):
            for members in chunks:
                self._seed_dropout(members, part)
                rows = self._rows_of(inputs, members)
                leaf = chains.leaf(members)
                with self._trunk_once(rows, shared=False):
                    with self.compute_loss_context_manager():
                        loss = model(**rows, theta=leaf, folded=not self._shared).loss
                    loss.sum().backward()
                assert leaf.grad is not None
                yield members, leaf.grad

    def _halves(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int]]:
        """A micro-batch in two, the rows of each chain for itself, and how many of these are in each part."""
        groups = 1 if self._shared else len(self.chains)
        rows = num_rows_of(inputs) // groups
        first = torch.arange(rows).repeat(groups) < rows // 2
        parts = [self.bayesian.take_rows(inputs, part.nonzero()[:, 0]) for part in (first, ~first)]
        return parts[0], parts[1], (rows // 2, rows - rows // 2)
