"""TrainingArguments whose defaults suit a sampler."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainingArguments

from hf_bayes.core.number_checks import is_finite_number
from hf_bayes.core.rng import require_seed

SHARDING = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
"""The variables that ``accelerate launch`` sets to have its processes take a model apart."""
PRECISIONS = ("no", "bf16")
BETTER_LOW = ("loss", "nll", "perplexity", "ece", "ence", "brier", "mse", "rmse", "aurc")
"""Ends of the names of metrics of which a lower value is better."""


@dataclass(repr=False)  # transformers' own hides tokens
class BayesianTrainingArguments(TrainingArguments):
    """``transformers.TrainingArguments`` with the defaults of a sampler and ten fields of our own.

    Clipping and weight decay are off (both change the stationary law; the prior is part of the method), the schedule
    is constant, and a NaN is never hidden from the logs.
    """

    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "Step size, in SGD's meaning. None leaves it to the method: samplers find a step size from "
            "curvature and gradient noise, optimisers and variational inference try several rates first. Without a "
            "method, this is the rate of AdamW, with which a sampler begins."
        },
    )
    max_grad_norm: float = field(default=0.0, metadata={"help": "Must be 0: clipping changes the law that is sampled."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Schedule of the step size."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide NaN from the logged loss; we never do."}
    )
    hub_strategy: str = field(default="end", metadata={"help": "Must be end: only a finished posterior is pushed."})
    num_data: float | None = field(
        default=None,
        metadata={"help": "N, the number of likelihood terms; None counts them in the data set."},
    )
    data_unit: Literal["token", "sequence"] = field(
        default="token",
        metadata={"help": "One likelihood term of a language model; 'sequence' divides by the mean length."},
    )
    minibatch: Literal["independent", "shared"] = field(
        default="independent",
        metadata={"help": "Whether every chain draws its own minibatches, or all chains see the same rows."},
    )
    members_per_pass: int | None = field(
        default=None,
        metadata={
            "help": "Members folded into one pass. None: as many as make about 512 rows in training, 1024 in "
            "evaluation."
        },
    )
    trunk_memory_gib: float = field(
        default=0.0,
        metadata={
            "help": "Device memory (GiB) for cached outputs of the frozen trunk. Pad all rows to one length. A resumed "
            "run then agrees up to rounding."
        },
    )
    map_updates: int | None = field(
        default=None,
        metadata={
            "help": "Updates of AdamW from the posterior's first member to the MAP estimate whose held-out NLL is "
            "saved beside the posterior's. None takes a tenth of the run's gradients; 0 leaves the comparison out. "
            "Never more than the updates of the run."
        },
    )
    calibrate: bool | None = field(
        default=None,
        metadata={
            "help": "Whether one temperature of the mixture is fitted on eval_dataset (of several, the one named "
            "'heldout') at the end and stored with the posterior. None does so where it is possible."
        },
    )
    probe_steps: int = field(
        default=100,
        metadata={
            "help": "Updates between two evaluations of the probe, at most 240 terms of the training data: R-hat "
            "and ESS come from their log-likelihoods and logits. 0: none but at the draws."
        },
    )
    noise_std: float | None = field(
        default=None,
        metadata={
            "help": "Standard deviation of the labels' noise, in their units. None: a regression learns it from "
            "eval_dataset. Labels far from 0 are best standardised: a fresh head begins there."
        },
    )

    private_rows: bool = field(
        default=False,
        metadata={
            "help": "Whether every process's train_dataset is its own, of its own size, and its rows stay there: the "
            "posterior is that of all of them together. Not every method allows it."
        },
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make ``class Args(BayesianTrainingArguments, SFTConfig)`` take the fields of both without ``@dataclass``.

        A class that adds fields of its own needs the decorator, as every dataclass does.
        """
        super().__init_subclass__(**kwargs)
        if not inspect.get_annotations(cls):
            dataclass(repr=False)(cls)

    def __post_init__(self) -> None:
        # before transformers checks: its error requires a package that is refused after it is installed
        sharding = [name for variable, name in SHARDING.items() if os.environ.get(variable, "").lower() == "true"]
        if sharding:
            raise ValueError(
                f"the launcher asks for {' and '.join(sharding)}, which would shard or rebuild the parameters that "
                "are sampled and is not supported: leave it out of accelerate's flags and config file, and quantise a "
                "base that does not fit one device"
            )
        if self.deepspeed:  # transformers would ask for the package first
            raise ValueError(
                f"deepspeed={self.deepspeed!r} would shard or rebuild the parameters that are sampled and is not "
                "supported: leave it out, and quantise a base that does not fit one device"
            )
        if self.output_dir == "":
            raise ValueError(
                "output_dir must be a folder, got an empty name: leave it out for the default, or name one"
            )
        self._check_steps()
        if self.greater_is_better is None and _is_better_low(self.metric_for_best_model):
            self.greater_is_better = False  # transformers would take True for all names that do not end in "loss"
        super().__post_init__()  # type: ignore[no-untyped-call]
        self._check_values()

    def _check_values(self) -> None:
        """Check values, after transformers has set those that it sets itself."""
        for name, choices in (("data_unit", ("token", "sequence")), ("minibatch", ("independent", "shared"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not is_finite_number(self.num_train_epochs) or self.num_train_epochs < 0:
            raise ValueError(f"num_train_epochs must be a finite number >= 0, got {self.num_train_epochs!r}")
        for name in ("learning_rate", "num_data", "noise_std"):
            value = getattr(self, name)
            if value is not None and not (is_finite_number(value) and value > 0):
                raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
        require_seed(self.seed, largest=2**32 - 1)  # numpy, which transformers seeds, takes no larger one
        if self.data_seed is not None:
            require_seed(self.data_seed, name="data_seed")
        if self.members_per_pass is not None and self.members_per_pass < 1:
            raise ValueError(f"members_per_pass must be >= 1, got {self.members_per_pass}")
        if not 0 <= self.trunk_memory_gib < float("inf"):
            raise ValueError(f"trunk_memory_gib must be a finite number >= 0, got {self.trunk_memory_gib}")
        if self.map_updates is not None and self.map_updates < 0:
            raise ValueError(f"map_updates must be >= 0, got {self.map_updates}")
        if self.private_rows:
            if self.map_updates:
                raise ValueError(
                    f"map_updates must be 0 with private_rows, got {self.map_updates}: the gradients of a MAP estimate "
                    "would leave their processes. Leave it out"
                )
            self.map_updates = 0
        if self.probe_steps < 0:
            raise ValueError(f"probe_steps must be >= 0, got {self.probe_steps}")
        if not isinstance(self.lr_scheduler_kwargs, dict | None):
            raise ValueError(
                f"lr_scheduler_kwargs must be a mapping of names to values, got {self.lr_scheduler_kwargs!r}: leave it "
                "out for the schedule's defaults"
            )
        if self.mixed_precision not in PRECISIONS:  # by fp16=True, or by accelerate's flag or config file
            raise ValueError(
                f"{self.mixed_precision} is refused: its loss scaling skips updates of the chain, or its layers are "
                "not the model's own. Use bf16=True (accelerate launch --mixed_precision bf16) or float32"
            )

    def _check_steps(self) -> None:
        """Check counts that transformers takes as they are: some would never act, or stop a run late."""
        for event in ("logging", "save", "eval"):
            steps = getattr(self, f"{event}_steps")
            if getattr(self, f"{event}_strategy") != "steps" or steps is None:
                continue
            if not is_finite_number(steps) or steps <= 0:
                raise ValueError(
                    f"{event}_steps must be a number > 0, got {steps!r}: it counts updates, and below 1 it is a share "
                    f"of them. To leave these steps out set {event}_strategy='no'"
                )
        steps = self.eval_accumulation_steps
        if steps is not None and steps < 1:
            raise ValueError(f"eval_accumulation_steps must be at least 1, got {steps}: leave it out for no limit")
        if self.dataloader_num_workers < 0:
            raise ValueError(
                f"dataloader_num_workers must be >= 0, got {self.dataloader_num_workers}: 0 loads in this process"
            )
        if self.max_steps < -1:
            raise ValueError(
                f"max_steps must be a number of updates, or -1 for num_train_epochs, got {self.max_steps}: leave it out"
            )


def _is_better_low(metric: str | None) -> bool:
    """Check whether a lower value of ``metric_for_best_model`` is better, by the end of its name."""
    return metric is not None and metric.rpartition("_")[2] in BETTER_LOW
