"""The diagnostics of a run: numbers for its logs, and at its end a verdict on every chain and a trace for plots."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.run import Run
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.types import Approximation
from hf_bayes.diagnostics.plausibility import distance_moved, prior_loss_ratio
from hf_bayes.diagnostics.temperatures import KINETIC_TOLERANCE, share_within_interval, widened_interval
from hf_bayes.diagnostics.verdict import MAX_UNMOVED, Diagnostics
from hf_bayes.methods.assembly import warm_start_rate
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.final_measurements import drift, informed_temperature
from hf_bayes.training.probe_convergence import ProbeConvergence
from hf_bayes.training.reports.trace import logged_convergence, logged_of_chains, rounded, thinned
from hf_bayes.training.resuming import RunCheckpoints

_AS_FOUND = (
    "prior_loss_ratio", "kinetic_temperature", "kinetic_temperature_informed", "kinetic_share", "kinetic_inside",
    "configurational_temperature", "distance_in_noise", "unmoved", "acceptance", "penalty", "beyond_series", "capped",
    "noise_ratio",
)  # fmt: skip
"""Fields of ``Diagnostics`` that are means over the run, chain by chain."""


class Diagnosis:
    """The diagnostics of a run, from what its monitor has observed. All processes call the methods together.

    Attributes:
        checkpoints: the checkpoints of the run.
    """

    def __init__(self, active: ActiveRun, checkpoints: RunCheckpoints) -> None:
        self._active, self._convergence, self.checkpoints = active, ProbeConvergence(active), checkpoints
        self._has_warned_of_rounding = False

    @property
    def has_noise(self) -> bool:
        """True if noise moves every weight in the first update, so that a weight that stays was lost in rounding.

        A schedule with a ramp begins without noise. A method whose draws are not states of its chains adds none:
        ``ekf`` leaves the A of a new LoRA as it is, because the gradient of A is 0 while B is 0.
        """
        method = self._active.method
        ramps = method.schedule is not None and method.schedule.has_ramp
        return method.temperature > 0 and method.requirements.draws_are_chain_states and not ramps

    def add_to(self, logs: dict[str, float]) -> None:
        """Add name/chain_k of all chains, and the convergence so far, to the logs of an update."""
        logs |= self._for_logs()
        if "learning_rate" in logs:
            self._correct_rate(logs)

    def _correct_rate(self, logs: dict[str, float]) -> None:
        """Put the rate of the warm start in place of the method's own, and leave out a rate that chains do not have."""
        active = self._active
        rate = warm_start_rate(active.settings.method, active.problem, active.run.num_updates - 1)
        if rate is not None:
            logs["learning_rate"] = rate
        elif active.problem.own_step_size:  # the chains have step_size
            del logs["learning_rate"]

    def _for_logs(self) -> dict[str, float]:
        active, monitor = self._active, self._active.monitor
        if active.run.loss is None:
            return {}
        own = {**self._distances(), **self._distance_in_noise(), **self._kinetic_of_chains(), **self._last_probe()}
        first = {} if self._has_warned_of_rounding else self._unmoved()
        values = {"loss": active.run.loss, **monitor.noise_info, **monitor.info, **own, **first}
        info = dict(active.of_all_chains(values))
        if first:
            self._warn_of_rounding(info.pop("unmoved"))
        logs = {f"{name}/chain_{k}": value for name, values in info.items() for k, value in enumerate(values.tolist())}
        return logs | self._convergence.so_far()

    def _warn_of_rounding(self, unmoved: Tensor) -> None:
        """Warn once if rounding left many weights of a chain unchanged in the first update.

        Args:
            unmoved: [K], their share in each chain.
        """
        self._has_warned_of_rounding = True
        lost, chain = unmoved.max(0)
        if lost > MAX_UNMOVED:
            self._active.host.warn(
                "the first update left %.0f %% of the weights of chain %d as they were: it is lost in their "
                "rounding. Raise learning_rate (%s)",
                100 * float(lost), int(chain), self._active.host.args.learning_rate or "its own choice now",
            )  # fmt: skip

    def summary(self, found: Approximation) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the diagnostics of the run with their verdict, and its trace.

        Args:
            found: the result of the run.
        """
        active, monitor, method = self._active, self._active.monitor, self._active.method
        draws = active.run.stacked_draws()
        far = self._prior_loss_ratios(draws)
        own = {**self._distances(), **self._distance_in_noise(), **self._kinetic_of_chains(), **self._unmoved()}
        observed = active.of_all_chains({**monitor.mean_info(), **own, **far})
        means: dict[str, Any] = {name: value.tolist() for name, value in observed.items()}
        laws = means.get("kinetic_temperature_law")
        moves = max(1, active.run.num_updates - monitor.burn_in)
        convergence, ratios = self._convergence.at_end(draws)
        informed, has_temperature = informed_temperature(active, found), "configurational_temperature" in means
        diagnostics = Diagnostics(
            dim=active.setup.model.layout.dim,
            num_tensors=len(monitor.sizes),
            distance=means["distance_moved"],
            kinetic_temperature_law=None if laws is None else sum(laws) / len(laws),
            heating=self._heating,
            chosen_temperature=self._chosen_temperature,
            # a Gaussian through the path of an optimiser (swag) stands for the posterior at T = 1
            temperature=(method.temperature or 1.0) if informed else method.temperature if has_temperature else None,
            mirrored=active.mirrored,
            informed_spread=None if informed is None else informed.temperature,
            informed_spread_std_error=None if informed is None else informed.std_error,
            kind=_kind(found, method),
            spread_advice=method.requirements.spread_advice,
            divergences=None if "divergent" not in means else [round(rate * moves) for rate in means["divergent"]],
            num_moves=moves if "acceptance" in means else None,
            ramped=method.schedule is not None and method.schedule.has_ramp,
            **_stop(active.run),
            **{name: means.get(name) for name in _AS_FOUND},
            **convergence,
        )
        if diagnostics.kind == "gaussian" and diagnostics.epistemic_size == "right":
            diagnostics = dataclasses.replace(diagnostics, epistemic_drift=drift(active, found))
        return diagnostics.summary(), self._trace(ratios)

    def _trace(self, ratios: dict[str, Any]) -> dict[str, Any]:
        history = self._active.host.log_history
        trace = {
            "burn_in": self._active.monitor.burn_in,
            "logs": logged_of_chains(history, self._active.method.num_chains),
            "probe": self._probes(),
            "convergence": logged_convergence(history),
            "terms": ratios.get("terms", {}),
            "logits": ratios.get("logits", {}),
        }
        tensors = self._kinetic_of_tensors()
        return trace if tensors is None else {**trace, "kinetic_of_tensors": self._tensors_of_all(tensors)}

    # -- of every chain ----------------------------------------------------------------------------------------------

    @property
    def _heating(self) -> float:
        """The share of T that the noise of minibatches may add; 0 for a sampler with a given step size."""
        active = self._active
        return active.method.requirements.allowed_heating if active.problem.own_step_size else 0.0

    @property
    def _chosen_temperature(self) -> float | None:
        """The T below 1 that held-out rows chose from a ladder; None without such a choice."""
        chosen = self._active.settings.method.requirements.chooses_temperature
        temperature = self._active.method.temperature
        return temperature if chosen and temperature < 1 else None

    @property
    def _tolerance(self) -> float:
        """The relative error of a tensor's kinetic temperature that is accepted."""
        return KINETIC_TOLERANCE if self._chosen_temperature is None else max(KINETIC_TOLERANCE, self._heating)

    def _unmoved(self) -> dict[str, Tensor]:
        """Return the share of weights [M] that the first update left as they were, for methods that move them all."""
        totals = self._active.monitor.totals
        return {"unmoved": totals["unmoved"]} if "unmoved" in totals and self.has_noise else {}

    def _distances(self) -> dict[str, Tensor]:
        active = self._active
        theta = active.run.theta
        return {"distance_moved": distance_moved(theta, active.monitor.origin, active.chosen_prior.std.to(theta))}

    def _distance_in_noise(self) -> dict[str, Tensor]:
        """Return the RMS distance over sqrt(2 T sum_t l_t / N), how far SGLD's noise goes on its own."""
        active, temperature = self._active, self._active.method.temperature
        rates = active.monitor.totals.get("rates")
        if rates is None or temperature == 0 or not bool((rates > 0).all()):
            return {}
        diffusion = (2 * temperature * rates / active.problem.num_data).sqrt()
        distance = distance_moved(active.run.theta, active.monitor.origin, diffusion[:, None])
        return {"distance_in_noise": distance}

    def _prior_loss_ratios(self, draws: Tensor) -> dict[str, Tensor]:
        """Return ``plausibility.prior_loss_ratio`` of draws [M, S, d]; the probe has the likelihood of the start."""
        active, likelihood, start = self._active, self._active.likelihood, self._active.setup.start
        assert active.monitor.probe is not None
        at_start = active.monitor.probe(start[None]).log_lik.mean()
        best = likelihood.max_log_prob(active.setup.model.num_outputs)
        found = prior_loss_ratio(
            active.chosen_prior,
            draws,
            start,
            data_nats=active.problem.num_data * (best - float(at_start)),
            temperature=active.method.temperature,
            prior_weight=active.method.prior_weight,
        )
        return {} if found is None else {"prior_loss_ratio": found}

    def _kinetic_of_tensors(self) -> Tensor | None:
        """Return the mean kinetic temperature of each tensor over that of its law [M, S], after burn-in.

        None for methods whose state has no momentum, or whose diagnostics have no law of it.
        """
        totals = self._active.monitor.totals
        law = totals.get("kinetic_law")
        if law is None or not bool((law > 0).all()):
            return None
        return totals["kinetic_of_tensors"] / law[:, None]

    def _kinetic_of_chains(self) -> dict[str, Tensor]:
        """Return [M] each: the share of tensors that have their temperature, and how much too hot the hottest is."""
        relative, monitor = self._kinetic_of_tensors(), self._active.monitor
        if relative is None:
            return {}
        law = torch.ones_like(relative[:, 0])
        share = share_within_interval(relative, monitor.sizes, law, tolerance=self._tolerance)
        inside, count = monitor.totals["kinetic_inside"].unbind(1)
        return {"kinetic_share": share, "hottest_tensor": relative.amax(1), "kinetic_inside": inside / count}

    def _tensors_of_all(self, relative: Tensor) -> dict[str, Any]:
        layout = self._active.setup.model.layout
        intervals = {size: widened_interval(size, 1.0, self._tolerance) for size in set(layout.sizes)}
        return {
            "names": list(layout.names),
            "relative_to_law": rounded(self._convergence.gather(relative).tolist()),
            "interval": rounded([intervals[size] for size in layout.sizes]),
        }

    # -- of the probe ------------------------------------------------------------------------------------------------

    def _last_probe(self) -> dict[str, Tensor]:
        """Return the mean log-probability of a term [M] at the last probe evaluation."""
        probes = self._active.monitor.probes
        return {"probe_log_lik": probes[-1].mean(1)} if probes else {}

    def _probes(self) -> dict[str, Any]:
        """Return {"step": [P], "log_lik": [P, K]}: the mean log-probability of a term of the probe."""
        monitor = self._active.monitor
        if not monitor.probes:
            return {}
        means = self._convergence.gather(torch.stack([probe.mean(1) for probe in monitor.probes], 1)).T.tolist()
        steps = [monitor.probe_steps * (index + 1) for index in range(len(means))]
        return {"step": thinned(steps), "log_lik": rounded(thinned(means))}


def _stop(run: Run[Any]) -> dict[str, Any]:
    """Return the fields of ``Diagnostics`` about a run that was stopped; none for a run that made all its updates."""
    if run.num_updates >= run.problem.num_steps:
        return {}
    return {
        "stopped_at": run.num_updates,
        "num_planned_updates": run.problem.num_steps,
        "num_draws_before_stop": run.num_sampled,
    }


def _kind(found: Approximation, method: MethodConfig) -> str:
    """Return ``Diagnostics.kind`` of a result."""
    if not found.num_stored:
        return "gaussian"
    return "optimum" if method.temperature == 0 or method.requirements.drops_inputs else "chains"
