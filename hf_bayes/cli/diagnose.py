"""``hf-bayes-diagnose DIRECTORY``: a posterior's diagnostics as a table with the verdict, and one figure.

Reads the directory's (or repository's) JSON and safetensors; needs no base model. docs/diagnostics.md explains the
panels. Texts of the directory are shown with codes in place of characters that act on a terminal.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_bayes.core.text_safety import readable_errors, visible_line
from hf_bayes.diagnostics.convergence import MAX_RHAT, MIN_ESS_PER_CHAIN
from hf_bayes.diagnostics.plausibility import MAX_STRAYED
from hf_bayes.diagnostics.verdict import MAX_CAPPED, MAX_UNMOVED
from hf_bayes.posteriors import hub
from hf_bayes.posteriors.config import CONFIG
from hf_bayes.posteriors.directory import TRACE
from hf_bayes.posteriors.storage import POSTERIOR, read_directory

ROWS = (
    ("distance", "distance moved, prior standard deviations", ""),
    ("strayed", "prior density lost, over what data can repay", f"below {MAX_STRAYED:g}"),
    ("distance_in_noise", "distance moved, reach of the noise alone", ""),
    ("unmoved", "weights that rounding held at the first update", "below 0.01"),
    ("kinetic_temperature", "kinetic temperature", "kinetic_temperature_law"),
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
"""Field, what it is, and what it should be: a text, or the field that says it."""


@readable_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="hf-bayes-diagnose", description="How a posterior's chains did.")
    parser.add_argument("posterior", help="directory or Hub id of a posterior")
    parser.add_argument(
        "--output", type=Path, default=Path("diagnostics.png"), help="the figure (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    directory = hub.fetch(args.posterior, patterns=hub.FILES)
    wanted = (CONFIG, TRACE)
    files = read_directory(directory, format=POSTERIOR, only=lambda name: name in wanted)
    config, trace = files[CONFIG], files.get(TRACE, {})
    console = Console()
    console.print(table(config))
    drawn = plot(config, trace)
    if drawn is None:
        console.print("There is nothing to plot: the posterior was not made by a run that logged its chains.")
        return
    drawn.savefig(args.output, dpi=130)
    console.print(f"figure: {args.output}")


def table(config: Mapping[str, Any]) -> Table:
    """What is known of every chain, and the verdict under it."""
    found, metrics = config["diagnostics"], config["metrics"]
    chains = found.get("num_chains") or 0
    colour = {True: "green", False: "red"}.get(found.get("converged"), "yellow")
    title = Text(f"{_method(config)}, {chains or '?'} chains")  # as Text: square brackets are no markup
    result = Table(title=title, caption=Text(_verdict(config), style=colour))
    result.add_column("diagnostic")
    result.add_column("expected", justify="right")
    shown = min(chains, 8)
    for chain in range(shown):
        result.add_column(f"chain {chain}", justify="right")
    for name, words, expected in ROWS:
        values = found.get(name)
        if values is not None:
            expected = _number(found[expected]) if expected in found else expected
            result.add_row(words, expected, *map(_number, values[:shown]))
    rule = found.get("configurational_temperature") is not None and found.get("acceptance") is None
    if rule and found.get("temperature") and found.get("noise_ratio") is None:
        words = "injected over minibatch noise, variances (takes 2 rows an update, and measure_gradient_noise)"
        result.add_row(words, "above 1", *["not measured"] * shown)
    over = visible_line(f"{found.get('num_values')} {found.get('values')}, {found.get('num_terms')} terms")
    over += ", between halves" * (chains == 1)
    for name, words, limit in (
        ("rhat", f"R-hat, log-likelihood ({over})", f"below {MAX_RHAT}"),
        ("rhat_terms", "R-hat, single terms (95 % quantile)", f"below {MAX_RHAT}"),
        ("rhat_logits", f"R-hat, {found.get('num_logits')} logits (95 % quantile)", f"below {MAX_RHAT}"),
        ("ess", "ESS, log-likelihood", f"above {MIN_ESS_PER_CHAIN * chains:.0f}"),
        ("ess_terms", "ESS, single terms (5 % quantile)", f"above {MIN_ESS_PER_CHAIN * chains:.0f}"),
        ("ess_logits", "ESS, logits (5 % quantile)", f"above {MIN_ESS_PER_CHAIN * chains:.0f}"),
    ):
        if found.get(name) is not None:
            result.add_row(Text(words), limit, _number(found[name]))
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
                    Text(words + of), "", f"{value:.4f}" + ("" if error is None else f", s.e. {_number(error)}")
                )
    return result


def _eval_sets(metrics: Mapping[str, Any]) -> list[str]:
    """What stands before the names of their figures: nothing, or of several eval sets their names with "_"."""
    return [name.removesuffix("member_nll") for name in metrics if name.endswith("member_nll")] or [""]


def plot(config: Mapping[str, Any], trace: Mapping[str, Any]) -> Figure | None:
    """Draw one panel for everything the trace holds; None if it holds nothing.

    Names are drawn as they are: a dollar sign begins no formula.
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
    # 14 letters of this size go into an inch
    figure.suptitle(_wrapped(f"{_method(config)}: {_verdict(config)}", width=60 * columns), fontsize=10)
    return figure


def _method(config: Mapping[str, Any]) -> str:
    return visible_line(config["method"]["name"])


def _verdict(config: Mapping[str, Any]) -> str:
    return visible_line(config["diagnostics"].get("verdict") or "not assessed")


def _curves(axis: Axes, trace: Mapping[str, Any], steps: Sequence[int], values: Sequence[Sequence[Any]]) -> None:
    """A line a chain over updates, burn-in shaded."""
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
    label = "" if rhat is None else f" (R-hat {_number(rhat)})"
    axis.set_title(f"probe: log p of a term, by chain{label}", fontsize=9)
    axis.set_ylabel("nats")


def _of_logs(name: str, title: str, law: Callable[[Mapping[str, Any]], float | None], ylabel: str = "") -> Callable:
    def panel(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
        logs = trace["logs"]
        _curves(axis, trace, logs["step"], logs[name])
        expected = law(found)
        if expected is not None:
            axis.axhline(expected, color="C3", linestyle="--", linewidth=1, label=f"expected: {_number(expected)}")
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
    axis.set_ylabel("share of them below")
    axis.legend(fontsize=7, loc="lower right")


def _rhats(trace: Mapping[str, Any], kind: str) -> list[float]:
    return [value for value in trace.get(kind, {}).get("rhat", ()) if value is not None]


def _convergence(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
    looks, chains = trace["convergence"], found["num_chains"]
    steps, count = looks["step"], len(looks["step"])
    marker = "." if count < 40 else None
    (ratio,) = axis.plot(steps, looks["rhat"], color="C0", marker=marker, markersize=4, label="R-hat")
    axis.axhline(MAX_RHAT, color="C0", linestyle="--", linewidth=0.8)
    axis.set_ylabel("R-hat")
    axis.set_xlabel("update")
    right = axis.twinx()
    sizes = [math.nan if size is None else size for size in looks["ess"]]
    (size,) = right.plot(steps, sizes, color="C1", marker=marker, markersize=4, label="ESS")
    right.axhline(MIN_ESS_PER_CHAIN * chains, color="C1", linestyle="--", linewidth=0.8)
    right.set_ylabel("ESS")
    right.set_ylim(0, 1.35 * right.get_ylim()[1])  # room for the legend
    axis.legend(handles=[ratio, size], fontsize=7, loc="upper right", ncols=2)
    axis.set_title("log-likelihood of the looks so far (dashed: limits)", fontsize=9)


def _unmoved(axis: Axes, found: Mapping[str, Any], trace: Mapping[str, Any]) -> None:
    shares = found["unmoved"]
    axis.bar(range(len(shares)), shares, color=_colours(len(shares)), width=0.6)
    axis.plot(range(len(shares)), shares, ".", color="0.2", markersize=4)  # where a bar has no height
    axis.axhline(MAX_UNMOVED, color="C3", linestyle="--", linewidth=1, label=f"limit: {MAX_UNMOVED}")
    axis.set_ylim(-0.02 * max(1.2 * MAX_UNMOVED, *shares), 1.1 * max(1.2 * MAX_UNMOVED, *shares))
    axis.set_xticks(range(len(shares)) if len(shares) <= 8 else [0, len(shares) - 1])
    axis.set_xlabel("chain")
    axis.set_ylabel("share of its numbers")
    axis.set_title("numbers that the first noisy update left as they were", fontsize=9)
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


def _logged(name: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], bool]:
    return lambda found, trace: bool(trace.get("logs", {}).get(name))


_PANELS: tuple[tuple[Callable[[Mapping[str, Any], Mapping[str, Any]], bool], Callable], ...] = (
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
"""Whether diagnostics and trace hold it, and what draws it."""


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"


def _wrapped(text: str, width: int) -> str:
    lines: list[str] = []
    for part in (line for sentence in text.split("; ") for line in textwrap.wrap(sentence, width)):
        fits = lines and len(lines[-1]) + len(part) + 2 <= width
        lines = [*lines[:-1], f"{lines[-1]}; {part}"] if fits else [*lines, part]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
