"""The table of ``hf-bayes diagnose``: the diagnostics of every chain, with the verdict under them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from hf_bayes.core.text_safety import visible_line
from hf_bayes.diagnostics.convergence import MAX_RHAT, MIN_ESS
from hf_bayes.diagnostics.plausibility import MAX_PRIOR_LOSS_RATIO
from hf_bayes.diagnostics.verdict import MAX_CAPPED

ROWS = (
    ("distance", "distance moved, prior standard deviations", ""),
    ("prior_loss_ratio", "prior density lost, over what data can explain", f"below {MAX_PRIOR_LOSS_RATIO:g}"),
    ("distance_in_noise", "distance moved, over the reach of noise alone", ""),
    ("unmoved", "weights that rounding held at the first update", "below 0.01"),
    ("kinetic_temperature", "kinetic temperature", "kinetic_temperature_law"),
    ("kinetic_temperature_informed", "the same where the data outweigh the prior", "kinetic_temperature_law"),
    ("kinetic_share", "tensors within their 99 % interval, or 10 %", "above 0.99"),
    ("kinetic_inside", "tensors within it, update by update", "0.99"),
    ("configurational_temperature", "configurational temperature", "temperature"),
    ("noise_ratio", "injected over minibatch noise, variances", "above 1"),
    ("acceptance", "acceptance", ""),
    ("penalty", "noise penalty of a move", ""),
    ("beyond_series", "moves with too much noise to correct", "below 0.01"),
    ("capped", "coordinates at the cap of their proposal", f"below {MAX_CAPPED}"),
    ("divergences", "divergent moves", "0"),
)
"""(field, description, expected value) of each row. The expected value is a text or the name of another field."""


def table(config: Mapping[str, Any]) -> Table:
    """Return a table of the diagnostics of every chain, with the verdict under it."""
    found, metrics = config["diagnostics"], config["metrics"]
    chains = found.get("num_chains") or 0  # whose diagnostics are known
    stored = chains or len(set(config["member_chains"])) or "?"
    colour = {True: "green", False: "red"}.get(found.get("converged"), "yellow")
    title = Text(f"{method_name(config)}, {stored} chains")  # as Text: square brackets are not markup
    result = Table(title=title, caption=Text(verdict(config), style=colour))
    result.add_column("diagnostic")
    result.add_column("expected", justify="right")
    shown = min(chains, 8)
    for chain in range(shown):
        result.add_column(f"chain {chain}", justify="right")
    for name, words, expected in ROWS:
        values = found.get(name)
        if values is not None:
            expected = number(found[expected]) if expected in found else expected
            result.add_row(words, expected, *map(number, values[:shown]))
    rule = found.get("configurational_temperature") is not None and found.get("acceptance") is None
    if rule and found.get("temperature") and found.get("noise_ratio") is None:
        words = "injected over minibatch noise, variances (takes 2 rows an update, and measure_gradient_noise)"
        result.add_row(words, "above 1", *["not measured"] * shown)
    over = visible_line(f"{found.get('num_values')} {found.get('values')}, {found.get('num_terms')} terms")
    over += ", between halves" * (chains == 1)
    if found.get("informed_spread") is not None:
        value, error = (number(found.get(name)) for name in ("informed_spread", "informed_spread_std_error"))
        words = "configurational temperature where the data outweigh the prior"
        result.add_row(words, number(found.get("temperature")), f"{value}, s.e. {error}")
    if found.get("epistemic_drift") is not None:
        words = "epistemic uncertainty after the draws moved by the exact energy, over before"
        result.add_row(words, "0.83 to 1.2", number(found["epistemic_drift"]))
    for name, words, limit in (
        ("rhat", f"R-hat, log-likelihood ({over})", f"below {MAX_RHAT}"),
        ("rhat_terms", "R-hat, single terms (95 % quantile)", f"below {MAX_RHAT}"),
        ("rhat_logits", f"R-hat, {found.get('num_logits')} logits (95 % quantile)", f"below {MAX_RHAT}"),
        ("ess", "ESS, log-likelihood", f"above {MIN_ESS:.0f}"),
        ("ess_terms", "ESS, single terms (5 % quantile)", f"above {MIN_ESS:.0f}"),
        ("ess_logits", "ESS, logits (5 % quantile)", f"above {MIN_ESS:.0f}"),
    ):
        if found.get(name) is not None:
            result.add_row(Text(words), limit, number(found[name]))
    for name, words in (
        ("limit_nll", "held-out NLL, of infinitely many members"),
        ("nll", "held-out NLL"),
        ("map_nll", "held-out NLL of a MAP estimate"),
    ):
        for eval_set in _eval_sets(metrics):
            value, error = (metrics.get(f"{eval_set}{key}") for key in (name, f"{name}_std_error"))
            if value is not None:
                of = f" ({visible_line(eval_set[:-1])})" if eval_set else ""
                result.add_row(
                    Text(words + of), "", f"{value:.4f}" + ("" if error is None else f", s.e. {number(error)}")
                )
    return result


def _eval_sets(metrics: Mapping[str, Any]) -> list[str]:
    """Return the prefixes of held-out figures: "" for one eval set, or "name_" for each of several."""
    return [name.removesuffix("member_nll") for name in metrics if name.endswith("member_nll")] or [""]


def method_name(config: Mapping[str, Any]) -> str:
    """Return the name of the method."""
    return visible_line(config["method"]["name"])


def verdict(config: Mapping[str, Any]) -> str:
    """Return the verdict in a sentence."""
    return visible_line(config["diagnostics"].get("verdict") or "not assessed")


def number(value: Any) -> str:
    """Return a number with few digits, or "-" for None."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"
