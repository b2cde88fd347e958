"""The figures of a model card in the Hub's format (model-index): of the run's held-out data, and of an evaluation.

``EVALUATION`` is the file of ``hf-bayes evaluate``. Like the card itself it is not part of the verified posterior. A
run into the same directory replaces the posterior only, so every file beside the card holds the fingerprint of its
posterior.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult

from hf_bayes.core.number_checks import is_number
from hf_bayes.posteriors.markdown import one_line
from hf_bayes.posteriors.storage.formats import decode_json

EVALUATION = "evaluation.json"
"""The results of ``hf-bayes evaluate``, beside the card."""
POSTERIOR = "posterior"
"""The key of an evaluation whose value is the fingerprint of the posterior that was evaluated."""
PICTURE = "heat_map.png"
"""A picture of a text with coloured tokens, beside the card."""
NAMES = {
    "nll": "Negative log-likelihood of the mixture (nats)",
    "calibrated_nll": "NLL with the temperature of the mixture, cross-validated (nats)",
    "perplexity": "Perplexity of the mixture",
    "accuracy": "Accuracy",
    "ece": "Expected calibration error",
    "ace": "Coverage error of prediction intervals",
    "brier": "Brier score",
    "mse": "Mean squared error",
}
"""The metrics that go into the model-index, and their names there."""
_BY = ("epistemic", "total", "aleatoric", "epistemic_std", "predictive_std", "confidence")


class Row(NamedTuple):
    """A figure of an evaluation in a card's table."""

    data: str
    name: str
    value: float
    std_error: float | None


def eval_results(
    config: Mapping[str, Any], task: str, datasets: Sequence[str] = (), evaluation: Mapping[str, Any] | None = None
) -> list[EvalResult]:
    """Return the entries of the model-index.

    A figure of the run whose name begins with the name of an eval set, as "far_nll", belongs to that set.

    Args:
        config: ``PosteriorConfig.to_dict()``.
        task: the Hub's name of the task.
        datasets: ids of the data sets on the Hub. A single one is the data set of the figures.
        evaluation: the content of ``EVALUATION``, if there is one.
    """
    kind = one_line(datasets[0]) if len(datasets) == 1 else "held-out"
    held_out = f"{kind} (held-out rows)" if len(datasets) == 1 else "held-out data"
    found = []
    for key, value in _figures(config).items():
        prefix, metric = _split(key)
        if metric is not None:
            data = f"{prefix} (held-out)" if prefix else held_out
            found.append(_result(task, kind, data, metric, value, part=prefix or None))
    for row in evaluation_rows(evaluation):
        is_auroc = row.name.startswith("auroc")
        data = f"{row.data} against the test set" if is_auroc else "test set of hf-bayes evaluate"
        found.append(_result(task, "evaluation", data, row.name, row.value, part=row.data))
    return found


def read_evaluation(file: Path, fingerprint: str) -> dict[str, Any]:
    """Return the results of ``hf-bayes evaluate``, if they are of the posterior with this fingerprint.

    Raises:
        OSError: if the file cannot be read.
        ValueError: for a file of other content, for the figures of another posterior, and if the file does not record
            its posterior.
    """
    evaluation = decode_json(file.read_bytes(), where=str(file))
    if not evaluation_rows(evaluation):
        raise ValueError(f"{file} has no figures: give results.json of hf-bayes evaluate")
    found = evaluation.get(POSTERIOR)
    if not isinstance(found, str):
        raise ValueError(f"{file} does not record which posterior it is of: run hf-bayes evaluate again")
    if found != fingerprint:
        raise ValueError(
            f"{file} has the figures of another posterior (fingerprint {found[:12]!r}, expected "
            f"{fingerprint[:12]!r}): run hf-bayes evaluate again, with this one"
        )
    return evaluation


def stamp(fingerprint: str) -> str:
    """Return the text in a file beside the card that says which posterior the file is of."""
    return f"posterior {fingerprint}"


def read_beside(file: Path, fingerprint: str) -> Any:
    """Return the content of a file beside the card, if it is of the posterior with this fingerprint.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if its stamp is missing or another posterior's, and as ``read_evaluation``.
    """
    if file.name == EVALUATION:
        return read_evaluation(file, fingerprint)
    content = file.read_bytes()
    if stamp(fingerprint).encode() not in content:
        raise ValueError(
            f"{file} is of another posterior, or does not say which: it does not hold {stamp(fingerprint)!r}. Write it "
            "anew by hf-bayes export --card --benchmark, or delete it"
        )
    return content


def evaluation_rows(evaluation: Mapping[str, Any] | None) -> list[Row]:
    """Return the figures of an evaluation: scores and calibration of its test set, and the detection of other data."""
    given = evaluation or {}
    errors = _object(given.get("std_error"))
    rows = [Row("test", name, given[name], _number(errors.get(name))) for name in NAMES if is_number(given.get(name))]
    areas, area_errors = _object(given.get("auroc")), _object(errors.get("auroc"))
    for other, by in areas.items():
        own = _object(area_errors.get(other))
        measured = _object(by)
        rows += [
            Row(one_line(str(other)), f"auroc_{name}", measured[name], _number(own.get(name)))
            for name in _BY
            if is_number(measured.get(name))
        ]
    return rows


def _figures(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the finite figures of the run by name, the calibrated NLL among them."""
    known = {key.removeprefix("eval_"): value for key, value in config["metrics"].items()}
    known |= {"calibrated_nll": config["calibration"]["calibrated_nll"]} if config.get("calibration") else {}
    return {key: value for key, value in known.items() if is_number(value)}


def _split(key: str) -> tuple[str, str | None]:
    """Return (name of the eval set or "", metric), None for a metric that is not reported."""
    if key in NAMES:
        return "", key
    prefix, _, metric = key.rpartition("_")
    fits = metric in NAMES and prefix.rpartition("_")[2] not in ("map", "member", "limit", "calibrated")
    return one_line(prefix), metric if fits else None


def _result(task: str, kind: str, data: str, metric: str, value: float, *, part: str | None) -> EvalResult:
    """Return an entry. The Hub joins entries of one kind of data, unless they differ in ``part``."""
    by = metric.removeprefix("auroc_")
    name = NAMES.get(metric, f"AUROC of telling these inputs apart by {by} uncertainty")
    return EvalResult(
        task_type=task, dataset_type=kind, dataset_name=data, dataset_config=part, metric_type=metric,
        metric_value=value, metric_name=name,
    )  # fmt: skip


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
