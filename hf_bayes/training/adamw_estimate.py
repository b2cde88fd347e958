"""A MAP estimate on the training rows of a trainer, by AdamW. All processes find the same."""

from __future__ import annotations

from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.types import Problem
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.methods.assembly import adamw_rule
from hf_bayes.objectives.map_estimate import map_estimate
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.objectives.passes import member_passes
from hf_bayes.training.data.rows import TrainingRows
from hf_bayes.training.setup import Setup
from hf_bayes.training.trainer_host import TrainerHost


def adamw_estimate(
    host: TrainerHost,
    setup: Setup,
    rows: TrainingRows,
    method: MethodConfig,
    start: Tensor,
    energy: Problem,
    *,
    learning_rate: float,
    num_updates: int,
    title: str,
) -> Tensor:
    """Return the MAP estimate [1, d] that AdamW finds, without dropout.

    Args:
        host: the trainer.
        setup: its settings that do not change.
        rows: its training rows.
        method: the method of the run, whose weight of the prior is used.
        start: [1, d] the start.
        energy: the problem, with the prior.
        learning_rate: the rate of the first update.
        num_updates: the number of updates.
        title: the title of the progress bar.
    Raises:
        FloatingPointError: if AdamW diverges.
    """
    model, args = setup.model, host.args
    passes = member_passes(
        model, mesh=setup.mesh, chains=range(1), seed=args.seed, members_per_pass=args.members_per_pass,
        context=host.autocast, prepare=host.prepare,
    )  # fmt: skip
    with evaluating(model):
        return map_estimate(
            adamw_rule(energy, prior_weight=method.prior_weight),
            ModelObjective(passes, rows.scale),
            start.to(args.device),
            energy,
            rows.shared_updates(),
            learning_rate=learning_rate,
            num_updates=num_updates,
            title=title,
            progress=not args.disable_tqdm and host.is_first_process,
        )
