"""What run_continual.py shows: test losses, the table of forgetting, and figures as posteriors' 5 and 6.

Everywhere ``results`` is {method: [[test loss of episode e] after episode n]}; "single" was trained on episode n alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_bayes import BayesianTrainer

Results = Mapping[str, Sequence[Sequence[float]]]


@torch.no_grad()
def test_losses(trainer: BayesianTrainer, episodes: Sequence[Any], collate: Callable) -> list[float]:
    """Nats per token of each episode, at the posterior's mean."""
    model = trainer.bayesian.eval()
    model.show(trainer.posterior.representative[None])
    found = []
    for rows in episodes:
        batches = DataLoader(rows, batch_size=trainer.args.per_device_eval_batch_size, collate_fn=collate)
        terms = [model.evaluate_batch(batch.to(model.device))[0]["nll"].double() for batch in batches]
        found.append(float(torch.cat(terms).mean()))
    return found


def excess(results: Results, method: str) -> list[float]:
    """After each episode n: the mean over episodes 0..n of the loss above that of training on each alone (figure 6)."""
    alone = [row[episode] for episode, row in enumerate(results["single"])]
    rows = results[method]
    return [sum(row[e] - alone[e] for e in range(n + 1)) / (n + 1) for n, row in enumerate(rows)]


def forgotten(results: Results, method: str) -> float:
    """Mean over all episodes but the last of the loss at the end above that right after the episode."""
    rows = results[method]
    rise = [rows[-1][episode] - rows[episode][episode] for episode in range(len(rows) - 1)]
    return sum(rise) / max(1, len(rise))


def table(results: Results) -> str:
    """Markdown, in nats per token."""
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


def figures(results: Results, episodes: Sequence[str], directory: Path) -> None:
    """``losses.png`` (one panel an episode) and ``average.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods, count = [name for name in results if name != "single"], len(episodes)
    steps = range(1, count + 1)
    figure, panels = pyplot.subplots(count, 1, sharex=True, figsize=(6, 1.6 * count), squeeze=False)
    for episode, panel in enumerate(panels[:, 0]):
        for name in methods:
            style = "--" if name == "offline" else "-o"
            panel.plot(steps, [row[episode] for row in results[name]], style, markersize=3, label=name)
        panel.axhline(results["single"][episode][episode], color="grey", linewidth=0.8, label="single")
        panel.axvline(episode + 1, color="grey", linestyle=":")
        panel.set_title(Path(episodes[episode]).name, fontsize=8)
    panels[0, 0].legend(fontsize=6)
    panels[-1, 0].set_xlabel("episodes learnt")
    figure.supylabel("test loss, nats per token", fontsize=8)
    figure.tight_layout()
    figure.savefig(directory / "losses.png", dpi=150)
    pyplot.close(figure)

    figure, panel = pyplot.subplots(figsize=(6, 3.5))
    for name in methods:
        panel.plot(steps, excess(results, name), "--" if name == "offline" else "-o", markersize=3, label=name)
    panel.set_xlabel("episodes learnt")
    panel.set_ylabel("loss above single-episode training")
    panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(directory / "average.png", dpi=150)
    pyplot.close(figure)
