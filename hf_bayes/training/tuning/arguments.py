"""The training arguments of a tuning: those that its trials do not use, and the repository of its posterior."""

from __future__ import annotations

import warnings
from pathlib import Path

from hf_bayes.posteriors.compat import is_repo_id
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.checks.arguments import refuse_early_push

_LEAVE_OUT = "Leave it out"
REASONS = {
    "learning_rate": "each method has its own rate, or finds it. Leave it out, or train one method with it "
    "(BayesianTrainer; hf-bayes train or classify with a --method)",
    "eval_strategy": f"each trial is evaluated once, at its end. {_LEAVE_OUT}",
    "save_strategy": f"each trial is kept as soon as it is finished, and has no checkpoints. {_LEAVE_OUT}",
    "resume_from_checkpoint": f"the same call continues the tuning in output_dir. {_LEAVE_OUT}",
    "report_to": f"trials report to no tracker. {_LEAVE_OUT}",
    "map_updates": f"plain fine-tuning, which is a MAP estimate, is a candidate. {_LEAVE_OUT}",
}
"""The arguments that no trial uses -> why a tuning refuses them, and what to do."""

_HARMLESS = {"eval_strategy": ("no",), "save_strategy": ("no", "steps"), "resume_from_checkpoint": ("false",)}
"""Values of these arguments that ask for nothing, or that are the default."""

UNUSED = frozenset(REASONS) | {"eval_steps", "save_steps", "save_total_limit", "logging_strategy", "logging_steps"}
"""The arguments that do nothing in a tuning. Lists of arguments leave them out."""


def check_arguments(args: BayesianTrainingArguments, budget: int | None) -> None:
    """Refuse arguments that no trial uses, and warn of a length of the runs that is given beside a budget.

    They would be ignored, and a finished comparison with other values would look like the answer.

    Raises:
        ValueError: naming the argument, and for a push to what is no repository.
    """
    for name, reason in REASONS.items():
        value = getattr(args, name)
        if value and value not in _HARMLESS.get(name, ()):
            raise ValueError(f"{name}={getattr(value, 'value', value)} would be ignored: {reason}")
    fields = type(args).__dataclass_fields__
    lengths = {name: getattr(args, name) for name in ("max_steps", "num_train_epochs")}
    given = [f"{name}={value:g}" for name, value in lengths.items() if value != fields[name].default]
    if budget is not None and given:
        warnings.warn(
            f"budget={budget!r} gives the length of the runs: {' and '.join(given)} of the arguments will not be used"
        )
    refuse_early_push(args)
    if args.push_to_hub and not is_repo_id(repository(args)):
        raise ValueError(
            f"push_to_hub would upload to {repository(args)!r}, which is no id of a repository: set hub_model_id, such "
            "as user/name"
        )


def repository(args: BayesianTrainingArguments) -> str:
    """Return the id of the repository of the posterior: as in Trainer, the name of output_dir if none is given."""
    return args.hub_model_id or Path(str(args.output_dir)).absolute().name
