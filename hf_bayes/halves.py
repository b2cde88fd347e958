"""How noisy a minibatch gradient is where an update has a single micro-batch: its rows in two halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_bayes.model import BayesianModel

if TYPE_CHECKING:  # a mixin: put before any Trainer, it finds that one's methods
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class HalvesMixin(_Trainer):
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
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            grads = [
                self._gradient_of(model, part, number) for number, part in enumerate((first, second)[: 1 + dropout])
            ]
        chains.observe_halves(slice(0, len(self.chains)), grads, sizes)

    def _gradient_of(self, model: nn.Module, inputs: dict[str, Any], part: int) -> Tensor:
        """[M, d]: of minus the log-likelihood of rows of all chains, as ``training_step`` takes it.

        Args:
            part: of the update, so that masks differ from those of another.
        """
        chains = self._chains_optimizer
        found = torch.empty_like(self.bayesian.theta)
        with self._trunk_once(inputs, shared=True):
            for members in self._member_chunks(inputs):
                self._seed_dropout(members, part)
                rows = self._rows_of(inputs, members)
                leaf = chains.leaf(members)
                with self._trunk_once(rows, shared=False):
                    with self.compute_loss_context_manager():
                        loss = model(**rows, theta=leaf, folded=not self._shared).loss
                    loss.sum().backward()
                assert leaf.grad is not None
                found[members] = leaf.grad
        return found

    def _halves(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], tuple[int, int]]:
        """A micro-batch in two, the rows of each chain for itself, and how many of these are in each part."""
        groups = 1 if self._shared else len(self.chains)
        count = next(v for v in inputs.values() if isinstance(v, Tensor)).shape[0]
        rows = count // groups
        first = torch.arange(rows).repeat(groups) < rows // 2

        def part(chosen: Tensor) -> dict[str, Any]:
            return {
                name: value[chosen.to(value.device)]
                if isinstance(value, Tensor) and value.shape[:1] == (count,)
                else value
                for name, value in inputs.items()
            }

        return part(first), part(~first), (rows // 2, rows - rows // 2)
