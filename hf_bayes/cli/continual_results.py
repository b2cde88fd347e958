"""The results of ``hf-bayes continual``: test losses, the table of forgetting, and figures 5 and 6 of the paper.

``results`` is always {method: [[test loss of episode e] after episode n]}. "single" was trained on episode n alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_bayes.cli.output_file import write_figure
from hf_bayes.training.trainer import BayesianTrainer

Results = Mapping[str, Sequence[Sequence[float]]]


@torch.no_grad()
def losses_on(trainer: BayesianTrainer, episodes: Sequence[Any], collate: Callable[..., Any]) -> list[float]:
    """Return the test loss of each episode in nats per token, at the mean of the posterior."""
    model = trainer.bayesian
    model.show(trainer.posterior.representative[None])
    found = []
    for rows in episodes:
        batches = DataLoader(rows, batch_size=trainer.args.per_device_eval_batch_size, collate_fn=collate)
        terms = [model.evaluate_batch(batch.to(model.device))[0]["nll"].double() for batch in batches]
        found.append(float(torch.cat(terms).mean()))
    return found


def excess(results: Results, method: str) -> list[float]:
    """Return, after each episode n, the mean loss over episodes 0..n minus the loss of single training (figure 6)."""
    alone = [row[episode] for episode, row in enumerate(results["single"])]
    rows = results[method]
    return [sum(row[e] - alone[e] for e in range(n + 1)) / (n + 1) for n, row in enumerate(rows)]


def forgotten(results: Results, method: str) -> float:
    """Return the mean increase in loss from right after an episode to the end, over all episodes but the last."""
    rows = results[method]
    rise = [rows[-1][episode] - rows[episode][episode] for episode in range(len(rows) - 1)]
    return sum(rise) / max(1, len(rise))


def table(results: Results) -> str:
    """Return a Markdown table in nats per token."""
    last = len(results["single"]) - 1
    lines = [
        f"| method | loss over {last + 1} episodes | above single-episode training | forgotten | last episode |",
        "|---|---|---|---|---|",
    ]
    for method, rows in results.items():
        if method != "single":
            mean, end = sum(rows[-1]) / len(rows[-1]), rows[-1][last] - results["single"][last][last]
            numbers = (mean, excess(results, method)[-1], forgotten(results, method), end)
            lines.append(f"| {method} | " + " | ".join(f"{number:.4f}" for number in numbers) + " |")
    return "\n".join(lines)


def draw_losses(panels: Sequence[Any], results: Results, episodes: Sequence[str]) -> None:
    """Draw the paper's figure 5: the test loss of each episode from the time it is learnt, one panel per episode."""
    for index, (panel, episode) in enumerate(zip(panels, episodes, strict=True)):
        for name, rows in results.items():
            if name != "single":
                steps = range(index + 1, len(rows) + 1)
                panel.plot(steps, [row[index] for row in rows[index:]], **_style(name))
        panel.axhline(results["single"][index][index], color="grey", linewidth=0.8, label="trained on it alone")
        panel.axvline(index + 1, color="grey", linestyle=":", label="learnt here")
        panel.set_title(episode, fontsize=8)
        panel.set_xticks(range(1, len(episodes) + 1))
    panels[-1].set_xlabel("episodes learnt")


def draw_average(panel: Any, results: Results) -> None:
    """Draw the paper's figure 6: mean loss over the episodes seen, minus the loss of single-episode training."""
    for name, rows in results.items():
        if name != "single":
            panel.plot(range(1, len(rows) + 1), excess(results, name), **_style(name))
    panel.set_xticks(range(1, len(results["single"]) + 1))
    panel.set_xlabel("episodes learnt")
    panel.axhline(0, color="grey", linewidth=0.8)


def _style(name: str) -> dict[str, Any]:
    return {"label": name, "linestyle": "--" if name == "offline" else "-", "marker": "o", "markersize": 3}


def figures(results: Results, episodes: Sequence[str], directory: Path) -> None:
    """Write ``losses.png`` (one panel for each episode) and ``average.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(episodes), 1, sharex=True, figsize=(6, 1.6 * len(episodes)), squeeze=False)
    draw_losses(panels[:, 0], results, [Path(episode).name for episode in episodes])
    panels[0, 0].legend(fontsize=6)
    figure.supylabel("test loss, nats per token", fontsize=8)
    figure.tight_layout()
    write_figure(directory / "losses.png", figure, flag="--output_dir", dpi=150)
    pyplot.close(figure)

    figure, panel = pyplot.subplots(figsize=(6, 3.5))
    draw_average(panel, results)
    panel.set_ylabel("loss above single-episode training")
    panel.legend(fontsize=7)
    figure.tight_layout()
    write_figure(directory / "average.png", figure, flag="--output_dir", dpi=150)
    pyplot.close(figure)
