"""The table at the end of a training run: what was saved, and how good it is on held-out rows."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.posteriors.model_card_explanations import awaits_temperature

FIGURES = {
    "accuracy": "accuracy",
    "mse": "mean squared error",
    "ece": "calibration error (ECE)",
    "perplexity": "perplexity",
    "total": "total uncertainty (nats)",
    "epistemic": "epistemic uncertainty (nats)",
}
"""The name of a held-out figure -> its words, in the order of the table."""


def table(config: PosteriorConfig, directory: str) -> Table:
    """Return a table of two columns for a posterior that was saved in this directory."""
    shown = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in _rows(config, directory).items():
        shown.add_row(name, Text(value))  # as Text: square brackets are not markup
    return shown


def _rows(config: PosteriorConfig, directory: str) -> dict[str, str]:
    metrics = config.metrics
    temperature = config.method.get("temperature", 1.0)
    words = "no temperature chosen" if awaits_temperature(config.method) else f"at temperature {temperature:g}"
    rows = {"method": f"{config.method['name']} {words}"}
    if config.num_members:
        rows["members"] = str(config.num_members)
    if config.num_data is not None:
        rows["likelihood terms N"] = f"{config.num_data:g}"
    if metrics.get("nll") is not None:
        rows["held-out NLL"] = f"{metrics['nll']:.4f}{_beside_map(config)}"
    for name, words in FIGURES.items():
        if metrics.get(name) is not None:
            rows[words] = f"{metrics[name]:.4g}"
    if config.calibration:
        rows["temperature t of predictions"] = f"{config.calibration['temperature']:.3g}"
    unknown = "not assessed" if config.diagnostics.get("chosen_temperature") is None else "T was chosen by predictions"
    converged = config.diagnostics.get("converged")
    words = unknown if converged is None else "converged" if converged else "not converged"
    rows["chains"] = f"{words}, see hf-bayes diagnose {directory}"
    rows["saved in"] = directory
    return rows


def _beside_map(config: PosteriorConfig) -> str:
    """Return the held-out NLL of the MAP estimate in words, or nothing if it was not compared."""
    value, error = config.metrics.get("map_nll"), config.metrics.get("map_nll_difference_std_error")
    if value is None:
        return ""
    return f" (a MAP estimate: {value:.4f}" + ("" if error is None else f", s.e. of the difference {error:.2g}") + ")"
