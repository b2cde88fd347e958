"""docs/models.md claims what the tests run, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from hf_bayes.models.attaching import MODELS
from hf_bayes.models.language.generation_refusals import _REFUSED, refuse_unsupported
from hf_bayes.models.loading.recognition import mappings
from hf_bayes.posteriors.tasks import TASKS
from tests.members import subjects, test_quantised
from tests.models import test_image_text
from tests.models.language import test_token_uncertainty as test_generation

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
HEADS = {
    "language model": subjects.CAUSAL,
    "sequences": subjects.CLASSIFIERS,
    "tokens": subjects.TAGGERS,
    "images": subjects.IMAGES,
    "audio": subjects.AUDIO,
    "images and text": subjects.IMAGES_AND_TEXT,
}


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has a heading: first cell -> the others."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_families_and_heads_are_those_of_the_subjects() -> None:
    run = {family: {head for head, of in HEADS.items() if any(s.split("-")[0] == family for s in of)}
           for family in {name.split("-")[0] for name in subjects.SUBJECTS}}  # fmt: skip
    rows = table("family")
    assert {family: set(cells[0].split(", ")) for family, cells in rows.items()} == run
    generating = {name.split("-")[0] for name in test_generation.SUBJECTS} | set(test_image_text.MAKE)
    assert {family for family, cells in rows.items() if cells[1] == "yes"} == generating
    assert list(rows) == sorted(rows)


def test_every_mapping_of_transformers_is_supported_or_refused() -> None:
    rows = {name.strip("`"): cells for name, cells in table("mapping").items()}
    found, supported = mappings(), {task.auto_class: task for task in TASKS.values()}
    assert set(rows) >= set(found)  # a new mapping is refused until the page has a row for it
    for name, loader in found.items():
        auto_class, verdict, remark = rows[name]
        assert auto_class == (f"`{loader}`" if loader else "none")
        if loader in supported:
            task = supported[loader]
            assert (verdict, remark) == ("supported", f"`{MODELS[task.name].__name__}`, pipeline `{task.pipeline}`")
        else:
            assert verdict == "refused"
            assert remark
    assert sum(cells[1] == "supported" for cells in rows.values()) == len(TASKS)


def test_every_cache_is_supported_or_refused_as_documented() -> None:
    verdicts = {
        name: cells[0]
        for names, cells in table("`cache_implementation`").items()
        for name in re.findall("`(.+?)`", names)
    }
    assert set(verdicts) >= {*ALL_CACHE_IMPLEMENTATIONS, "paged"}
    for name, verdict in verdicts.items():
        if verdict == "supported":
            refuse_unsupported({"cache_implementation": name}, GenerationConfig())
        else:
            with pytest.raises(ValueError, match="not supported for an ensemble"):
                refuse_unsupported({"cache_implementation": name}, GenerationConfig())


def test_every_refused_setting_is_on_the_page() -> None:
    assert {name for row in table("refused in `generate`") for name in re.findall("`(.+?)`", row)} == {
        *_REFUSED,
        "generate_batch",
    }


def test_quantised_bases_are_those_that_are_run() -> None:
    assert {row for row, cells in table("base").items() if cells[0] == "yes"} == set(test_quantised.BASES)
