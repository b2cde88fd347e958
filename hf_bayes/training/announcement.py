"""The announcement of a run, before its first update: sizes, scale, prior, memory, time and warnings."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from peft import PeftModel

from hf_bayes.core.layout import grouped
from hf_bayes.distributions.priors import lora_prior_ratio
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading.config_fingerprint import is_dropout_rate
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.reports.own_choices import report_trial

NARROW_PRIOR, WIDE_PRIOR = 1e-3, 1.001
"""Bounds of usual priors of LoRA: the standard deviation of Delta W over the RMS of the base weight.

The default prior has 1, up to rounding. The largest changes by fine-tuning are 0.02 in the tutorial with a classifier
and 0.36 in the tutorial with a language model.
"""


def announce(active: ActiveRun) -> None:
    """Write a description of the run to the log, and a warning if a setting changes the target distribution."""
    _announce_sizes(active)
    _announce_prior(active)
    report_trial(active.settings, active.host)
    config = active.method
    if config.temperature == 0:
        what = "maximum likelihood" if config.temper == "likelihood" else "the MAP estimate"
        active.host.say("temperature 0: this run optimises towards %s, it draws no posterior samples", what)
    if active.setup.model.members.trunk.has_dropout:
        _announce_dropout(active)
    if config.temperature > 0 and active.rows_vary:
        meaning = (
            f"{config.name} compares energies of different rows and is not exact. Draw the rows once and keep them"
            if config.requirements.all_data_in_every_update
            else "chains sample the posterior of their mean log-likelihood (the Jensen posterior of "
            "cold_posteriors app. K), and N counts each row once"
        )
        active.host.warn(
            "rows of train_dataset differ each time they are read (augmentation, or a collator that draws): %s",
            meaning,
        )


def _announce_sizes(active: ActiveRun) -> None:
    layout, rows, config, args = active.setup.model.layout, active.rows, active.method, active.host.args
    chains, steps, accumulation = len(active.run.chains), active.problem.num_steps, args.gradient_accumulation_steps
    size = layout.dim * chains * active.run.theta.element_size()
    gradients = config.requirements.gradients_per_update
    on_average = "" if gradients == int(gradients) else " on average"
    each = "" if gradients == 1 else f" with {float(gradients):.3g} gradients each{on_average}"
    # the points of the largest update and their gradients beside the state
    parts = f"{accumulation} micro-batch{'' if accumulation == 1 else 'es'}"
    held = 2 * math.ceil(gradients) * size + sum(value.nbytes for value in active.run.template()._asdict().values())
    counted = "given" if rows.num_terms is None else f"{rows.num_terms} counted in {rows.num_rows} rows"
    active.host.say(
        "%s: %d chains x %s random parameters in %d tensors; N = %g likelihood terms (%s; %s); about %s for %d "
        "updates of %s%s; %.1f MB of chain state, draws %.1f MB; random: %s",
        config.name, chains, f"{layout.dim:,}", len(layout.names), rows.num_data, args.data_unit, counted,
        _duration(_time_one_micro_batch(active) * float(gradients) * steps * accumulation), steps, parts, each,
        held / 2**20, config.draws_per_chain * size / 2**20, grouped(layout.names),
    )  # fmt: skip


def _announce_prior(active: ActiveRun) -> None:
    config, inherited = active.method, active.setup.inherited
    if inherited is not None:
        record = inherited.record
        active.host.say(
            "prior: the posterior %s (%s, fingerprint %s)",
            record["posterior"] or record["method"], record["used_as"], record["fingerprint"][:12],
        )  # fmt: skip
        return  # the ratio below is of a prior around 0
    ratio = lora_prior_ratio(active.setup.model.model, active.setup.model.layout, active.prior)
    is_default = config.prior_std is None and config.prior != "he"
    if ratio is None or is_default or NARROW_PRIOR <= ratio <= WIDE_PRIOR:
        return
    if ratio > WIDE_PRIOR:
        kind, meaning = "wide", "more than 1 is unusual: the posterior may be far from the base model"
    else:
        kind, meaning = "narrow", f"less than {NARROW_PRIOR} is unusual: the posterior can hardly leave the base model"
    given, factor = config.prior_std or 1.0, ratio**-0.5  # of two factors, A and B
    if config.prior_std_by_expression:
        advice = f"Multiply prior_std by {factor:.2g} for a ratio of 1"
    else:
        advice = f"Set prior_std {'below' if kind == 'wide' else 'near'} {given * factor:.2g}, where the ratio is 1"
    active.host.warn(
        "the prior is %s: prior_std=%s lets LoRA change the base weights by %.2g times their RMS, and %s. %s",
        kind, given, ratio, meaning, advice,
    )  # fmt: skip


def _announce_dropout(active: ActiveRun) -> None:
    """Describe the effect of the dropout of the model, which differs between kinds of methods."""
    config = active.method
    if not active.objective.passes.dropout:
        active.host.say("the model has dropout: %s evaluates it without", config.name)
    elif config.requirements.drops_inputs:
        active.host.warn(
            "the model has dropout of its own, besides the masks of %s: inputs are dropped twice. Set it to 0",
            config.name,
        )
    elif config.temperature == 0:
        active.host.say("the model has dropout: this run optimises the log-likelihood averaged over its masks")
    elif config.temperature < 1 or config.requirements.chooses_temperature:
        # draws of the first are not taken for draws of the Bayes posterior, and the second asks for predictions
        active.host.say("the model has dropout: this run samples by the log-likelihood averaged over its masks")
    else:
        active.host.warn(
            "the model has dropout%s: this is the posterior of the dropout-averaged log-likelihood (the Jensen "
            "posterior of cold_posteriors app. K), not the Bayes posterior. For the latter set dropout to 0 in the "
            "config of the model (--config_overrides) and of the LoRA",
            _dropout_rates(active.setup.model),
        )


def _dropout_rates(model: BayesianModel) -> str:
    """Return the rates of dropout in the configs of the model and its adapter that are not 0, in brackets."""
    fields = dict(model.core.config.get_text_config().to_dict())
    if isinstance(model.model, PeftModel):
        fields["lora_dropout"] = getattr(model.model.peft_config[model.model.active_adapter], "lora_dropout", 0)
    rates = [f"{name} {value:g}" for name, value in fields.items() if is_dropout_rate(name, value) and value]
    return f" ({', '.join(rates)})" if rates else ""


def _time_one_micro_batch(active: ActiveRun) -> float:
    """Return the seconds of one forward and backward pass of all chains on the first rows. The results are dropped."""
    passes, args = active.objective.passes, active.host.args
    batch = passes.prepare(next(iter(active.rows.loader())))
    passes.model.train()
    chunks = passes.member_chunks(batch)
    with torch.random.fork_rng(devices=[args.device] if args.device.type == "cuda" else []):
        start = _now(args)
        for _ in passes.of_batch(active.run.theta, batch, gradient=True, step=0, micro=0, chunks=chunks[:1]):
            pass
        return (_now(args) - start) * len(chunks)


def _now(args: Any) -> float:
    """Return the time in seconds after the device has finished, because accelerators work asynchronously."""
    if args.device.type != "cpu":
        torch.accelerator.synchronize(args.device)
    return time.perf_counter()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
