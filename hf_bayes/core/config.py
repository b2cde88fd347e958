"""The base class of all method configs.

A config identifies a method and is saved as JSON beside the draws.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from hf_bayes.core import schedules
from hf_bayes.core.number_checks import is_count, is_finite_number
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.schedules import Schedule
from hf_bayes.core.types import Kernel, Problem, Rule

MODE_PRIOR_SCALE = 4.0
"""The ``Requirements.mode_prior_scale`` of methods that end in a mode. On CLINC150, with LoRA in all layers, it lowers
the test NLL of a deep ensemble and of plain fine-tuning by .025 nats each (docs/results/recommend.md)."""

DEFAULT_ADAMW_RATE = 1e-3
"""AdamW's step size where none was given or found."""

PriorName = Literal["gaussian", "he", "laplace"]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The fields that all methods share. Each method's file adds its own fields.

    Attributes:
        num_chains: number of independent chains (members), K.
        draws_per_chain: number of draws kept from each chain, S. The posterior has K * S members.
        burn_in: updates before the first draw: a fraction of the run if below 1, otherwise a number of updates. None
            means half of the run; for a sampler that finds its own step size, at least the warm start and 15 % of the
            run.
        thin: updates between two draws; None spreads the draws evenly over the updates after burn-in.
        prior: "gaussian"; "he", the same with ``prior_std`` times sqrt(2 / fan-in) for every matrix or kernel; or
            "laplace" (double exponential).
        prior_std: standard deviation of the prior in parameter units: one number, or a mapping {regular expression on
            parameter names: std}. Exactly one expression must match each random tensor. None: LoRA's factors have
            standard deviations in units of their effect (``distributions.priors.lora_stds``), and other tensors have 1.
            In a model with LoRA, methods that end in a mode multiply all of these but A's by
            ``Requirements.mode_prior_scale``.
        prior_scale: a factor of all standard deviations of the prior, given ones and default ones.
        prior_mean: "zero", or "initial": the initial weights of the model.
        temperature: T. 1 is the Bayes posterior; 0 is optimisation (cold_posteriors eq. 2).
        temper: "posterior" targets exp(-U/T); "likelihood" tempers the likelihood alone and leaves the prior at T = 1.
        init_jitter: standard deviation of the chains' starting points around the model's weights, relative to each
            tensor's RMS (to 0.01 if the tensor is zero, such as a new LoRA's B). A new LoRA's A is drawn again for each
            chain.
        schedule: the schedule of learning rate and temperature (``hf_bayes.core.schedules``), or a mapping such as
            {"name": "cyclical", "ramp_up": 0.2}. None leaves the learning rate to lr_scheduler_type and T constant.
        warm_start_steps: number of AdamW updates on U before the method starts (they count as burn-in). None means 0,
            or all of burn-in if ``warm_start_learning_rate`` is given. For a sampler that finds its own step size
            (``learning_rate=None``), None means 240, but at least a quarter and at most a half of the run.
        warm_start_learning_rate: AdamW's step size in these updates. None means 1e-3. For a sampler that finds its own
            step size, None means the result of a range test, and AdamW's step size falls linearly to 0.
    """

    name: ClassVar[str]
    num_chains: int = 4
    draws_per_chain: int = 1
    burn_in: float | None = None
    thin: int | None = None
    prior: PriorName = "gaussian"
    prior_std: float | dict[str, float] | None = None
    prior_scale: float = 1.0
    prior_mean: Literal["zero", "initial"] = "zero"
    temperature: float = 1.0
    temper: Literal["posterior", "likelihood"] = "posterior"
    init_jitter: float = 0.1
    schedule: Schedule | None = None
    warm_start_steps: int | None = None
    warm_start_learning_rate: float | None = None

    @property
    def requirements(self) -> Requirements:
        """The record of what this method, with these fields, needs from a run."""
        return Requirements()

    def __post_init__(self) -> None:
        self._check_count("num_chains", self.num_chains, minimum=1)
        self._check_count("draws_per_chain", self.draws_per_chain, minimum=1)
        if self.warm_start_steps is not None:
            self._check_count("warm_start_steps", self.warm_start_steps, minimum=0)
        if self.thin is not None:
            self._check_count("thin", self.thin, minimum=1)
        if self.burn_in is not None:
            self._check_number("burn_in", self.burn_in, minimum=0.0)
        self._check_number("temperature", self.temperature, minimum=0.0)
        self._check_number("init_jitter", self.init_jitter, minimum=0.0)
        if self.warm_start_learning_rate is not None:
            self._check_number("warm_start_learning_rate", self.warm_start_learning_rate, minimum=0.0, strict=True)
        by_expression = self.prior_std_by_expression
        for std in [self.prior_std] if by_expression is None else by_expression.values():
            if std is not None:
                self._check_number("prior_std", std, minimum=0.0, strict=True)
        self._check_number("prior_scale", self.prior_scale, minimum=0.0, strict=True)
        if isinstance(self.schedule, Mapping):
            object.__setattr__(self, "schedule", schedules.from_dict(self.schedule))
        if not isinstance(self.schedule, Schedule | None):
            raise ValueError(f"{self.name}: schedule must be None, a Schedule or a mapping, got {self.schedule!r}")
        self._check_choice("prior", self.prior, get_args(PriorName))
        self._check_choice("prior_mean", self.prior_mean, ("zero", "initial"))
        self._check_choice("temper", self.temper, ("posterior", "likelihood"))

    def build(self, problem: Problem) -> Rule[Any] | Kernel[Any]:
        """Return the method's own rule or kernel for this problem.

        ``methods.assembly.assemble`` adds the ladder, the warm start, whitening and the schedule of the config.
        """
        raise TypeError(f"{type(self).__name__} is not a method: use one of hf_bayes.METHODS")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready fields, with the method's name."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @property
    def prior_std_by_expression(self) -> dict[str, float] | None:
        """The mapping of ``prior_std``, {regular expression: std}; None if ``prior_std`` is one number or None."""
        return self.prior_std if isinstance(self.prior_std, dict) else None

    @property
    def given_prior(self) -> dict[str, Any]:
        """{name: value} of the fields of the prior that are not at their defaults."""
        fields = ("prior", "prior_std", "prior_scale", "prior_mean")
        return {name: getattr(self, name) for name in fields if getattr(self, name) != getattr(MethodConfig, name)}

    @property
    def num_warm_start_steps(self) -> int:
        """``warm_start_steps`` as a number."""
        return self.warm_start_steps or 0

    @property
    def adamw_learning_rate(self) -> float:
        """``warm_start_learning_rate`` as a number."""
        return self.warm_start_learning_rate or DEFAULT_ADAMW_RATE

    @property
    def prior_weight(self) -> float:
        """The factor of U_prior in the energy of a sampler: T if only the likelihood is tempered, otherwise 1."""
        return self.temperature if self.temper == "likelihood" else 1.0

    def _check_count(self, field: str, value: Any, *, minimum: int) -> None:
        if not is_count(value, minimum=minimum):
            raise ValueError(f"{self.name}: {field} must be an integer >= {minimum}, got {value!r}")

    def _check_number(
        self, field: str, value: Any, *, minimum: float, maximum: float = math.inf, strict: bool = False
    ) -> None:
        """Require a finite number in [minimum, maximum); ``strict`` excludes the minimum."""
        if not is_finite_number(value) or value < minimum or value >= maximum or (strict and value == minimum):
            bound = f"{'>' if strict else '>='} {minimum:g}" + ("" if maximum == math.inf else f" and < {maximum:g}")
            raise ValueError(f"{self.name}: {field} must be a finite number {bound}, got {value!r}")

    def _check_flag(self, field: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"{self.name}: {field} must be true or false, got {value!r}")

    def _check_choice(self, field: str, value: Any, choices: tuple[str | None, ...]) -> None:
        if value not in choices:
            raise ValueError(f"{self.name}: {field} must be one of {', '.join(map(str, choices))}, got {value!r}")


def check_config(method: Any) -> None:
    """Raise a ValueError unless ``method`` is a method's config (and not, say, its name or its class)."""
    if not isinstance(method, MethodConfig):
        raise ValueError(f"method must be a config, an instance of a class in hf_bayes.METHODS, got {method!r:.100}")


def check_schedules(method: MethodConfig, given: str | None = None) -> None:
    """Check that a run has one schedule of step sizes at most, and that its method follows it.

    Args:
        method: a config, which may have a schedule.
        given: another schedule of the run, as error messages quote it.
    Raises:
        ValueError: naming the schedules.
    """
    own = None if method.schedule is None else f"schedule={method.schedule.name!r}"
    if own and given:
        raise ValueError(f"{given} and {method.name}'s own {own} are two schedules: leave one of them out")
    if (own or given) and not method.requirements.follows_schedule:
        raise ValueError(
            f"{method.name} sets its step sizes itself and would ignore {own or given}: leave it out, or use a method "
            "that takes the learning rate of each update"
        )
