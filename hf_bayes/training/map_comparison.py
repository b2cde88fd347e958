"""The comparison of a posterior with a MAP estimate on held-out rows."""

from __future__ import annotations

from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.adamw_estimate import adamw_estimate
from hf_bayes.training.trainer_host import TrainerHost

SHOWN = 1e-4
"""The smallest difference of NLLs that is reported, because they are shown with four decimal places."""


def map_of_run(posterior: Posterior, active: ActiveRun) -> Tensor | None:
    """Return a MAP estimate [1, d]: the posterior's first member, or mean, polished by AdamW on its own energy.

    This energy is that of the chains: U_lik + T U_prior if only the likelihood is tempered, under the prior of the rung
    that a ladder has chosen.

    By default that takes a tenth of the gradients that the run took, but no more updates than it had. All processes
    find the same. None where no comparison is wanted (``map_updates=0``), or the optimiser diverges.
    """
    args, method, setup = active.host.args, active.method, active.setup
    if args.map_updates == 0:
        return None
    steps = active.run.num_updates  # fewer than planned after an early stop
    mean = posterior.representative[: setup.model.layout.dim]  # without statistics of batch normalisation
    start: Tensor = setup.mesh.share(mean.cpu())[0][None].to(args.device)
    if method.requirements.ends_at_map:
        return start
    count = args.map_updates if args.map_updates is not None else -(-steps * method.num_chains // 10)
    count = min(count, steps)
    try:
        return adamw_estimate(
            active.host, setup, active.rows, method, start, active.energy,
            learning_rate=method.adamw_learning_rate, num_updates=count, title="MAP estimate, for comparison",
        )  # fmt: skip
    except FloatingPointError as error:  # a comparison that fails must not lose a finished run
        active.host.warn("the MAP estimate for comparison diverged and is left out: %s", error)
        return None


def compare(
    host: TrainerHost, name: str, nll: float, map_nll: float, std_error: float | None, *, method: MethodConfig
) -> None:
    """Describe the held-out NLL, and its difference to a MAP estimate's if that exceeds two standard errors.

    Args:
        method: the method of the run, whose own advice is given if the posterior is worse.
        name: the name of the data set, with an underscore at its end; "" if there is only one.
    """
    of = f" ({name[:-1]})" if name else ""
    if std_error is None or abs(nll - map_nll) <= max(2 * std_error, SHOWN):
        host.say("held-out NLL%s: %.4f", of, nll)
    elif nll < map_nll:
        host.say("held-out NLL%s: %.4f, MAP estimate %.4f (+- %.2g)", of, nll, map_nll, std_error)
    else:
        cooling = f", {method.requirements.cooling_advice}" if method.temperature > 0 else ""
        host.warn(
            "the posterior's held-out NLL%s %.4f is worse than a MAP estimate's %.4f (standard error of the "
            "difference %.2g): train longer%s, or use the MAP estimate",
            of, nll, map_nll, std_error, cooling,
        )  # fmt: skip
