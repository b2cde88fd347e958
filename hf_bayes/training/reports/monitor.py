"""The monitor of a run: sums over its step records, and the values of its probe. It reads ``StepRecord``s only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hf_bayes.chains.run import StepRecord
from hf_bayes.core.types import Problem
from hf_bayes.diagnostics.temperatures import share_within_interval
from hf_bayes.objectives.probe import ProbeValues

NOISE_INFO = ("noise_ratio", "noise_temperature")
"""The diagnostics that a method computes from ``Evaluation.grad_variance``, which not every update has."""

RECIPROCALS = ("noise_ratio",)
"""The diagnostics whose reciprocals are averaged: a chain is 1 + 1 / r times as hot, and one estimate of the variance
near 0 would otherwise count for more than all others."""

_GROUPS = ("noise.", "sum.", "total.")


class Monitor:
    """Observations of the chains of this process.

    Args:
        sizes: the number of elements of each random tensor.
        problem: the problem of the run.
        origin: [M, d] the points where the chains start.
        warm_start: the number of updates of a warm start.
        probe: a function from theta [M, d] to the values of the probe; None observes no probe.
        probe_steps: the number of updates between two evaluations of the probe.
    Attributes:
        info: diagnostics of the last update, name -> [M].
        noise_info: diagnostics of the last update that had the gradient's variance (``NOISE_INFO``).
        sums: name -> [M, 2]: the sum of a diagnostic (or of its reciprocals) over the updates after burn-in that have
            it, and how many these are.
        totals: name -> [M, ...], over a rule's updates after its warm start that move theta: "rates", the sum of their
            learning rates; "unmoved", the share of the numbers that the first of them left bitwise as they were. Over
            those after burn-in: "kinetic_of_tensors" [M, S] and "kinetic_law", sums of each tensor's kinetic
            temperature and of its expectation; "kinetic_inside" [M, 2], the sum of the share of tensors inside their
            interval, and the number of updates.
        origin: [M, d] where the method itself began, after its warm start: a distance that AdamW moved says nothing
            about a sampler.
        probes: [M, n] each, on the CPU: log-probabilities of the probe after every ``probe_steps`` updates.
        probe_logits: [M, q] each, likewise.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        problem: Problem,
        origin: Tensor,
        *,
        warm_start: int,
        probe: Callable[[Tensor], ProbeValues] | None,
        probe_steps: int,
    ) -> None:
        self.sizes, self.origin, self.burn_in, self.warm_start = sizes, origin, problem.burn_in, warm_start
        self.probe, self.probe_steps = probe, probe_steps
        self.has_rates = not problem.own_step_size  # otherwise they are factors of step sizes
        self.info: Mapping[str, Tensor] = {}
        self.noise_info: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.totals: dict[str, Tensor] = {}
        self.probes: list[Tensor] = []
        self.probe_logits: list[Tensor] = []

    @torch.no_grad()
    def observe(self, record: StepRecord) -> None:
        """Add the observations of one update."""
        self.info = record.info
        if self.has_rates and record.learning_rate is not None and record.moved and record.step > self.warm_start:
            self._observe_move(record, record.learning_rate)
        self.noise_info |= {name: record.info[name] for name in NOISE_INFO if name in record.info}
        if record.step == self.warm_start:
            self.origin = record.theta.clone()
        if record.step > self.burn_in:
            for name, value in record.info.items():
                observed = 1 / value.double() if name in RECIPROCALS else value.double()
                self.sums[name] = self.sums.get(name, 0.0) + torch.stack([observed, torch.ones_like(observed)], 1)
        if self.probe is not None and self.probe_steps and record.step % self.probe_steps == 0:
            values = self.probe(record.theta)
            self.probes.append(values.log_lik.cpu())
            self.probe_logits.append(values.logits.cpu())

    def _observe_move(self, record: StepRecord, learning_rate: float) -> None:
        theta = record.theta
        if "unmoved" not in self.totals:
            self.totals["unmoved"] = (theta == record.before).sum(1).double() / theta.shape[1]
        self._add("rates", torch.full((len(theta),), learning_rate, dtype=torch.float64, device=theta.device))
        if record.step > self.burn_in:
            self._observe_momentum(record)

    def _observe_momentum(self, record: StepRecord) -> None:
        """Add the kinetic temperature of a momentum of unit mass, where the update has its law."""
        law = record.info.get("kinetic_temperature_law")
        if law is None or record.momentum is None:
            return
        parts = record.momentum.split(self.sizes, dim=1)
        # norms read the momentum once; its squares would be written first, which takes five times as long
        kinetic = torch.stack([part.norm(dim=1).double().square() / part.shape[1] for part in parts], 1)
        self._add("kinetic_of_tensors", kinetic)
        self._add("kinetic_law", law.double())
        if bool((law > 0).all()):
            inside = share_within_interval(kinetic, self.sizes, law.double())
            self._add("kinetic_inside", torch.stack([inside, torch.ones_like(inside)], 1))

    def _add(self, name: str, value: Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value

    def mean_info(self) -> dict[str, Tensor]:
        """Return means of the diagnostics over the updates after burn-in that have them, name -> [M]."""
        means = {name: value[:, 0] / value[:, 1] for name, value in self.sums.items()}
        return {name: 1 / mean if name in RECIPROCALS else mean for name, mean in means.items()}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return all observations, name -> [M, ...] on the CPU."""
        count = len(self.origin)
        groups = zip(_GROUPS, (self.noise_info, self.sums, self.totals), strict=True)
        return {
            "probes": torch.stack(self.probes, 1) if self.probes else torch.zeros(count, 0, 0),
            "probe_logits": torch.stack(self.probe_logits, 1) if self.probes else torch.zeros(count, 0, 0),
            "origin": self.origin.cpu(),
            **{f"{group}{name}": value.cpu() for group, values in groups for name, value in values.items()},
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the observations of a ``state_dict``."""
        device = self.origin.device
        self.origin = tensors["origin"].to(device)
        self.probes, self.probe_logits = (list(tensors[name].unbind(1)) for name in ("probes", "probe_logits"))
        # sorted: safetensors returns tensors in any order, and processes compare their sums one after the other
        self.noise_info, self.sums, self.totals = (
            {name.removeprefix(group): tensors[name].to(device) for name in sorted(tensors) if name.startswith(group)}
            for group in _GROUPS
        )

    @staticmethod
    def holds(name: str) -> bool:
        """Return whether a tensor of a checkpoint is one of ``state_dict``."""
        return name in ("probes", "probe_logits", "origin") or name.startswith(_GROUPS)
