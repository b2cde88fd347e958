"""The temperature of the mixture of a finished run, fitted on the trainer's held-out rows."""

from __future__ import annotations

import math

import torch

from hf_bayes.core.config import MethodConfig
from hf_bayes.metrics.calibration import Calibration, require_enough
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.calibrating import calibration_by_number, reason_without_temperature
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.data.heldout_rows import HeldOutData, evenly_spread, reason_without_rows
from hf_bayes.training.trainer_host import TrainerHost

LEAST_ROWS = 200
"""After any run the pass may take this many held-out rows. It may take more if that costs at most a tenth of the run's
gradients."""

NEAR_MODES = 0.1
"""The highest temperature T of a posterior whose members are trained networks, and not spread far around them.

At a higher T the width of the posterior lowers the temperature of the mixture, however long the run."""

TOO_SHORT, TOO_LONG = 0.95, 1.1
"""The temperatures of a mixture below and above which a run says that another length may be better.

Four times the updates made networks with t = 0.52 and 0.93 better, and those with t = 1 worse, which then had 1.2 to
1.4 (four tasks, docs/results/recommend.md)."""


def reason_against(host: TrainerHost, model: BayesianModel) -> str | None:
    """Return, in words, why a run has no temperature of its mixture; None if it can have one."""
    if host.args.calibrate is False:
        return "calibrate=False"
    if reason := reason_without_temperature(model):
        return reason
    return reason_without_rows(host.args, host.eval_dataset)


def require_calibration(host: TrainerHost, model: BayesianModel) -> None:
    """Raise a ValueError, before the first step, if a temperature was asked for and cannot be fitted."""
    if not host.args.calibrate:
        return
    reason = reason_against(host, model)
    if reason is not None:
        raise ValueError(
            f"calibrate=True fits a temperature of the mixture on held-out rows, and {reason}: leave it out"
        )
    require_enough(HeldOutData(host).count_terms(model))


def report_length(method: MethodConfig, found: Calibration, host: TrainerHost) -> None:
    """Log if the run is probably too short or too long: the temperature of the mixture shows it, near modes.

    Args:
        method: the method of the run.
        found: the temperature t of the mixture, and its standard error.
        host: writes the message.
    """
    t, margin, needs = found.temperature, 2 * found.log_std_error, method.requirements
    near_modes = method.temperature <= NEAR_MODES and needs.draws_are_chain_states and not needs.drops_inputs
    if not near_modes:
        return
    if t < TOO_SHORT and math.log(t) < -margin:
        host.say(
            "%s: a temperature of the mixture of %.3g, below 1, says that the networks are less sure than they could "
            "be, as after too few updates. A longer run probably predicts better",
            method.name, t,
        )  # fmt: skip
    elif t > TOO_LONG and math.log(t) > margin:
        host.say(
            "%s: a temperature of the mixture of %.3g, above 1, says that the networks are too sure, as after too many "
            "updates. A shorter run probably predicts better",
            method.name, t,
        )  # fmt: skip


def calibrate(active: ActiveRun) -> Calibration | None:
    """Return the temperature of the mixture of the members that the model shows; None if it cannot be fitted."""
    host, model, mesh = active.host, active.setup.model, active.setup.mesh
    if reason_against(host, model) is not None:
        return None
    heldout = HeldOutData(host)
    rows = evenly_spread(len(heldout.rows), most_rows(active))
    with torch.no_grad(), host.evaluation_autocast():
        try:
            return calibration_by_number(model, heldout.by_number, rows, mesh)
        except ValueError as error:  # a finished run must not be lost
            tell = host.warn if host.args.calibrate else host.say
            tell("predictions are not calibrated: %s", error)
            return None


def most_rows(active: ActiveRun) -> int:
    """Return the largest number of held-out rows that a fit at the end of a run may read."""
    gradients = active.run.num_updates * active.rows.scale.rows_per_update * active.method.num_chains
    model = active.setup.model
    members = model.num_members * model.member_group.size
    return max(LEAST_ROWS, int(0.3 * gradients / members))  # a gradient costs three forward passes
