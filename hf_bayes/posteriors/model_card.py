"""The model card of a posterior: the ``README.md`` of its directory, for readers who do not know hf_bayes.

Every value in the card is escaped in one of three ways. Expressions of the template pass through ``markdown``, code
gets string literals by ``literal``, and YAML quotes the metadata. All three begin with ``one_line``.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import jinja2
from huggingface_hub import ModelCard, ModelCardData

from hf_bayes.core.number_checks import is_number
from hf_bayes.posteriors import storage
from hf_bayes.posteriors.card_results import EVALUATION, PICTURE, eval_results, evaluation_rows, read_beside
from hf_bayes.posteriors.compat import is_repo_id
from hf_bayes.posteriors.config import CONFIG
from hf_bayes.posteriors.directory import fingerprint_of
from hf_bayes.posteriors.file_formats import ADAPTER_CONFIG
from hf_bayes.posteriors.hub import CARD, is_local
from hf_bayes.posteriors.markdown import Verbatim, literal, markdown, one_line
from hf_bayes.posteriors.model_card_explanations import (
    COVARIANCES,
    DIAGNOSTICS,
    METHODS,
    METRICS,
    awaits_temperature,
    explanation,
)
from hf_bayes.posteriors.sidecars import is_sidecar
from hf_bayes.posteriors.tasks import TASKS

CUSTOM_GENERATE = "custom_generate/generate.py"
"""The file that ``generate(custom_generate=...)`` of transformers runs, see ``posteriors.custom_generate``."""
_TEMPLATES = Path(__file__).parent / "templates"


class CardFields(TypedDict, total=False):
    """The fields of a model card that only the author can fill in.

    Attributes:
        license: the Hub's identifier of a license, such as "apache-2.0".
        language: ISO 639 codes, such as "en".
        datasets: ids of data sets on the Hub.
        tags: more tags for the search of the Hub.
        model_name: the name in the card's metadata, by default the name of the repository.
    """

    license: str
    language: str | Sequence[str]
    datasets: str | Sequence[str]
    tags: str | Sequence[str]
    model_name: str


_SINGLE = ("license", "model_name")
_MOST_STDS = 4  # more of them would fill a page


def card_fields(**given: Any) -> CardFields:
    """Check the fields of an author, and leave out empty ones.

    Raises:
        ValueError: for an unknown field, a value that is not a text, or a data set that is not an id of the Hub.
    """
    known = tuple(CardFields.__annotations__)
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"a posterior's card takes {', '.join(known)}, got {', '.join(unknown)}: leave it out")
    fields: dict[str, Any] = {}
    for name, value in given.items():
        found = _lines(name, value)
        if name == "datasets" and (odd := [text for text in found if not is_repo_id(text)]):
            raise ValueError(f"datasets of a model card are ids of the Hub (user/name), got {odd[0]!r}")
        if found:
            fields[name] = found[0] if name in _SINGLE else found
    return cast(CardFields, fields)


def _lines(name: str, value: Any) -> list[str]:
    """Return the texts of a field, each on one line, without empty ones."""
    several = isinstance(value, list | tuple | set) and name not in _SINGLE
    texts = list(value) if several else [value]
    for text in texts:
        if not (text is None or isinstance(text, str)):
            raise ValueError(f"{name} of a model card are texts, got {text!r}: give one text or a list of them")
    return [line for text in texts if text is not None and (line := one_line(text))]


def author_fields(known: CardFields | None, given: Mapping[str, Any]) -> CardFields:
    """Return the ``known`` fields, replaced by the fields ``given`` to a trainer. ``dataset_tags`` means ``datasets``.

    Raises:
        ValueError: as ``card_fields``.
    """
    names = {"dataset_tags": "datasets"}
    return {**(known or {}), **card_fields(**{names.get(name, name): value for name, value in given.items()})}


def render_card(
    config: Mapping[str, Any],
    *,
    adapter: bool,
    repo_id: str | None = None,
    custom_generate: bool = False,
    picture: bool = False,
    evaluation: Mapping[str, Any] | None = None,
    **fields: Unpack[CardFields],
) -> str:
    """Return the model card of a posterior.

    Args:
        config: ``PosteriorConfig.to_dict()``.
        adapter: True if the parameters belong to a peft adapter.
        repo_id: the repository in the examples; None leaves a placeholder.
        custom_generate: True if the repository has ``CUSTOM_GENERATE``.
        picture: True if the repository has ``PICTURE``.
        evaluation: the content of ``EVALUATION``, if the repository has it.
        fields: see ``CardFields``.
    Raises:
        ValueError: as ``card_fields``.
    """
    data = _metadata(config, adapter=adapter, repo_id=repo_id, fields=card_fields(**fields), evaluation=evaluation)
    variables = _variables(config, adapter=adapter, repo_id=repo_id)
    beside = {"custom_generate": custom_generate, "picture": picture, "evaluation": evaluation_rows(evaluation)}
    template = _environment().get_template("posterior_card.md")
    return template.render(card_data=Verbatim(data.to_yaml(line_break="\n")), **beside, **variables)


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the environment of the template, which is parsed once. Every value in it passes through ``markdown``."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=markdown,
        keep_trailing_newline=True,
    )
    environment.filters |= {"literal": literal, "count": _count}
    return environment


def write_card(directory: str | os.PathLike[str], *, repo_id: str | None = None, **fields: Unpack[CardFields]) -> None:
    """Replace the card of a saved posterior by a new one with an author's fields. The next save renews it.

    Files beside the card, ``CUSTOM_GENERATE``, ``PICTURE`` and ``EVALUATION``, have their sections in it. A picture or
    an evaluation of another posterior is left out with a warning: a run into the same directory replaces the posterior
    only.

    Raises:
        OSError, ValueError: if there is no posterior, or as ``card_fields``.
    """
    root = Path(directory)
    config = storage.read_directory(root, format=storage.POSTERIOR, only=lambda name: name == CONFIG)[CONFIG]
    beside = _beside(root)
    card = render_card(
        config,
        adapter=(root / ADAPTER_CONFIG).exists(),
        repo_id=repo_id,
        custom_generate=(root / CUSTOM_GENERATE).exists(),
        picture=PICTURE in beside,
        evaluation=beside.get(EVALUATION),
        **fields,
    )
    storage.replace_text(root, CARD, card, format=storage.POSTERIOR)


def _beside(root: Path) -> dict[str, Any]:
    """Return the content of ``EVALUATION`` and of ``PICTURE``, for each that is of the posterior in the directory."""
    found: dict[str, Any] = {}
    names = [name for name in (EVALUATION, PICTURE) if (root / name).exists()]
    if not names:
        return found
    fingerprint = fingerprint_of(storage.read_directory(root, format=storage.POSTERIOR, raw=is_sidecar))
    for name in names:
        try:
            found[name] = read_beside(root / name, fingerprint)
        except ValueError as error:
            warnings.warn(f"{error}. The card is written without it")
    return found


def known_fields(directory: str | os.PathLike[str]) -> CardFields:
    """Return the fields that an author gave to the card in a directory; none without a card.

    Raises:
        ValueError: as ``card_fields``.
    """
    file = Path(directory) / CARD
    if not file.exists():
        return {}
    data: Any = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
    own = {"hf_bayes", "bayesian", "lora", *METHODS}
    tags = [tag for tag in data.get("tags") or () if tag not in own]
    fields = {name: data.get(name) for name in ("license", "language", "datasets")}
    return card_fields(**{name: value for name, value in fields.items() if value}, tags=tags)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _metadata(
    config: Mapping[str, Any],
    *,
    adapter: bool,
    repo_id: str | None,
    fields: CardFields,
    evaluation: Mapping[str, Any] | None,
) -> ModelCardData:
    pipeline_tag = TASKS[config["task"]].tag
    base, method = config["base_model"]["name_or_path"], one_line(config["method"]["name"])
    base = base if base and not is_local(base) and is_repo_id(base) else None
    tags = ["hf_bayes", "bayesian", method, *(["lora"] if adapter else []), *fields.get("tags", ())]
    given: dict[str, Any] = {
        name: value for name, value in fields.items() if name in ("license", "language", "datasets")
    }
    return ModelCardData(
        **given,
        library_name="hf_bayes",
        pipeline_tag=pipeline_tag,
        tags=[tag for tag in tags if tag],
        base_model=base,
        base_model_relation=None if base is None else ("adapter" if adapter else "finetune"),
        model_name=fields.get("model_name") or one_line(repo_id or "posterior").split("/")[-1],
        eval_results=eval_results(config, pipeline_tag, fields.get("datasets", ()), evaluation) or None,
    )


def _variables(config: Mapping[str, Any], *, adapter: bool, repo_id: str | None) -> dict[str, Any]:
    """Return the variables of the template."""
    method, head, task = config["method"], config["head"], config["task"]
    base = config["base_model"]["name_or_path"]
    local, base = is_local(base), one_line(base or "")
    draws = config["approximation"] == "draws"
    known = TASKS[task]
    pipeline_tag, suffix, unit = known.tag, known.suffix, known.unit
    return {
        "config": config,
        "draws": draws,
        "num_members": config["num_members"] if draws else None,
        "covariance": COVARIANCES.get(config["approximation"]),
        "num_chains": len(set(config["member_chains"])) or method.get("num_chains") or 1,
        "adapter": adapter,
        "answers": _answers(task, head),
        "base": (Path(base).name if local else base) if base else None,
        "base_is_local": local,
        "weights": _weights(config["subspace"], adapter=adapter),
        "repo_id": repo_id or "user/this-posterior",
        "pipeline_tag": pipeline_tag,
        "suffix": suffix,
        "unit": unit,
        "data_unit": unit if config["data_unit"] == "token" else config["data_unit"],
        "method_name": one_line(method["name"]) or "unnamed",
        "method_words": METHODS.get(method["name"]),
        "temperature": _temperature(method),
        "prior": _prior(config["prior"]),
        "fields": {key: value for key, value in _flat(method).items() if key != "name" and value is not None},
        "diagnostics": _rows(config["diagnostics"], DIAGNOSTICS, skip=("verdict", "converged")),
        "converged": config["diagnostics"].get("converged"),
        "chosen": config["diagnostics"].get("chosen_temperature") is not None,
        "verdict": config["diagnostics"].get("verdict") or "not assessed",
        "metrics": _rows(config["metrics"], METRICS),
        "noise_std": head.get("noise_std"),
        "likelihood": one_line(str((head.get("likelihood") or {}).get("name") or "")),
        "num_labels": len(head.get("labels") or ()),
        "labels": head.get("labels"),
    }  # fmt: skip


def _weights(subspace: str, *, adapter: bool) -> str:
    """Return words for the random parameters."""
    known = {"last_layer": "the last layer", "last_block": "the last block", "all": "all weights"}
    known["trainable"] = "the LoRA adapter" if adapter else "the trainable weights"
    return known.get(subspace, f"the weights that match {subspace}")


def _temperature(method: Mapping[str, Any]) -> str:
    """Return T as it stands in the config, or words if it is not known."""
    if awaits_temperature(method):
        return "not chosen: the run was stopped too early"
    return str(method["temperature"]) if "temperature" in method else "not recorded"


def _prior(prior: Mapping[str, Any]) -> str:
    """Return words for the prior. A prior that is a posterior (continual learning) has its own prior."""
    if "used_as" not in prior:
        std = prior.get("std")
        if isinstance(std, dict) and len(std) > _MOST_STDS and all(map(is_number, std.values())):
            prior = {**prior, "std": f"{min(std.values()):.3g} to {max(std.values()):.3g}, tensor by tensor"}
        return ", ".join(f"{key} = {value}" for key, value in _flat(prior).items()) or "not recorded"
    source = prior.get("posterior") or "of an earlier run"
    name = Path(source).name if is_local(source) else source
    size = "" if prior.get("num_data") is None else f", N = {prior['num_data']:,.0f}"
    own = prior.get("prior")
    whose = f", whose own prior: {_prior(own)}" if isinstance(own, dict) else ""
    return (
        f"the posterior {name} ({prior.get('method')}, used as {prior['used_as']}{size}, fingerprint "
        f"{str(prior.get('fingerprint'))[:12]}){whose}"
    )


def _answers(task: str, head: Mapping[str, Any]) -> str:
    """Return the kind of prediction: "classes" (also the next token), several "labels", "numbers", or "own"."""
    if "likelihood" in head:
        return "own"
    if "noise_std" in head:
        return "numbers"
    several = task != "token_classification" and head.get("problem_type") == "multi_label_classification"
    return "labels" if several else "classes"


def _rows(values: Mapping[str, Any], words: dict[str, str], skip: Sequence[str] = ()) -> list[tuple[str, Any, str]]:
    """Return (name, value, explanation) of every known figure."""
    found = {key: value for key, value in _flat(values).items() if key not in skip and value is not None}
    return [(key, value, explanation(words, key)) for key, value in found.items()]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join the keys of nested mappings by dots. A list of mappings (one for each chain) becomes lists by key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            columns = {name: [_size(entry.get(name)) for entry in value] for entry in value for name in entry}
            value = {name: column[0] if len(column) == 1 else column for name, column in columns.items()}
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _size(value: Any) -> Any:
    return len(value) if isinstance(value, dict) else value
