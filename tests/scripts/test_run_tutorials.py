from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from docs.site_hooks import tutorial
from scripts.run_tutorials import FOLDER, NAMES, NEEDS, OUTPUTS, cells_of, fingerprint, outputs_of

RECORDED = json.loads(OUTPUTS.read_text("utf-8"))


def code_of(name: str) -> list[str]:
    return [cell.text for cell in cells_of((FOLDER / f"{name}.py").read_text("utf-8")) if cell.is_code]


def test_every_tutorial_is_listed() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_outputs_are_those_of_the_code(name: str) -> None:
    """Run scripts/run_tutorials.py again after a change."""
    assert [cell["code"] for cell in RECORDED[name]] == [fingerprint(code) for code in code_of(name)]


def test_a_notebook_is_divided_into_text_and_code() -> None:
    text, code = cells_of("# %% [markdown]\n# # A title\n#\n# Words.\n\n# %%\nx = 1\n# a comment\n")
    assert text == (False, "# A title\n\nWords.")
    assert code == (True, "x = 1\n# a comment")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_text_code_and_what_it_prints(name: str) -> None:
    page = tutorial(name)
    assert page.startswith("# ")
    assert page.count("```python\n") == len(code_of(name))
    assert all(cell["printed"] in page for cell in RECORDED[name])


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_tutorial_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\((?!http)([^)#]*)[^)]*\)", (FOLDER / f"{name}.py").read_text("utf-8"))
    assert targets
    for target in targets:
        path = FOLDER / target
        assert path.exists() or path.with_suffix(".py").exists(), target


def test_five_lines_make_a_posterior_of_the_script() -> None:
    """The second script of the tutorial is the first one but for the lines with a number, at most five."""
    _, plain, bayesian, *_ = code_of("first_posterior")
    kept = [line for line in bayesian.splitlines() if not re.search(r"# \d$", line)]
    assert len(bayesian.splitlines()) - len(kept) <= 5
    lost = [line for line in plain.splitlines() if line.strip() and line not in kept]
    assert [line for line in kept if line.strip() and line not in plain.splitlines()] == []
    assert len(lost) <= 5


@pytest.mark.models
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS.values()])
def test_a_tutorial_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial, after the one whose files it reads: each within the five minutes that a test has."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny runs deserve their warnings
        for each in filter(None, (NEEDS.get(name), name)):
            # rounding differs from one processor to the next, and so do the numbers; the cells that print do not
            printed = [bool(cell["printed"]) for cell in outputs_of(each)]
            assert printed == [bool(cell["printed"]) for cell in RECORDED[each]]
