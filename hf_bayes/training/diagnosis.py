"""What a run says of itself at its end: diagnostics of every chain, a verdict, and a small trace for plots.

The probe is about ``PROBE_TERMS`` likelihood terms of the training data; of rows with one label it is fewer where their
forwards would cost more than a fiftieth of the run's, and never below ``LEAST_ROWS`` rows. Of every chain, after every
``probe_steps`` updates and at its draws, the log-probabilities of its labels are kept and logits of its other classes:
functions that no symmetry of a LoRA blurs, and nothing of the vocabulary's size.

A term has all its logits where these are ``MAX_CLASSES`` or fewer, else those ``MOST_LIKELY`` of other classes than the
label that are largest at the start of the run: what the model took for possible before any chain had a say, the same
for all chains, processes and looks, and found again by a run that goes on. A look keeps 8 bytes a term of a chain and 4
a logit: at most 256 * (8 + 4 * 8) = 10 kB, 80 MB of 8 chains and 1000 looks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.convergence import ess, rhat
from hf_bayes.diagnostics.ensemble_limit import risk_asymptote
from hf_bayes.diagnostics.plausibility import distance_moved, strayed
from hf_bayes.diagnostics.temperatures import KINETIC_TOLERANCE, share_within_interval, widened_interval
from hf_bayes.diagnostics.verdict import Diagnostics
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.distributions.energy import IndependentPrior
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.data_rows import is_stream
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.chain_optimizer import Look
from hf_bayes.training.mixin import AnyTrainer
from hf_bayes.training.stratified_rows import Strata
from hf_bayes.uncertainty.likelihoods import Likelihood, Normal

PROBE_TERMS, LEAST_ROWS = 256, 16
MAX_CLASSES, MOST_LIKELY = 8, 4

MAX_POINTS = 200
"""Of each curve in the trace: as many as a plot shows, and a small file."""


class DiagnosisMixin(AnyTrainer):
    """The trainer's diagnostics."""

    bayesian: BayesianModel
    likelihood: Likelihood
    method: MethodConfig
    mesh: ChainMesh
    strata: Strata | None
    prior: IndependentPrior | Gaussian
    num_data: float
    _of_all_chains: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    _training_data: Callable[[], tuple[Any, Callable]]
    _first_rows: Callable[[], dict[str, Any]]
    _member_log_lik: Tensor | None
    _mixture_nll: float
    _posterior: Posterior | None
    _probe_inputs: list[dict[str, Any]] | None = None
    _draw_probe_inputs: list[dict[str, Any]] | None = None
    _start: Tensor
    _last_convergence: tuple[int, dict[str, float]] = (0, {})

    @property
    def _has_noise(self) -> bool:
        """Whether the first update moves every weight by noise; a ramp begins without."""
        schedule = self.method.schedule
        return self.method.temperature > 0 and not (schedule and schedule.has_ramp)

    # -- the probe -----------------------------------------------------------------------------------------------

    def _probe(self, theta: Tensor) -> Look:
        """What a look while training finds under theta [M, d]."""
        if self._probe_inputs is None:
            self._probe_inputs = self._choose_probe(self.args.probe_steps or BayesianTrainingArguments.probe_steps)
            self._probe_columns = self._choose_columns(self._probe_inputs)
        return self._look_at(theta, self._probe_inputs, self._probe_columns)

    def _probe_of_draw(self, theta: Tensor) -> Look:
        """The same of a draw, of which there are few."""
        if self._draw_probe_inputs is None:
            self._draw_probe_inputs = self._choose_probe(self._num_steps() // self.method.draws_per_chain)
            self._draw_probe_columns = self._choose_columns(self._draw_probe_inputs)
        return self._look_at(theta, self._draw_probe_inputs, self._draw_probe_columns)

    _probe_columns: Tensor | None
    _draw_probe_columns: Tensor | None

    def _look_at(self, theta: Tensor, batches: list[dict[str, Any]], columns: Tensor | None) -> Look:
        """Log-probabilities and logits under theta [M, d]; of private rows the mean of the former by process."""
        seen = 0

        def of_terms(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal seen
            first, seen = seen, seen + len(labels)
            chosen = None if columns is None else columns[first:seen]
            log_lik = self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape)).double()
            if self.strata is not None:
                return log_lik, log_lik.new_zeros(len(logits), 0)
            return log_lik, self.likelihood.identified(logits, chosen).float()

        log_liks, logits = zip(*self._of_terms(theta, batches, of_terms), strict=True)
        found = torch.cat(log_liks, 1)[:, :PROBE_TERMS]
        if self.strata is None:
            return Look(found.cpu(), torch.cat(logits, 1)[:, :PROBE_TERMS].flatten(1).cpu())
        # of rows that stay where they are all hear a mean, one number a process; a mean logit of each class would tell
        # which classes a process has, and is not sent
        means = torch.zeros(len(found), len(self.strata.sizes), dtype=found.dtype, device=self.args.device)
        means[:, self.strata.rank] = found.mean(1)
        return Look(self.mesh.sum_over_data(means).cpu(), torch.zeros(len(found), 0))

    def _choose_columns(self, batches: list[dict[str, Any]]) -> Tensor | None:
        """[n, k]: the outputs of each term that looks tell of; None: all.

        A resumed run finds the same ones: of a vocabulary by a head that comes with the base model, of many classes,
        whose head may be drawn anew, by the seed.
        """
        rng = generator(self.args.seed, "probe")

        def of_terms(logits: Tensor, labels: Tensor) -> Tensor | None:
            if logits.shape[-1] <= MAX_CLASSES or self.strata is not None:
                return None
            drawn = torch.rand(logits.shape[1:], generator=rng).to(logits.device)
            start = logits[0].float() if self.bayesian.shifts_labels else drawn
            if not self.likelihood.labels_per_output:  # log p of the label is looked at anyway
                start = start.scatter(1, labels[:, None], -math.inf)
            return start.topk(MOST_LIKELY, dim=1).indices

        found = self._of_terms(self._start[None], batches, of_terms)
        columns = [part for part in found if part is not None]
        return torch.cat(columns) if columns else None

    @torch.no_grad()
    def _of_terms(self, theta: Tensor, batches: list[dict[str, Any]], function: Callable) -> list[Any]:
        model = self.bayesian
        with model.showing(theta.to(self.args.device)), self.accelerator.autocast():
            return [part for batch in batches for part in model.each_term(batch, function)]

    def _choose_probe(self, interval: int) -> list[dict[str, Any]]:
        """First rows of the training data, until they hold ``PROBE_TERMS`` terms, in batches as training has them.

        Rows of few terms end sooner, so that a look every ``interval`` updates costs a fiftieth of their forwards.
        """
        dataset, collate = self._training_data()
        most = max(LEAST_ROWS, interval * self.get_total_train_batch_size(self.args) // 50)
        rows: list[Any] = []
        terms = 0
        with torch.random.fork_rng(devices=[]):  # a collator may be random
            if is_stream(dataset):
                return [self._first_rows()]
            while terms < PROBE_TERMS and len(rows) < min(most, len(dataset)):
                rows.append(dataset[len(rows)])
                terms += int(self.bayesian.terms_per_row(collate(rows[-1:])))
            size = self.args.per_device_eval_batch_size
            return [self._prepare_inputs(collate(rows[i : i + size])) for i in range(0, len(rows), size)]

    def _last_probe(self) -> dict[str, Tensor]:
        """[M]: mean log-probability of a term at the last look."""
        probes = self._chains_optimizer.probes
        return {"probe_log_lik": probes[-1].mean(1)} if probes else {}

    def _watched(self, draws: Tensor) -> tuple[Look, str] | None:
        """A look of [K, S, n] and [K, S, q], S >= 4, and what it is of; None where there are too few.

        Optimisers are not compared, their points are meant to differ.
        """
        if self.method.temperature == 0:
            return None
        if draws.shape[1] >= 4:
            looks = [self._probe_of_draw(theta) for theta in draws.unbind(1)]
            return Look(*(self._gather(torch.stack(part, 1)) for part in zip(*looks, strict=True))), "draws"
        chains, burned = self._chains_optimizer, self._num_burned_looks
        if burned is None:
            return None
        kept = (chains.probes[burned:], chains.probe_logits[burned:])
        return Look(*(self._gather(torch.stack(part, 1)) for part in kept)), "looks while training"

    @property
    def _num_burned_looks(self) -> int | None:
        """Looks while training that are burn-in's, where at least 4 others stand for draws; else None.

        They do not where chains go in cycles, or are not themselves what the run ends in.
        """
        chains, args, method = self._chains_optimizer, self.args, self.method
        sampled = method.draws_are_states and not method.revises and method.temperature > 0 and method.schedule is None
        burned = chains.burn_in // args.probe_steps if args.probe_steps else 0
        return burned if sampled and len(chains.probes) - burned >= 4 else None

    def _convergence_so_far(self) -> dict[str, float]:
        """R-hat and ESS of the probe's log-likelihood over the looks after burn-in; all processes ask together."""
        burned = self._num_burned_looks
        if burned is None:
            return {}
        probes = self._chains_optimizer.probes
        if len(probes) != self._last_convergence[0]:  # logs may be written more often than looks are taken
            totals = self._gather(torch.stack([probe.sum(1) for probe in probes[burned:]], 1)[..., None])
            found = {"probe_rhat": float(rhat(_halves(totals))), "probe_ess": float(ess(totals))}
            told = {name: value for name, value in found.items() if math.isfinite(value)}
            self._last_convergence = len(probes), told
        return self._last_convergence[1]

    def _gather(self, values: Tensor) -> Tensor:
        return self.mesh.gather_chains(values.to(self.args.device)).cpu()

    # -- the end of a run ----------------------------------------------------------------------------------------

    def _distances(self) -> dict[str, Tensor]:
        theta = self.bayesian.theta.detach()
        origin = self._chains_optimizer.origin
        return {"distance_moved": distance_moved(theta, origin, self.prior.std.to(theta))}

    def _distance_in_noise(self) -> dict[str, Tensor]:
        """RMS distance over sqrt(2 T sum_t l_t / N), how far SGLD's noise goes on its own."""
        rates = self._chains_optimizer.totals.get("rates")
        if rates is None or self.method.temperature == 0 or not bool((rates > 0).all()):
            return {}
        theta = self.bayesian.theta.detach()
        diffusion = (2 * self.method.temperature * rates / self.num_data).sqrt()
        return {"distance_in_noise": distance_moved(theta, self._chains_optimizer.origin, diffusion[:, None])}

    def _strayed(self, draws: Tensor) -> dict[str, Tensor]:
        """Return what ``plausibility.strayed`` finds of draws [M, S, d], judging the start by the probe."""
        start, config, likelihood = self._start, self.method, self.likelihood
        at_start = self._probe(start[None]).log_lik.mean()
        zeros = torch.zeros(1, 1, self.bayesian.num_outputs)
        # a density of numbers is not bounded by 1, and is largest where the label is predicted exactly
        best = float(likelihood.log_prob(zeros, zeros)) if isinstance(likelihood, Normal) else 0.0
        found = strayed(
            self.prior,
            draws,
            start,
            data_nats=self.num_data * (best - float(at_start)),
            temperature=config.temperature,
            prior_weight=config.prior_weight,
        )
        return {} if found is None else {"strayed": found}

    def _diagnose(self, draws: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """The run's own account of itself, and its trace, of draws [M, S, d]."""
        chains = self._chains_optimizer
        tensors = self._kinetic_of_tensors()
        far = self._strayed(draws)
        unmoved = {name: chains.totals[name] for name in ("unmoved",) if name in chains.totals and self._has_noise}
        kinetic = self._kinetic_of_chains()
        found = self._of_all_chains(
            {**chains.mean_info(), **self._distances(), **self._distance_in_noise(), **kinetic, **unmoved, **far}
        )
        means: dict[str, Any] = {name: value.tolist() for name, value in found.items()}
        laws = means.get("kinetic_temperature_law")
        moves = max(1, chains.num_updates - chains.burn_in)
        watched = self._watched(draws)
        convergence, ratios = ({}, {}) if watched is None else _convergence(*watched)
        same = (
            "strayed", "kinetic_temperature", "kinetic_share", "kinetic_inside", "configurational_temperature",
            "distance_in_noise", "unmoved", "acceptance", "penalty", "beyond_series", "capped", "noise_ratio",
        )  # fmt: skip
        diagnostics = Diagnostics(
            dim=self.bayesian.layout.dim,
            num_tensors=len(self.bayesian.layout.names),
            distance=means["distance_moved"],
            kinetic_temperature_law=None if laws is None else sum(laws) / len(laws),
            temperature=self.method.temperature if "configurational_temperature" in means else None,
            divergences=None if "divergent" not in means else [round(rate * moves) for rate in means["divergent"]],
            num_moves=moves if "acceptance" in means else None,
            ramped=self.method.schedule is not None and self.method.schedule.has_ramp,
            **{name: means.get(name) for name in same},
            **convergence,
        )
        trace = {
            "burn_in": chains.burn_in,
            "logs": self._logs(),
            "probe": self._probes(),
            "convergence": self._logged_convergence(),
            "terms": ratios.get("terms", {}),
            "logits": ratios.get("logits", {}),
        }
        if tensors is not None:
            trace["kinetic_of_tensors"] = self._tensors_of_all(tensors)
        return diagnostics.summary(), trace

    def _kinetic_of_tensors(self) -> Tensor | None:
        """[M, S] mean kinetic temperature of each tensor over that of its law, after burn-in.

        Of methods whose state has a momentum and whose info has its law.
        """
        totals = self._chains_optimizer.totals
        law = totals.get("kinetic_law")
        if law is None or not bool((law > 0).all()):
            return None
        return totals["kinetic_of_tensors"] / law[:, None]

    def _kinetic_of_chains(self) -> dict[str, Tensor]:
        """[M] each: the share of tensors that have their temperature, and how much too hot the hottest is."""
        relative = self._kinetic_of_tensors()
        if relative is None:
            return {}
        law = torch.ones_like(relative[:, 0])
        share = share_within_interval(relative, self.bayesian.layout.sizes, law, tolerance=KINETIC_TOLERANCE)
        inside, count = self._chains_optimizer.totals["kinetic_inside"].unbind(1)
        return {"kinetic_share": share, "hottest_tensor": relative.amax(1), "kinetic_inside": inside / count}

    def _tensors_of_all(self, relative: Tensor) -> dict[str, Any]:
        layout = self.bayesian.layout
        intervals = {size: widened_interval(size, 1.0, KINETIC_TOLERANCE) for size in set(layout.sizes)}
        return {
            "names": list(layout.names),
            "relative_to_law": _rounded(self._gather(relative).tolist()),
            "interval": _rounded([intervals[size] for size in layout.sizes]),
        }

    def _logs(self) -> dict[str, Any]:
        """{"step": [P], name: [P, K]}: what was logged of every chain."""
        entries = [entry for entry in self.state.log_history if "loss/chain_0" in entry]
        entries = _thinned(entries)
        names = sorted({key.split("/chain_")[0] for entry in entries[-1:] for key in entry if "/chain_" in key})
        chains = range(self.method.num_chains)
        curves = {name: [[entry.get(f"{name}/chain_{k}") for k in chains] for entry in entries] for name in names}
        return {"step": [entry["step"] for entry in entries], **{n: _rounded(curve) for n, curve in curves.items()}}

    def _logged_convergence(self) -> dict[str, Any]:
        """{"step", "rhat", "ess": [P]}: of the looks so far, as they were logged."""
        entries = _thinned([entry for entry in self.state.log_history if "probe_rhat" in entry])
        if not entries:
            return {}
        values = {name: _rounded([entry.get(f"probe_{name}") for entry in entries]) for name in ("rhat", "ess")}
        return {"step": [entry["step"] for entry in entries], **values}

    def _probes(self) -> dict[str, Any]:
        """{"step": [P], "log_lik": [P, K]}: mean log-probability of a term of the probe."""
        probes = self._chains_optimizer.probes
        if not probes:
            return {}
        means = self._gather(torch.stack([probe.mean(1) for probe in probes], 1)).T.tolist()
        steps = [self.args.probe_steps * (index + 1) for index in range(len(probes))]
        return {"step": _thinned(steps), "log_lik": _rounded(_thinned(means))}

    def _asymptote(self) -> dict[str, Any] | None:
        """C(S) on the held-out data that were evaluated last, and its limit.

        A part of the terms tells how C falls with S; all of them, where it stands at S = M: other terms are easier.
        """
        assert self._posterior is not None
        log_lik, approximation = self._member_log_lik, self._posterior.approximation
        if log_lik is None or not isinstance(approximation, Draws):
            return None
        chains = [int(chain) for part in self.mesh.exchange(approximation.chain.tolist()) for chain in part]
        found = risk_asymptote(log_lik, chains)
        if found is None:
            return None
        return {**dataclasses.asdict(found.at(self._mixture_nll)), "num_terms": len(log_lik)}


def _convergence(look: Look, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of ``Diagnostics``, and R-hat and ESS of terms and logits for the trace; of [K, S, n] and [K, S, q].

    Of one chain R-hat compares the halves, as if they were chains: whether it has settled, not whether others agree.
    """
    total = look.log_lik.sum(2, keepdim=True)
    fields = {
        "rhat": float(rhat(_halves(total))),
        "ess": float(ess(total)),
        "num_values": look.log_lik.shape[1],
        "values": what,
    }
    ratios = {}
    for kind, values in (("terms", look.log_lik), ("logits", look.logits)):
        if values.shape[2] == 0:
            continue
        known = {"rhat": rhat(_halves(values)), "ess": ess(values)}
        known = {name: found[~found.isnan()].sort().values for name, found in known.items()}
        fields |= {
            f"rhat_{kind}": _quantile(known["rhat"], 0.95),
            f"ess_{kind}": _quantile(known["ess"], 0.05),
            f"num_{kind}": values.shape[2],
        }
        ratios[kind] = {name: _rounded(_thinned(found.tolist())) for name, found in known.items()}
    return fields, ratios


def _halves(values: Tensor) -> Tensor:
    """[2, S // 2, q] of a single chain [1, S, q], the later draws of an odd number; of several, themselves."""
    if len(values) > 1:
        return values
    return values[0, len(values[0]) % 2 :].unflatten(0, (2, -1))


def _quantile(values: Tensor, probability: float) -> float | None:
    """Of sorted ones."""
    return float(values[round(probability * (len(values) - 1))]) if len(values) else None


def _thinned(values: list[Any]) -> list[Any]:
    """At most ``MAX_POINTS`` of them, spread evenly, the last among them."""
    step = -(-len(values) // MAX_POINTS) or 1
    return values[::-1][::step][::-1]


def _rounded(value: Any) -> Any:
    """Five digits are more than a plot shows."""
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
