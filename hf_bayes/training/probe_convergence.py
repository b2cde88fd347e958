"""Convergence in function space: R-hat and effective sample size of the probe's values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_bayes.diagnostics.convergence import ess, rhat
from hf_bayes.objectives.probe import ProbeValues
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.reports.trace import rounded, thinned


class ProbeConvergence:
    """R-hat and ESS of a run's probe, while it runs and at its end. All processes call the methods together."""

    def __init__(self, active: ActiveRun) -> None:
        self._active = active
        self._last: tuple[int, dict[str, float]] = (0, {})

    def so_far(self) -> dict[str, float]:
        """Return R-hat and ESS of the probe's log-likelihood over the probe evaluations after burn-in."""
        burned, probes = self._num_burned, self._active.monitor.probes
        if burned is None:
            return {}
        if len(probes) != self._last[0]:  # logs may be written more often than the probe is looked at
            totals = self.gather(torch.stack([probe.sum(1) for probe in probes[burned:]], 1)[..., None])
            size = ess(totals, mirrored=self._active.mirrored)
            found = {"probe_rhat": float(rhat(_halves_of_chain(totals))), "probe_ess": float(size)}
            self._last = len(probes), {name: value for name, value in found.items() if math.isfinite(value)}
        return self._last[1]

    def at_end(self, draws: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return fields of ``Diagnostics``, and R-hat and ESS of terms and logits for the trace.

        Args:
            draws: [M, S, d] draws of the chains of this process.
        """
        watched = self._watched(draws)
        return ({}, {}) if watched is None else _convergence(*watched, mirrored=self._active.mirrored)

    def gather(self, values: Tensor) -> Tensor:
        """Return the values [M, ...] of all chains, on the CPU."""
        mesh = self._active.setup.mesh
        return mesh.gather_chains(values.to(self._active.host.args.device)).cpu()

    def _watched(self, draws: Tensor) -> tuple[ProbeValues, str] | None:
        """Return probe values [K, S, n] and [K, S, q], S >= 4, and their description; None if there are too few.

        Optimisers are not compared, because their results are meant to differ.
        """
        active = self._active
        if active.method.temperature == 0:
            return None
        if draws.shape[1] >= 4:
            probes = [active.probe_of_draws(theta) for theta in draws.unbind(1)]
            return self._stacked([one.log_lik for one in probes], [one.logits for one in probes]), "draws"
        burned, monitor = self._num_burned, active.monitor
        if burned is None:
            return None
        return self._stacked(monitor.probes[burned:], monitor.probe_logits[burned:]), "probe evaluations"

    def _stacked(self, log_liks: list[Tensor], logits: list[Tensor]) -> ProbeValues:
        return ProbeValues(self.gather(torch.stack(log_liks, 1)), self.gather(torch.stack(logits, 1)))

    @property
    def _num_burned(self) -> int | None:
        """Return the number of probe evaluations in burn-in, if at least 4 later ones represent draws; else None.

        They do not represent draws if chains have cycles, or if the result of the run is not the chains' states.
        """
        active, method = self._active, self._active.method
        visited = method.requirements.draws_are_chain_states and not method.requirements.final_pass
        sampled = visited and method.temperature > 0 and method.schedule is None
        interval = active.monitor.probe_steps
        burned = active.problem.burn_in // interval if interval else 0
        return burned if sampled and len(active.monitor.probes) - burned >= 4 else None


def _convergence(found: ProbeValues, what: str, *, mirrored: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields of ``Diagnostics`` and the trace's ratios for values [K, S, n] and [K, S, q].

    For one chain R-hat compares its halves as if they were chains. It then measures whether the chain has settled, not
    whether others agree.
    """
    total = found.log_lik.sum(2, keepdim=True)
    fields = {
        "rhat": float(rhat(_halves_of_chain(total))),
        "ess": float(ess(total, mirrored=mirrored)),
        "num_values": found.log_lik.shape[1],
        "values": what,
    }
    ratios = {}
    for kind, values in (("terms", found.log_lik), ("logits", found.logits)):
        if values.shape[2] == 0:
            continue
        both = {"rhat": rhat(_halves_of_chain(values)), "ess": ess(values, mirrored=mirrored)}
        known = {name: value[~value.isnan()].sort().values for name, value in both.items()}
        fields |= {
            f"rhat_{kind}": _quantile(known["rhat"], 0.95),
            f"ess_{kind}": _quantile(known["ess"], 0.05),
            f"num_{kind}": values.shape[2],
        }
        ratios[kind] = {name: rounded(thinned(value.tolist())) for name, value in known.items()}
    return fields, ratios


def _halves_of_chain(values: Tensor) -> Tensor:
    """Return the halves [2, S // 2, q] of a single chain [1, S, q], without its first draw if S is odd; of several
    chains, the chains."""
    if len(values) > 1:
        return values
    return values[0, len(values[0]) % 2 :].view(2, -1, *values.shape[2:])


def _quantile(values: Tensor, probability: float) -> float | None:
    """Return a quantile of sorted values; None if there are no values."""
    return float(values[round(probability * (len(values) - 1))]) if len(values) else None
