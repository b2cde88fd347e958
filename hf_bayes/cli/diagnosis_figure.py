"""The figure of ``hf-bayes diagnose``: one panel for each diagnostic that the trace of a run holds.

A line under the title of each panel says what a good run looks like. No legend lies over data.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_bayes.cli.diagnosis_table import method_name, number, verdict
from hf_bayes.core.text_safety import visible_line
from hf_bayes.diagnostics.convergence import MAX_RHAT, MIN_ESS
from hf_bayes.diagnostics.verdict import MAX_UNMOVED

Drawing = Callable[[Axes, Mapping[str, Any], Mapping[str, Any]], str]
"""A function that draws the diagnostics and the trace of a run into axes, and returns the title."""
Wanted = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
"""A test of whether diagnostics and trace hold the values of a panel."""


class Panel(NamedTuple):
    """A panel of the figure.

    Attributes:
        wanted: whether the run has its values.
        draw: draws them.
        reading: a line under the title: how to read the panel.
    """

    wanted: Wanted
    draw: Drawing
    reading: str


_LEFT, _RIGHT, _LIMIT = "#0072B2", "#D55E00", "#CC79A7"  # of the colour-blind safe palette of Okabe and Ito


def plot(config: Mapping[str, Any], trace: Mapping[str, Any]) -> Figure | None:
    """Draw one panel for each diagnostic in the trace, with a line that explains it. Return None if there is none.

    Names are drawn unchanged: a dollar sign does not begin a formula.
    """
    with matplotlib.rc_context({"text.parse_math": False}):
        return _plot(config, trace)


def _plot(config: Mapping[str, Any], trace: Mapping[str, Any]) -> Figure | None:
    panels = [panel for panel in _PANELS if panel.wanted(config["diagnostics"], trace)]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.5 * rows + 0.7), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        axis.set_title(panel.draw(axis, config["diagnostics"], trace), fontsize=9.5, pad=17)
        axis.text(
            0.5, 1.02, panel.reading, transform=axis.transAxes, ha="center", va="bottom", fontsize=7.5, color="0.3"
        )
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    # 14 letters of this size fit into an inch
    figure.suptitle(_wrapped(f"{method_name(config)}: {verdict(config)}", width=60 * columns), fontsize=10)
    shaded = "; grey areas are their burn-in" * bool(trace.get("burn_in"))
    figure.supxlabel(f"Colours without a name are chains{shaded}.", fontsize=8)
    return figure


def _curves(axis: Axes, trace: Mapping[str, Any], steps: Sequence[int], values: Sequence[Sequence[Any]]) -> None:
    """Draw one line for each chain over the updates, with the burn-in shaded."""
    for chain, colour in zip(range(len(values[0])), _colours(len(values[0])), strict=True):
        curve = [math.nan if row[chain] is None else row[chain] for row in values]
        axis.plot(steps, curve, color=colour, linewidth=0.9, marker="." if len(steps) < 40 else None, markersize=4)
    if trace.get("burn_in"):
        axis.axvspan(0, trace["burn_in"], color="0.92", zorder=0)
    axis.set_xlabel("update")


def _colours(count: int) -> list[Any]:
    return [matplotlib.colormaps["viridis"](0.9 * index / max(1, count - 1)) for index in range(count)]


def _probe(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    _curves(axis, trace, trace["probe"]["step"], trace["probe"]["log_lik"])
    axis.set_ylabel("nats per term")
    rhat = found.get("rhat")
    return f"log-likelihood of the probe{'' if rhat is None else f', R-hat {number(rhat)}'}"


def _of_logs(
    name: str, title: str, law: Callable[[Mapping[str, Any]], float | None], ylabel: str = "", *, log: bool = False
) -> Drawing:
    """Return a drawing of one logged quantity, with its expected value as a dashed line."""

    def draw(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
        logs = trace["logs"]
        _curves(axis, trace, logs["step"], logs[name])
        axis.set_ylabel(ylabel)
        if log:
            axis.set_yscale("log")
        expected = law(found)
        if expected is None:
            return title
        axis.axhline(expected, color=_LIMIT, linestyle="--", linewidth=1)
        return f"{title}, {number(expected)} expected (dashed)"

    return draw


def _tensors(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    kinetic = trace["kinetic_of_tensors"]
    values, places = kinetic["relative_to_law"], range(len(kinetic["names"]))
    low, high = zip(*kinetic["interval"], strict=True)
    axis.vlines(places, low, high, color="0.8", linewidth=max(1.0, min(6.0, 150 / len(places))))
    for chain, colour in zip(values, _colours(len(values)), strict=True):
        axis.plot(places, chain, ".", color=colour, markersize=4)
    axis.set_xlabel("random tensor, in the order of the model")
    axis.set_ylabel("over its expected value")
    share = sum(found["kinetic_share"]) / len(found["kinetic_share"])
    return f"kinetic temperature of each tensor: {share:.0%} inside"


def _terms(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    for kind, words, colour in (("terms", "labels' log p", _LEFT), ("logits", "logits", _RIGHT)):
        values = _rhats(trace, kind)
        if values:
            heights = [(index + 1) / len(values) for index in range(len(values))]
            axis.plot(values, heights, color=colour, label=visible_line(f"{found.get(f'num_{kind}')} {words}"))
    axis.axvline(MAX_RHAT, color=_LIMIT, linestyle="--", linewidth=1)
    axis.axhline(0.95, color="0.7", linewidth=0.8)
    axis.set_xlabel("R-hat")
    axis.set_ylabel("share below")
    _legend(axis)
    return visible_line(f"R-hat of single terms ({found.get('num_values')} {found.get('values')})")


def _rhats(trace: Mapping[str, Any], kind: str) -> list[float]:
    return [value for value in trace.get(kind, {}).get("rhat", ()) if value is not None]


def _convergence(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    checks, right = trace["convergence"], axis.twinx()
    for side, name, words, limit, colour in (
        (axis, "rhat", "R-hat", MAX_RHAT, _LEFT), (right, "ess", "ESS", MIN_ESS, _RIGHT)
    ):  # fmt: skip
        values = [math.nan if value is None else value for value in checks[name]]
        side.plot(checks["step"], values, color=colour, marker="." if len(values) < 40 else None, markersize=4)
        side.axhline(limit, color=colour, linestyle="--", linewidth=0.8)
        side.set_ylabel(words, color=colour)
        side.tick_params(axis="y", colors=colour)
    axis.set_xlabel("update")
    return "R-hat and ESS of the probe so far"


def _unmoved(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    shares = found["unmoved"]
    axis.bar(range(len(shares)), shares, color=_colours(len(shares)), width=0.6)
    axis.plot(range(len(shares)), shares, ".", color="0.2", markersize=4)  # where a bar has no height
    axis.axhline(MAX_UNMOVED, color=_LIMIT, linestyle="--", linewidth=1)
    axis.set_ylim(-0.02 * max(1.2 * MAX_UNMOVED, *shares), 1.1 * max(1.2 * MAX_UNMOVED, *shares))
    axis.set_xticks(range(len(shares)) if len(shares) <= 8 else [0, len(shares) - 1])
    axis.set_xlabel("chain")
    axis.set_ylabel("share of its weights")
    return "weights that the first noisy update left unchanged"


def _risk(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> str:
    risk = trace["risk"]
    sizes, limit = risk["sizes"], risk["limit"]
    first = -(-len(sizes) // 4)
    axis.plot([1 / size for size in sizes], risk["risks"], "o", color=_LEFT, markersize=3.5, label="mean over subsets")
    inverse = [index / 100 / first for index in range(101)]
    fit = [limit + risk["slope"] * x + risk["curvature"] * x * x for x in inverse]
    axis.plot(inverse, fit, color=_RIGHT, linewidth=1, label=f"fit to S ≥ {first}")
    axis.errorbar(0, limit, yerr=2 * risk["std_error"], fmt="s", color=_LIMIT, markersize=4, capsize=3,
                  label=f"limit {limit:.4f} ± {2 * risk['std_error']:.4f}")  # fmt: skip
    marks = [mark for mark in (1, 2, 4, 8) if mark < len(sizes)]
    axis.set_xticks([0, *(1 / mark for mark in marks)], ["∞", *map(str, marks)])
    axis.set_xlabel(f"S, to {len(sizes)} (spaced as 1 / S)")
    axis.set_ylabel("nats per term")
    _legend(axis)
    of = f" ({visible_line(risk['eval_set'])})" if "eval_set" in risk else ""
    return f"held-out NLL of S members{of}"


def _legend(axis: Axes) -> None:
    """Put the legend below the panel, where it hides no data."""
    axis.legend(frameon=False, fontsize=7.5, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2), columnspacing=1)


def _logged(name: str) -> Wanted:
    return lambda found, trace: bool(trace.get("logs", {}).get(name))


_PANELS = (
    Panel(lambda found, trace: bool(trace.get("probe")), _probe, "good: the chains overlap and no longer rise"),
    Panel(
        lambda found, trace: bool(trace.get("convergence")), _convergence,
        "good: R-hat falls below its dashed limit, ESS rises above its own",
    ),
    Panel(
        lambda found, trace: bool(_rhats(trace, "terms") or _rhats(trace, "logits")), _terms,
        f"good: where they cross the grey line (95 %), curves are left of {MAX_RHAT} (dashed)",
    ),
    Panel(lambda found, trace: bool(trace.get("risk")), _risk, "flat towards ∞: more members would not help"),
    Panel(
        _logged("kinetic_temperature"),
        _of_logs("kinetic_temperature", "kinetic temperature", lambda found: found.get("kinetic_temperature_law")),
        "good: the momenta of every chain scatter around the dashed line",
    ),
    Panel(
        lambda found, trace: bool(trace.get("kinetic_of_tensors")), _tensors,
        "good: all points lie in the grey bars (99 % interval, or 10 %)",
    ),
    Panel(
        _logged("configurational_temperature"),
        _of_logs("configurational_temperature", "configurational temperature", lambda found: found.get("temperature")),
        "good: after the burn-in, positions scatter around the dashed line",
    ),
    Panel(
        _logged("noise_ratio"),
        _of_logs("noise_ratio", "injected over minibatch noise", lambda found: None, "ratio of variances", log=True),
        "good: far above 1; minibatches heat a chain by about 1 / ratio",
    ),
    Panel(
        _logged("acceptance"), _of_logs("acceptance", "acceptance probability", lambda found: None),
        "good: between 0.1 and 0.99",
    ),
    Panel(
        _logged("penalty"), _of_logs("penalty", "noise penalty of a move", lambda found: None, "log acceptance"),
        "good: near 0; the noise of minibatches costs few moves",
    ),
    Panel(
        _logged("capped"), _of_logs("capped", "share of coordinates at their cap", lambda found: None),
        "good: near 0; the data set the width of the draws, and not the cap",
    ),
    Panel(_logged("divergent"), _of_logs("divergent", "divergent moves", lambda found: None, "share"), "good: 0"),
    Panel(
        _logged("distance_moved"),
        _of_logs("distance_moved", "distance from the start", lambda found: None, "prior standard deviations"),
        "good: the chains have left their start, or the end of a warm start",
    ),
    Panel(
        _logged("distance_in_noise"),
        _of_logs("distance_in_noise", "distance over the reach of the noise alone", lambda found: None),
        "rising: a gradient drives the chains; falling: data or prior hold them",
    ),
    Panel(
        lambda found, trace: bool(found.get("unmoved")), _unmoved,
        f"good: below the dashed limit of {MAX_UNMOVED}; rounding loses no steps",
    ),
    Panel(
        _logged("loss"), _of_logs("loss", "loss of each chain's minibatches", lambda found: None, "nats per term"),
        "good: level after the burn-in; it scatters with the minibatches",
    ),
)  # fmt: skip
"""The panels in the order of the figure."""


def _wrapped(text: str, width: int) -> str:
    lines: list[str] = []
    for part in (line for sentence in text.split("; ") for line in textwrap.wrap(sentence, width)):
        fits = lines and len(lines[-1]) + len(part) + 2 <= width
        lines = [*lines[:-1], f"{lines[-1]}; {part}"] if fits else [*lines, part]
    return "\n".join(lines)
