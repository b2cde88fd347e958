from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hf_bayes.cli.evaluation.table import tables
from hf_bayes.metrics import evaluation_results
from hf_bayes.metrics.figures import NUMBERS, OWN_NUMBERS, SEVERAL_LABELS, Figures
from tests.metrics.test_figures import labelled, numbered


def results_of(count: int) -> dict[str, Any]:
    """Return the figures of an evaluation with ``count`` other sets of long names."""
    names = [f"a rather long name [number {n}]" for n in range(count)]
    areas = {name: {"total": 0.5 + n / 1000, "epistemic": 0.6 + n / 1000} for n, name in enumerate(names)}
    scores = {"nll": 12.3456, "member_nll": 23.4567, "accuracy": 0.0123, "ece": 0.4321, "brier": 1.2345}
    return {
        **{
            "kind": "classes",
            "members": 3,
            "temperature": 1.0,
            **scores,
            "rows": {"test": 77, **dict.fromkeys(names, 88)},
            "auroc": areas,
        },
        "aurc": {"total": 0.1357, "epistemic": 0.2468, "best": 0.0987},
        "std_error": {
            **{"nll": 0.0765, "accuracy": None, "aurc": {"total": 0.0654, "epistemic": 0.0543}},
            "auroc": {name: {"total": 0.0432, "epistemic": 0.0321} for name in names},
        },
    }


@pytest.mark.parametrize("count", [0, 1, 6, 30])
def test_no_figure_is_cut_at_a_hundred_columns(count: int) -> None:
    results, file = results_of(count), io.StringIO()
    console = Console(width=100, file=file)
    for table in tables(results, "out/" + "posterior" * 9):
        console.print(table)
    text = file.getvalue()
    numbers = [12.3456, 23.4567, 0.0123, 0.4321, 1.2345, 0.1357, 0.2468, 0.0987, 0.0765, 0.0654, 0.0543]
    numbers += [area for pair in results["auroc"].values() for area in pair.values()]
    assert [f"{number:.4f}" for number in numbers if f"{number:.4f}" not in text] == []
    assert [name for name in results["auroc"] if name not in text] == []
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_names_act_on_no_terminal() -> None:
    file = io.StringIO()
    results = results_of(0)
    Console(width=100, file=file).print(*tables(results, "out\x1b[2J"))
    assert "\x1b" not in file.getvalue()
    assert "U+001B" in file.getvalue()


@pytest.mark.parametrize(("temperature", "shown"), [(1.0, False), (0.512, True)])
def test_a_temperature_of_the_mixture_is_shown(temperature: float, shown: bool) -> None:
    file = io.StringIO()
    Console(width=100, file=file).print(*tables(results_of(0) | {"temperature": temperature}, "out"))
    assert ("at the temperature 0.512 of the mixture" in file.getvalue()) is shown
    assert ("mean of the members, at temperature 1" in file.getvalue()) is shown  # only the mixture is tempered


@pytest.mark.parametrize(("figures", "rows"), [(SEVERAL_LABELS, labelled), (NUMBERS, numbered)])
def test_every_figure_of_a_kind_is_in_the_table(figures: Figures, rows: Any) -> None:
    results, file = evaluation_results(rows(30), {"other": rows(20, seed=1)}, figures), io.StringIO()
    Console(width=100, file=file).print(*tables({"members": 2, "temperature": 1.0} | results, "out"))
    hidden = {"total", "aleatoric", "epistemic"}  # the mean of an uncertainty is no score
    names = [name for name in [*figures.means, *figures.functions] if name in set(results) - hidden]
    units = {"rmse", "predictive_std", "epistemic_std"}
    shown = [f"{results[name]:{'.4g' if name in units else '.4f'}}" for name in names]
    assert [number for number in shown if number not in file.getvalue()] == []
    assert len(shown) >= 7
    assert [f"{area:.4f}" for area in results["auroc"]["other"].values() if f"{area:.4f}" not in file.getvalue()] == []


def test_sets_that_nothing_tells_apart_have_no_table() -> None:
    one = numbered(10) | {"epistemic_std": np.zeros((10, 1))}
    results = evaluation_results(one, {"other": one}, NUMBERS)
    assert len(tables({"members": 1, "temperature": 1.0} | results, "out")) == 1


@pytest.mark.parametrize("figures", [NUMBERS, OWN_NUMBERS])
@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e4])
def test_figures_of_any_unit_have_four_digits(figures: Figures, unit: float) -> None:
    rows: Any = numbered(30)
    rows = {name: values if name in ("below", "nll") else values * unit for name, values in rows.items()}
    rows |= {"aleatoric_std": rows["predictive_std"], "member_nll": rows["nll"]}
    results, file = evaluation_results(rows, {}, figures), io.StringIO()
    Console(width=100, file=file).print(*tables({"members": 2, "temperature": 1.0} | results, "out"))
    lines = {line.split("│")[1].strip(): line.split("│")[2:4] for line in file.getvalue().splitlines() if "│" in line}
    cells = [
        *lines["RMSE"],
        *lines["mean epistemic standard deviation"],
        *lines["AURC by epistemic standard deviation"],
    ]
    errors, measure = results["std_error"], "epistemic_std"
    wanted = [results["rmse"], errors["rmse"], results[measure], errors[measure]]
    wanted += [results["aurc"][measure], errors["aurc"][measure]]
    assert [float(cell.replace(",", "")) for cell in cells] == pytest.approx(
        wanted, rel=5e-4
    )  # half of the fourth digit
    assert lines["NLL"][0].strip() == f"{results['nll']:.4f}"
    assert max(len(cell.strip()) for cell in cells) < 12
    assert unit < 1 or "e+" not in file.getvalue()
    assert unit < 1e4 or f"{results['rmse']:,.0f}" == lines["RMSE"][0].strip()
