"""What a run says of itself before it and while it runs (at its end: ``diagnosis``)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.layout import grouped
from hf_bayes.core.types import Kernel
from hf_bayes.diagnostics.verdict import MAX_UNMOVED
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import IndependentPrior
from hf_bayes.distributions.priors import lora_prior_ratio
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.inherited_prior import Inherited
from hf_bayes.objectives.data_rows import is_stream
from hf_bayes.training.chain_optimizer import ChainOptimizer
from hf_bayes.training.mixin import AnyTrainer

logger = logging.getLogger("hf_bayes.training.trainer")

LOOKED_AT, LOOKS = 8, 4
"""Rows, spread over the training data, and how often each is looked at to see whether it changes."""


class ReportingMixin(AnyTrainer):
    """The trainer's announcement and logs."""

    bayesian: BayesianModel
    method: MethodConfig
    chains: range
    mesh: ChainMesh
    prior: IndependentPrior | Gaussian
    inherited: Inherited | None
    num_data: float
    num_terms: int | None
    num_rows: int | None
    optimizer_of_chains: ChainOptimizer | None
    _losses: Tensor | None
    _has_noise: bool
    _told_of_rounding = False
    _training_data: Callable[[], tuple[Any, Callable]]
    _distances: Callable[[], dict[str, Tensor]]
    _distance_in_noise: Callable[[], dict[str, Tensor]]
    _convergence_so_far: Callable[[], dict[str, float]]
    _kinetic_of_chains: Callable[[], dict[str, Tensor]]
    _last_probe: Callable[[], dict[str, Tensor]]

    def _say(self, message: str, *values: object) -> None:
        """Log; where nobody listens to the log, write it beside the progress bar, if that is shown."""
        logger.info(message, *values)
        if not logger.isEnabledFor(logging.INFO) and not self.args.disable_tqdm and self.is_world_process_zero():
            tqdm.write(message % values, file=sys.stderr)

    def _warn(self, message: str, *values: object) -> None:
        if self.is_world_process_zero():
            logger.warning(message, *values)

    def _announce(self) -> None:
        """What is about to run: sizes, scale, prior, memory and time."""
        layout, chains, config = self.bayesian.layout, len(self.chains), self.method
        steps, accumulation = self._num_steps(), self.args.gradient_accumulation_steps
        state = self._chains_optimizer.template_fields()
        size = layout.dim * chains * self.bayesian.theta.element_size()
        held = 2 * size + sum(value.nbytes for value in state.values())  # theta and its gradient beside the state
        counted = "given" if self.num_terms is None else f"{self.num_terms} counted in {self.num_rows} rows"
        self._say(
            "%s: %d chains x %s random parameters in %d tensors; N = %g likelihood terms (%s; %s); about %s for %d "
            "updates of %d micro-batches; %.1f MB of chain state, draws %.1f MB",
            config.name, chains, f"{layout.dim:,}", len(layout.names), self.num_data, self.args.data_unit, counted,
            _duration(self._time_one_micro_batch() * steps * accumulation), steps, accumulation, held / 2**20,
            config.draws_per_chain * size / 2**20,
        )  # fmt: skip
        self._say("random: %s", grouped(layout.names))
        if self.inherited is not None:
            record = self.inherited.record
            self._say(
                "prior: the posterior %s (%s, fingerprint %s)",
                record["posterior"] or record["method"], record["used_as"], record["fingerprint"][:12],
            )  # fmt: skip
            ratio = None  # of a prior around 0 only
        else:
            ratio = lora_prior_ratio(self.bayesian.model, layout, self.prior)
        if ratio is not None and ratio <= 1:
            self._say("the prior's standard deviation of Delta W is %.2g times the base weights' RMS", ratio)
        elif ratio is not None:
            given, factor = config.prior_std or 1.0, ratio**-0.5  # of two factors, A and B
            narrow = f"multiplied by {factor:.2g}" if isinstance(given, dict) else f"below {given * factor:.2g}"
            self._warn(
                "the prior expects LoRA to change weights by %.2g times their RMS: prior_std=%s is wide for this "
                "rank and alpha; %s the ratio is under 1",
                ratio, given, narrow,
            )  # fmt: skip
        if config.temperature == 0:
            what = "maximum likelihood" if config.temper == "likelihood" else "the MAP estimate"
            self._say("temperature 0: this run optimises towards %s, it draws no posterior samples", what)
        if self.bayesian.members.trunk.has_dropout:
            self._tell_of_dropout()
        if config.temperature > 0 and self._varies():
            meaning = (
                f"{config.name} compares energies of different rows and is not exact. Draw the rows once and keep them"
                if config.requirements.all_data_in_every_update
                else "chains sample the posterior of their mean log-likelihood (the Jensen posterior of "
                "cold_posteriors app. K), and N counts each row once"
            )
            self._warn(
                "rows of train_dataset differ from one look to the next (augmentation, or a collator that draws): %s",
                meaning,
            )

    def _tell_of_dropout(self) -> None:
        """What the model's own dropout means, which is another thing for every kind of method."""
        config = self.method
        if isinstance(self._chains_optimizer.method, Kernel):
            self._say("the model has dropout: %s evaluates it without", config.name)
        elif config.requirements.drops_inputs:
            self._warn(
                "the model has dropout of its own, besides the masks of %s: inputs are dropped twice. Set it to 0",
                config.name,
            )
        elif config.temperature == 0:
            self._say("the model has dropout: this run optimises the log-likelihood averaged over its masks")
        else:
            self._warn(
                "the model has dropout: this is the posterior of the dropout-averaged log-likelihood (the Jensen "
                "posterior of cold_posteriors app. K), not the Bayes posterior. Set it to 0, or use MCDropoutConfig"
            )

    def _varies(self) -> bool:
        """Whether rows of the training data differ from one look to the next, as under augmentation.

        A row that is changed half of the time looks alike in all of n looks with probability 2^(1 - n).
        """
        dataset, collate = self._training_data()
        if is_stream(dataset):
            return False
        rows = range(0, len(dataset), -(-len(dataset) // LOOKED_AT))
        with torch.random.fork_rng(devices=[]):
            return any(_differ(collate([dataset[row]]) for _ in range(LOOKS)) for row in rows)

    def _time_one_micro_batch(self) -> float:
        """Seconds of one forward and backward of all chains, on the first rows; nothing is kept of it."""
        batch = self._prepare_inputs(next(iter(self.get_train_dataloader())))
        chunks = self._member_chunks(batch)
        members = chunks[0]
        leaf = self.bayesian.theta[members].detach().requires_grad_()
        self.bayesian.train()
        start = self._now()
        with self.accelerator.autocast():
            loss = self.bayesian(**self._rows_of(batch, members), theta=leaf, folded=not self._shared).loss
        loss.sum().backward()
        return (self._now() - start) * len(chunks)

    def _now(self) -> float:
        """Seconds, once the device has done what it was told: an accelerator works while Python goes on."""
        if self.args.device.type != "cpu":
            torch.accelerator.synchronize(self.args.device)
        return time.perf_counter()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add each chain's loss per term and diagnostics to Trainer's numbers, for trackers and ``log_history``.

        The callbacks that print show means over chains (``step_lines``).
        """
        chains = self.optimizer_of_chains
        if chains is not None and "unmoved" in chains.totals and not self._told_of_rounding:
            self._told_of_rounding = True
            lost = float(chains.totals["unmoved"].max())
            if self._has_noise and lost > MAX_UNMOVED:
                self._warn(
                    "the first update left %.0f %% of the weights of a chain as they were: it is lost in their "
                    "rounding. Raise learning_rate (%g)",
                    100 * lost, self.args.learning_rate,
                )  # fmt: skip
        if chains is not None and "loss" in logs and self._losses is not None:
            own = {**self._distances(), **self._distance_in_noise(), **self._kinetic_of_chains(), **self._last_probe()}
            info = self._of_all_chains({"loss": self._losses, **chains.noise_info, **chains.info, **own})
            for name, values in info.items():
                for chain, value in enumerate(values.tolist()):
                    logs[f"{name}/chain_{chain}"] = value
            logs |= self._convergence_so_far()
        super().log(logs, *args, **kwargs)

    def _of_all_chains(self, info: dict[str, Tensor]) -> dict[str, Tensor]:
        """name -> [M] of the chains here -> [K] of all."""
        if not info:
            return info
        columns = torch.stack([value.double().to(self.args.device) for value in info.values()], 1)
        return dict(zip(info, self.mesh.gather_chains(columns).unbind(1), strict=True))


def _differ(looks: Iterator[dict[str, Any]]) -> bool:
    first = {name: value for name, value in next(looks).items() if isinstance(value, Tensor)}
    return any(not torch.equal(value, other[name]) for other in looks for name, value in first.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
