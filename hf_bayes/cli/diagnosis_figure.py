"""The figure of ``hf-bayes diagnose``: one panel for each diagnostic that the trace of a run holds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_bayes.cli.diagnosis_table import method_name, number, verdict
from hf_bayes.core.text_safety import visible_line
from hf_bayes.diagnostics.convergence import MAX_RHAT, MIN_ESS
from hf_bayes.diagnostics.verdict import MAX_UNMOVED

Panel = Callable[[Axes, Mapping[str, Any], Mapping[str, Any]], None]
"""A function that draws the diagnostics and the trace of a run into axes."""
Wanted = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
"""A test of whether diagnostics and trace hold the values of a panel."""


def plot(config: Mapping[str, Any], trace: Mapping[str, Any]) -> Figure | None:
    """Draw one panel for each diagnostic in the trace. Return None if there is none.

    Names are drawn unchanged: a dollar sign does not begin a formula.
    """
    with matplotlib.rc_context({"text.parse_math": False}):
        return _plot(config, trace)


def _plot(config: Mapping[str, Any], trace: Mapping[str, Any]) -> Figure | None:
    panels = [panel for wanted, panel in _PANELS if wanted(config["diagnostics"], trace)]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.3 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        panel(axis, config["diagnostics"], trace)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    # 14 letters of this size fit into an inch
    figure.suptitle(_wrapped(f"{method_name(config)}: {verdict(config)}", width=60 * columns), fontsize=10)
    return figure


def _curves(axis: Axes, trace: Mapping[str, Any], steps: Sequence[int], values: Sequence[Sequence[Any]]) -> None:
    """Draw one line for each chain over the updates, with the burn-in shaded."""
    for chain, colour in zip(range(len(values[0])), _colours(len(values[0])), strict=True):
        curve = [math.nan if row[chain] is None else row[chain] for row in values]
        axis.plot(steps, curve, color=colour, linewidth=0.9, marker="." if len(steps) < 40 else None, markersize=4)
    if trace.get("burn_in"):
        axis.axvspan(0, trace["burn_in"], color="0.92", zorder=0)
        axis.text(0, 1.0, " burn-in", fontsize=7, color="0.4", va="top", transform=axis.get_xaxis_transform())
    axis.set_xlabel("update")


def _colours(count: int) -> list[Any]:
    return [matplotlib.colormaps["viridis"](0.9 * index / max(1, count - 1)) for index in range(count)]


def _probe(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
    _curves(axis, trace, trace["probe"]["step"], trace["probe"]["log_lik"])
    rhat = found.get("rhat")
    label = "" if rhat is None else f" (R-hat {number(rhat)})"
    axis.set_title(f"probe: log p of a term, by chain{label}", fontsize=9)
    axis.set_ylabel("nats")


def _of_logs(name: str, title: str, law: Callable[[Mapping[str, Any]], float | None], ylabel: str = "") -> Panel:
    """Return a panel of one logged quantity, with its expected value as a line."""

    def panel(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
        logs = trace["logs"]
        _curves(axis, trace, logs["step"], logs[name])
        expected = law(found)
        if expected is not None:
            axis.axhline(expected, color="C3", linestyle="--", linewidth=1, label=f"expected: {number(expected)}")
            axis.legend(fontsize=7, loc="lower right")
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(ylabel)

    return panel


def _tensors(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
    kinetic = trace["kinetic_of_tensors"]
    values, places = kinetic["relative_to_law"], range(len(kinetic["names"]))
    low, high = zip(*kinetic["interval"], strict=True)
    width = max(1.0, min(6.0, 150 / len(places)))
    axis.vlines(places, low, high, color="0.8", linewidth=width, label="99 % interval, or 10 %")
    for chain, colour in zip(values, _colours(len(values)), strict=True):
        axis.plot(places, chain, ".", color=colour, markersize=4)
    share = sum(found["kinetic_share"]) / len(found["kinetic_share"])
    axis.set_title(f"kinetic temperature of each tensor: {share:.0%} inside", fontsize=9)
    axis.set_xlabel("random tensor, in the order of the model")
    axis.set_ylabel("over its law")
    axis.legend(fontsize=7)


def _terms(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
    for kind, words in (("terms", "labels' log p"), ("logits", "logits")):
        values = _rhats(trace, kind)
        if values:
            heights = [(index + 1) / len(values) for index in range(len(values))]
            axis.plot(values, heights, label=visible_line(f"{found.get(f'num_{kind}')} {words}"))
    axis.axvline(MAX_RHAT, color="C3", linestyle="--", linewidth=1, label=f"limit: {MAX_RHAT}")
    axis.axhline(0.95, color="0.7", linewidth=0.8)
    axis.set_title(visible_line(f"R-hat of single terms ({found.get('num_values')} {found.get('values')})"), fontsize=9)
    axis.set_xlabel("R-hat")
    axis.set_ylabel("share below")
    axis.legend(fontsize=7, loc="lower right")


def _rhats(trace: Mapping[str, Any], kind: str) -> list[float]:
    return [value for value in trace.get(kind, {}).get("rhat", ()) if value is not None]


def _convergence(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
    checks = trace["convergence"]
    steps, count = checks["step"], len(checks["step"])
    marker = "." if count < 40 else None
    (ratio,) = axis.plot(steps, checks["rhat"], color="C0", marker=marker, markersize=4, label="R-hat")
    axis.axhline(MAX_RHAT, color="C0", linestyle="--", linewidth=0.8)
    axis.set_ylabel("R-hat")
    axis.set_xlabel("update")
    right = axis.twinx()
    sizes = [math.nan if size is None else size for size in checks["ess"]]
    (size,) = right.plot(steps, sizes, color="C1", marker=marker, markersize=4, label="ESS")
    right.axhline(MIN_ESS, color="C1", linestyle="--", linewidth=0.8)
    right.set_ylabel("ESS")
    right.set_ylim(0, 1.35 * right.get_ylim()[1])  # room for the legend
    axis.legend(handles=[ratio, size], fontsize=7, loc="upper right", ncols=2)
    axis.set_title("log-likelihood of the probes so far (dashed: limits)", fontsize=9)


def _unmoved(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
    shares = found["unmoved"]
    axis.bar(range(len(shares)), shares, color=_colours(len(shares)), width=0.6)
    axis.plot(range(len(shares)), shares, ".", color="0.2", markersize=4)  # where a bar has no height
    axis.axhline(MAX_UNMOVED, color="C3", linestyle="--", linewidth=1, label=f"limit: {MAX_UNMOVED}")
    axis.set_ylim(-0.02 * max(1.2 * MAX_UNMOVED, *shares), 1.1 * max(1.2 * MAX_UNMOVED, *shares))
    axis.set_xticks(range(len(shares)) if len(shares) <= 8 else [0, len(shares) - 1])
    axis.set_xlabel("chain")
    axis.set_ylabel("share of its weights")
    axis.set_title("weights that the first noisy update left unchanged", fontsize=9)
    axis.legend(fontsize=7)


def _risk(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
    risk = trace["risk"]
    sizes, limit = risk["sizes"], risk["limit"]
    first = -(-len(sizes) // 4)
    axis.plot([1 / size for size in sizes], risk["risks"], "o", markersize=3.5, label="C(S), mean over subsets")
    inverse = [index / 100 / first for index in range(101)]
    fit = [limit + risk["slope"] * x + risk["curvature"] * x * x for x in inverse]
    axis.plot(inverse, fit, color="C1", linewidth=1, label=f"fit to S ≥ {first}")
    axis.errorbar(0, limit, yerr=2 * risk["std_error"], fmt="s", color="C3", markersize=4, capsize=3,
                  label=f"C(∞) = {limit:.4f}, s.e. {risk['std_error']:.4f}")  # fmt: skip
    marks = [mark for mark in (1, 2, 4, 8) if mark < len(sizes)]
    axis.set_xticks([0, *(1 / mark for mark in marks)], ["∞", *map(str, marks)])
    of = f" ({visible_line(risk['eval_set'])})" if "eval_set" in risk else ""
    axis.set_title(f"held-out NLL of S members{of}", fontsize=9)
    axis.set_xlabel(f"S, to {len(sizes)} (spaced as 1 / S)")
    axis.set_ylabel("nats per term")
    axis.legend(fontsize=7)


def _logged(name: str) -> Wanted:
    return lambda found, trace: bool(trace.get("logs", {}).get(name))


_PANELS: tuple[tuple[Wanted, Panel], ...] = (
    (lambda found, trace: bool(trace.get("probe")), _probe),
    (lambda found, trace: bool(trace.get("convergence")), _convergence),
    (lambda found, trace: bool(_rhats(trace, "terms") or _rhats(trace, "logits")), _terms),
    (lambda found, trace: bool(trace.get("risk")), _risk),
    (
        _logged("kinetic_temperature"),
        _of_logs("kinetic_temperature", "kinetic temperature", lambda found: found.get("kinetic_temperature_law")),
    ),
    (lambda found, trace: bool(trace.get("kinetic_of_tensors")), _tensors),
    (
        _logged("configurational_temperature"),
        _of_logs("configurational_temperature", "configurational temperature", lambda found: found.get("temperature")),
    ),
    (
        _logged("noise_ratio"),
        _of_logs("noise_ratio", "injected over minibatch noise (variances)", lambda found: 1.0),
    ),
    (_logged("acceptance"), _of_logs("acceptance", "acceptance probability", lambda found: None)),
    (_logged("penalty"), _of_logs("penalty", "noise penalty of a move", lambda found: None, "log acceptance")),
    (_logged("capped"), _of_logs("capped", "share of coordinates at their cap", lambda found: None)),
    (_logged("divergent"), _of_logs("divergent", "divergent moves", lambda found: None, "share")),
    (
        _logged("distance_moved"),
        _of_logs("distance_moved", "distance from the start", lambda found: None, "prior standard deviations"),
    ),
    (
        _logged("distance_in_noise"),
        _of_logs("distance_in_noise", "distance over the reach of the noise alone", lambda found: None),
    ),
    (lambda found, trace: bool(found.get("unmoved")), _unmoved),
    (_logged("loss"), _of_logs("loss", "loss of each chain's minibatches", lambda found: None, "nats per term")),
)
"""(test, panel) of each panel, in the order of the figure."""


def _wrapped(text: str, width: int) -> str:
    lines: list[str] = []
    for part in (line for sentence in text.split("; ") for line in textwrap.wrap(sentence, width)):
        fits = lines and len(lines[-1]) + len(part) + 2 <= width
        lines = [*lines[:-1], f"{lines[-1]}; {part}"] if fits else [*lines, part]
    return "\n".join(lines)
