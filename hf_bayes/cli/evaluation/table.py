"""The tables of an evaluation: the scores of the test set, and the detection of each other set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from hf_bayes.core.text_safety import visible_line
from hf_bayes.metrics.figures import NUMBERS, OWN_NUMBERS

MEASURES = {
    "total": "total uncertainty",
    "epistemic": "epistemic uncertainty",
    "predictive_std": "predictive standard deviation",
    "epistemic_std": "epistemic standard deviation",
    "confidence": "1 - confidence",
}
"""The name of a measure in the results -> its words."""

_SHORT = {
    "total": "TU",
    "epistemic": "EU",
    "predictive_std": "std",
    "epistemic_std": "epistemic std",
    "confidence": "1 - confidence",
}

_SCORES = {
    "accuracy": "accuracy",
    "exact_match": "rows with all labels right",
    "micro_f1": "F1, micro",
    "macro_f1": "F1, macro",
    "rmse": "RMSE",
    "nll": "NLL",
    "member_nll": "NLL, mean of the members",
    "label_nll": "NLL of one label",
    "perplexity": "perplexity",
    "ece": "ECE",
    "brier": "Brier score",
    "coverage_50": "coverage of 50 % intervals",
    "coverage_90": "coverage of 90 % intervals",
    "coverage_95": "coverage of 95 % intervals",
    "standardised_rmse": "RMSE in predicted standard deviations",
    "ence": "ENCE",
    "predictive_std": "mean predictive standard deviation",
    "aleatoric_std": "mean aleatoric standard deviation",
    "epistemic_std": "mean epistemic standard deviation",
}
"""The name of a figure -> its words, in the order of the table."""

_OF_SEVERAL_LABELS = {
    "nll": "NLL of all labels of a row",
    "ece": "ECE of the labels",
    "brier": "Brier score of a label",
}

_KINDS_WITH_UNITS = (NUMBERS.kind, OWN_NUMBERS.kind)
_WITHOUT_UNIT = ("nll", "member_nll", "coverage_50", "coverage_90", "coverage_95", "standardised_rmse", "ence")


def tables(results: Mapping[str, Any], posterior: str) -> list[Table]:
    """Return the table of the test set, and a table with a row for each other set if there is one.

    Args:
        results: the dictionary of ``evaluation_results``, with ``members`` and ``temperature``, the temperature of the
            mixture.
        posterior: the name of the posterior.
    """
    found = [_scores(results, posterior)]
    if any(results["auroc"].values()):
        found.append(_detection(results))
    return found


def _scores(results: Mapping[str, Any], posterior: str) -> Table:
    errors = results["std_error"]
    title = f"{visible_line(posterior)}: {results['members']} members, {results['rows']['test']} rows"
    caption = f"at the temperature {results['temperature']:.3g} of the mixture"
    # as Text: square brackets are not markup
    table = Table(title=Text(title), caption=None if results["temperature"] == 1 else caption)
    table.add_column("on the test set")
    table.add_column("value", justify="right")
    table.add_column("s.e.", justify="right")
    for name, words in (_SCORES | (_OF_SEVERAL_LABELS if results["kind"] == "several_labels" else {})).items():
        if name in results:
            if name == "member_nll" and results["temperature"] != 1:
                words += ", at temperature 1"
            table.add_row(words, *_cells(results[name], errors.get(name), _form(results, name)))
    aurc = _form(results, "aurc")
    for name, words in MEASURES.items():
        if name in results["aurc"]:
            table.add_row(f"AURC by {words}", *_cells(results["aurc"][name], errors["aurc"][name], aurc))
    table.add_row("AURC, the lowest of any order", *_cells(results["aurc"]["best"], None, aurc))
    return table


def _detection(results: Mapping[str, Any]) -> Table:
    measures = [name for name in MEASURES if any(name in areas for areas in results["auroc"].values())]
    table = Table(title="AUROC of telling each set from the test set (s.e.)")
    table.add_column("set", overflow="fold")
    for words in ("rows", *(f"by {_SHORT[name]}" for name in measures)):
        table.add_column(words, justify="right", no_wrap=True)
    for name, areas in results["auroc"].items():
        errors = results["std_error"]["auroc"][name]
        pairs = {m: _cells(areas[m], errors[m], ".4f") for m in measures if m in areas}
        cells = ["{} ({})".format(*pairs[m]) if m in pairs else "-" for m in measures]
        table.add_row(Text(visible_line(name)), str(results["rows"][name]), *cells)
    return table


def _form(results: Mapping[str, Any], name: str) -> str:
    """Return the format of a figure: significant digits for a figure in the unit of the labels, which may be small."""
    return ".4g" if results["kind"] in _KINDS_WITH_UNITS and name not in _WITHOUT_UNIT else ".4f"


def _cells(value: float, error: float | None, form: str) -> tuple[str, str]:
    """Return a figure and its standard error in the same form, "-" for an unknown error."""
    return _figure(value, form), "-" if error is None else _figure(error, form)


def _figure(value: float, form: str) -> str:
    """Return a figure in words. Significant digits alone would show 45321.7 as 4.532e+04."""
    return f"{value:,.0f}" if form == ".4g" and abs(value) >= 9999.5 else format(value, form)
