"""``posterior_config.json``: the description of a posterior. Unknown and missing keys are errors."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_bayes.core.layout import Layout
from hf_bayes.core.number_checks import is_integer, is_number
from hf_bayes.core.rng import MAX_SEED
from hf_bayes.distributions.approximations import GAUSSIANS
from hf_bayes.posteriors.abstention import Abstention
from hf_bayes.posteriors.storage.formats import MAX_NAME, MAX_TENSORS
from hf_bayes.posteriors.storage.json_types import has_keys, is_line
from hf_bayes.posteriors.storage.json_values import json_fields
from hf_bayes.posteriors.storage.listing import shown
from hf_bayes.posteriors.student import check_description
from hf_bayes.posteriors.tasks import TASKS
from hf_bayes.uncertainty.gaussian_links import PREDICTIONS

FORMAT_VERSION = 1
CONFIG = "posterior_config.json"
CALIBRATION = (
    "temperature", "log_std_error", "nll", "calibrated_nll", "nll_std_error", "num_terms", "num_members", "prediction",
)  # fmt: skip
"""The keys of ``PosteriorConfig.calibration``."""
_OBJECTS = (
    "method", "prior", "base_model", "head", "calibration", "student", "layer_factors", "abstention", "versions",
    "diagnostics", "metrics",
)  # fmt: skip


@functools.cache
def _library_versions() -> tuple[tuple[str, str], ...]:
    versions = {}
    for name in ("hf-bayes", "torch", "transformers", "peft", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(versions.items())


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that a posterior depends on."""
    return dict(_library_versions())


@dataclass(frozen=True, kw_only=True)
class PosteriorConfig:
    """The content of ``posterior_config.json``.

    Attributes:
        format_version: the version of the format of this file.
        task: one of ``tasks.TASKS``.
        method: ``MethodConfig.to_dict()``.
        approximation: "draws", or one of ``approximations.GAUSSIANS``: "gaussian" (diagonal), "gaussian_kronecker" ...
        parameters: [name, shape] of each random tensor as the user's model names it, in the order of theta.
        num_members: the number of stored draws; 0 for a Gaussian.
        member_chains: the chain of each draw; empty for a Gaussian. ``Posterior`` fills in an empty list.
        subspace: the choice of the random parameters.
        prior: the name and settings of the prior.
        num_data: N, the number of likelihood terms, or None if it is not known.
        data_unit: the unit of N.
        base_model: name_or_path, revision, dtype and fingerprint {weights, config, tokenizer}, each a text or None.
        head: the settings of the base model's head (id2label, problem_type, noise_std ...).
        prediction: the way in which the loaded posterior predicts, one of ``gaussian_links.PREDICTIONS``: "members", or
            for a Gaussian also by outputs that are linear in the parameters ("linearised", ...).
        calibration: the temperature of the mixture for that prediction with all members, and what it changes on
            held-out rows (the fields of ``metrics.calibration.Calibration``); empty if none was fitted.
        student: the description of a distilled student (the keys ``student.KEYS``); empty without one.
        layer_factors: path of a module -> the factor of the variance that its weights add in a single pass, fitted to
            members or to held-out rows; empty if none was fitted.
        abstention: the threshold above which answers are withheld (the fields of ``abstention.Abstention``); empty if
            none was fitted.
        versions: library -> version.
        seed: the seed of the run (at most ``rng.MAX_SEED``), or None without one.
        diagnostics: the diagnostics of the run. ``converged`` (true, false or null) and ``verdict`` (a sentence) decide
            on a warning. NaN and infinities become null, which means "not defined".
        metrics: held-out figures. NaN and infinities become null here, too.
    """

    format_version: int = FORMAT_VERSION
    task: str
    method: dict[str, Any]
    approximation: str
    parameters: list[list[Any]]
    num_members: int
    member_chains: list[int] = field(default_factory=list)
    subspace: str
    prior: dict[str, Any]
    num_data: float | None
    data_unit: str
    base_model: dict[str, Any]
    head: dict[str, Any] = field(default_factory=dict)
    prediction: str = "members"
    calibration: dict[str, Any] = field(default_factory=dict)
    student: dict[str, Any] = field(default_factory=dict)
    layer_factors: dict[str, float] = field(default_factory=dict)
    abstention: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=library_versions)
    seed: int | None
    diagnostics: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name, value in json_fields(given, undefined_is_null=("diagnostics", "metrics")).items():
            object.__setattr__(self, name, value)
        self._check()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = CONFIG) -> PosteriorConfig:
        """Return the config of a parsed file.

        Raises:
            ValueError: naming unknown and missing keys, or the value that is wrong.
        """
        version = values.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(
                f"{where}: format_version is {version!r}, this version of hf_bayes reads {FORMAT_VERSION}: use the "
                "version of hf_bayes that wrote it (key 'versions')"
            )
        known = set(cls.__dataclass_fields__)
        missing, unknown = sorted(known - set(values)), sorted(set(values) - known)
        if missing or unknown:
            raise ValueError(f"{where}: missing keys {shown(missing)}, unknown keys {shown(unknown)}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @property
    def layout(self) -> Layout:
        """The columns of theta that belong to each tensor."""
        return Layout(tuple(name for name, _ in self.parameters), tuple(tuple(shape) for _, shape in self.parameters))

    def _check(self) -> None:
        _require(self.format_version == FORMAT_VERSION, "format_version", self.format_version, f"{FORMAT_VERSION}")
        _require(self.task in list(TASKS), "task", self.task, f"one of {', '.join(TASKS)}")
        known = ["draws", *GAUSSIANS]
        _require(self.approximation in known, "approximation", self.approximation, f"one of {', '.join(known)}")
        for name in _OBJECTS:
            _require(isinstance(getattr(self, name), dict), name, getattr(self, name), "an object")
        for name in ("subspace", "data_unit"):
            _require(is_line(getattr(self, name)), name, getattr(self, name), _LINE)
        _require(is_line(self.method.get("name")), "method", self.method, f"an object with the method's name, {_LINE}")
        _require(_is_count(self.num_members), "num_members", self.num_members, "an integer >= 0")
        if self.approximation == "draws":
            _require(
                self.num_members >= 1, "num_members", self.num_members, "at least 1: a posterior of 0 members is empty"
            )
        else:
            _require(self.num_members == 0, "num_members", self.num_members, "0 for a gaussian")
        chains = self.member_chains
        fine = isinstance(chains, list) and len(chains) in (0, self.num_members) and all(_is_count(c) for c in chains)
        _require(fine, "member_chains", chains, f"the chain of each of the {self.num_members} members")
        fine = self.seed is None or is_integer(self.seed, 0, MAX_SEED + 1)
        _require(fine, "seed", self.seed, f"an integer from 0 to {MAX_SEED}, or null")
        fine = self.num_data is None or (is_number(self.num_data) and self.num_data > 0)
        _require(fine, "num_data", self.num_data, "a number > 0 or null")
        self._check_prediction()
        self._check_calibration()
        if self.student:
            check_description(self.student)
        self._check_layer_factors()
        if self.abstention:
            Abstention.from_dict(self.abstention)
        self._check_parameters()
        self._check_base_model()
        converged, verdict = self.diagnostics.get("converged"), self.diagnostics.get("verdict")
        fine = converged is None or isinstance(converged, bool)
        _require(fine, "diagnostics.converged", converged, "true, false or null")
        _require(verdict is None or isinstance(verdict, str), "diagnostics.verdict", verdict, "a sentence")

    def _check_prediction(self) -> None:
        known = list(PREDICTIONS) if self.approximation != "draws" else ["members"]
        _require(
            self.prediction in known,
            "prediction",
            self.prediction,
            f"one of {', '.join(known)} for {self.approximation}",
        )

    def _check_layer_factors(self) -> None:
        for path, factor in self.layer_factors.items():
            fine = is_line(path) and is_number(factor) and 0 < factor < math.inf
            _require(fine, "layer_factors", {path: factor}, "a number > 0 for each layer")

    def _check_calibration(self) -> None:
        if not self.calibration:
            return
        fine = set(self.calibration) == set(CALIBRATION)
        _require(fine, "calibration", sorted(self.calibration), f"the keys {sorted(CALIBRATION)}, or no keys")
        for name in ("temperature", "log_std_error", "nll", "calibrated_nll", "nll_std_error"):
            _require(is_number(self.calibration[name]), f"calibration.{name}", self.calibration[name], "a number")
        _require(self.calibration["temperature"] > 0, "calibration.temperature", self.calibration["temperature"], "> 0")
        for name in ("num_terms", "num_members"):
            value = self.calibration[name]
            _require(_is_count(value), f"calibration.{name}", value, "an integer >= 0")
        prediction = self.calibration["prediction"]
        _require(
            prediction in list(PREDICTIONS), "calibration.prediction", prediction, f"one of {', '.join(PREDICTIONS)}"
        )

    def _check_parameters(self) -> None:
        fine: Any = isinstance(self.parameters, list) and self.parameters
        _require(fine, "parameters", self.parameters, "[name, shape] pairs")
        if len(self.parameters) > MAX_TENSORS:
            raise ValueError(f"parameters has {len(self.parameters):,} entries, expected at most {MAX_TENSORS:,}")
        for pair in self.parameters:
            match pair:
                case [name, [*sizes]]:
                    fine = is_line(name) and all(is_integer(size, 1, _MAX_COUNT) for size in sizes)
                case _:
                    fine = False
            _require(fine, "parameters", pair, f"a [name, shape] pair, the name {_LINE}")
            if len(pair[0]) > MAX_NAME:
                raise ValueError(f"a name in parameters has {len(pair[0]):,} characters, expected at most {MAX_NAME:,}")
        counts = Counter(name for name, _ in self.parameters)
        twice = sorted(name for name, count in counts.items() if count > 1)
        _require(not twice, "parameters", twice, "each name once")

    def _check_base_model(self) -> None:
        keys = {"name_or_path", "revision", "dtype", "fingerprint"}
        _require(set(self.base_model) == keys, "base_model", sorted(self.base_model), f"the keys {sorted(keys)}")
        fingerprint = self.base_model["fingerprint"]
        keys = {"weights", "config", "tokenizer"}
        _require(has_keys(fingerprint, keys), "base_model.fingerprint", fingerprint, f"an object with {sorted(keys)}")
        texts = {**fingerprint, **{key: value for key, value in self.base_model.items() if key != "fingerprint"}}
        for key, value in texts.items():
            _require(value is None or is_line(value), f"base_model: {key}", value, f"{_LINE}, or null")
        dtype = self.base_model["dtype"]
        fine = dtype is None or isinstance(getattr(torch, dtype, None), torch.dtype)
        _require(fine, "base_model: dtype", dtype, "the name of a dtype of torch, such as bfloat16, or null")


def _require(fine: Any, name: str, value: Any, expected: str) -> None:
    if not fine:
        raise ValueError(f"{name} must be {expected}, got {json.dumps(value, default=str)[:200]}")


_LINE = "a line of text without control characters"
"""The expected form of a name, because names stand in messages."""
_MAX_COUNT = 2**63


def _is_count(value: Any) -> bool:
    return is_integer(value, 0, _MAX_COUNT)
