"""SWAG through the draws of a-GPS as a probe for several modes (agps section 3.2.1, Tables 2 and 3).

    python -m scripts.reproduce.agps_probe

The paper fits SWAG's Gaussian to 20 draws of a-GPS. If it predicts like the draws, they come from one mode, if not,
from several. Here the probe is tested on draws with a known number of modes: draws of distributions with a density,
and draws of a network on handwritten digits, where descent from each draw to a minimum shows the modes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.swag import SWAGConfig
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from scripts.reproduce.agps_probe_digits import NUM_TRAIN, Digits, barrier, predictions, untrained
from scripts.reproduce.agps_probe_laws import LAWS, Law
from scripts.reproduce.report import keep, legend_once, spread, table

NAME = "agps_probe"


@dataclass(frozen=True)
class Settings:
    """The sizes of a run. Draws, batches and repetitions are the paper's.

    Attributes:
        num_draws: number of draws for the fit of SWAG, and from SWAG.
        repetitions: number of networks, each with its own start, or of runs on a distribution.
        spacing: updates between two draws of a-GPS on a distribution.
        training: updates of AdamW of a pretrained network.
        descent: updates of AdamW from a draw to the minimum below it.
        batch_size: rows of a minibatch of digits.
        max_stds: lambda.
    """

    num_draws: int = 20
    repetitions: int = 5
    spacing: int = 50
    training: int = 1000
    descent: int = 500
    batch_size: int = 256
    max_stds: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


def swag(draws: Tensor, num_draws: int, seed: int) -> Tensor:
    """Return [num_draws, d] from SWAG's Gaussian of rank S through ``draws`` [S, d]."""
    return SWAGConfig(rank=len(draws)).through(draws).sample(num_draws, generator(seed, "swag"))


def on_law(law: Law, settings: Settings) -> dict[str, dict[str, list[float]]]:
    """Return mean U of draws of the law, of draws of a-GPS (lambda = 3) on it, and of SWAG through each, by run."""
    count = settings.num_draws
    exact = [law.draw(count, generator(seed, "law")) for seed in range(settings.repetitions)]
    start = torch.stack([draws[0] for draws in exact])
    steps = settings.spacing * count
    found = sample(
        lambda theta, _: law.energy(theta), start, AGPSConfig(max_std=3.0), num_steps=2 * steps, learning_rate=1.0,
        burn_in=steps, thin=settings.spacing, progress=False,
    )  # fmt: skip
    result = {}
    for name, runs in {"independent": exact, "a-GPS": list(found.draws)}.items():
        fitted = [swag(draws, 50 * count, seed) for seed, draws in enumerate(runs)]
        result[name] = {
            "draws": [float(law.energy(draws).mean()) for draws in runs],
            "swag": [float(law.energy(draws).mean()) for draws in fitted],
            "right": [float((draws[:, 0] > 0).double().mean()) for draws in runs],
        }
    return result


def descend(theta: Tensor, train: Digits, steps: int, settings: Settings) -> Tensor:
    """Return the end points [M, d] of AdamW with a shrinking learning rate."""
    return sample(
        train.energy, theta, MAPConfig(num_chains=len(theta)), num_steps=steps, burn_in=steps - 1,
        learning_rate=lambda step: 3e-3 * (1 - step / steps) + 1e-6, num_data=NUM_TRAIN,
        batches=train.batches(len(theta), settings.batch_size, 0), progress=False,
    ).draws[:, -1]  # fmt: skip


def blind(start: Tensor, max_std: float, settings: Settings, steps_per_draw: int) -> Tensor:
    """Return draws [M, S, d] of a random walk with steps N(0, lambda^2), without gradients, at the spacing of a-GPS."""
    rng, count = generator("blind"), settings.num_draws
    steps = torch.randn(len(start), count, start.shape[1], generator=rng) * max_std * math.sqrt(steps_per_draw)
    return start[:, None] + steps.cumsum(1)


def judged(draws: Tensor, train: Digits, test: Digits, settings: Settings) -> dict[str, list[Any]]:
    """Return the predictions of draws [M, S, d] and of SWAG through them, and barriers, by repetition.

    One barrier is between the first and the last draw. The other is between the minima below these two, and is 0 if
    both lie in one basin.
    """
    ends = [draws[:, 0], draws[:, -1]]
    minima = [descend(end, train, settings.descent, settings) for end in ends]
    count = settings.num_draws
    return {
        "draws": [predictions(each, test) for each in draws],
        "swag": [predictions(swag(each, count, seed), test) for seed, each in enumerate(draws)],
        "barrier": barrier(*ends, train).tolist(),
        "below": barrier(*minima, train).tolist(),
    }


def on_digits(settings: Settings) -> dict[str, Any]:
    """Return the probe of a-GPS at every lambda, of a random walk from the same networks, and of separate networks."""
    train, test = Digits.split()
    count, repetitions = settings.num_draws, settings.repetitions
    apart = descend(untrained(repetitions * count, 0), train, settings.training, settings)
    apart = apart.unflatten(0, (repetitions, count))
    start, per_draw = apart[:, 0], NUM_TRAIN // settings.batch_size
    found: dict[str, Any] = {
        "trained": {"draws": [predictions(theta[None], test) for theta in start]},
        "trained apart": judged(apart, train, test, settings),
    }
    for max_std in settings.max_stds:
        drawn = sample(
            train.energy, start, AGPSConfig(max_std=max_std), num_steps=per_draw * count, learning_rate=1.0,
            num_data=NUM_TRAIN, batches=train.batches(repetitions, settings.batch_size, 1), thin=per_draw,
            progress=False,
        )  # fmt: skip
        capped = float(drawn.state.capped.mean() / (per_draw * count))
        found[f"a-GPS, {max_std:g}"] = {**judged(drawn.draws, train, test, settings), "capped": capped}
        walked = blind(start, max_std, settings, per_draw)
        found[f"blind walk, {max_std:g}"] = judged(walked, train, test, settings)
    return found


def run(settings: Settings) -> dict[str, Any]:
    """Run the probe on the distributions and on the digits."""
    laws = {name: {"modes": law.modes, **on_law(law, settings)} for name, law in LAWS.items()}
    return {"settings": asdict(settings), "laws": laws, "digits": on_digits(settings)}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the page: the distributions and the digits."""
    laws = [
        [
            name, law["modes"], source, spread([min(share, 1 - share) for share in law[source]["right"]], 2),
            spread(law[source]["draws"], 1), spread(law[source]["swag"], 1),
        ]
        for name, law in record["laws"].items()
        for source in ("independent", "a-GPS")
    ]  # fmt: skip
    digits = []
    for name, row in record["digits"].items():
        cells = []
        for key, places in (("accuracy", 1), ("ece", 1), ("nll", 2)):
            for kind in ("draws", "swag"):
                cells.append(spread([one[key] for one in row[kind]], places) if kind in row else "")
        barriers = [spread(row[key], 2) if key in row else "" for key in ("barrier", "below")]
        digits.append([name, *cells, *barriers])
    columns = ["", "accuracy", "its SWAG's", "ECE", "its SWAG's", "NLL", "its SWAG's", "barrier", "barrier below"]
    return {
        "laws": table(["law", "modes", "draws", "share of the smaller side", "U of draws", "U of SWAG's"], laws),
        "digits": table(columns, digits),
    }


def figures(record: Mapping[str, Any], directory: Path) -> None:
    """Draw the probe (the gap of NLL) against the truth (the barrier between minima)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    names = [f"{law}\n({source} draws)" for law in record["laws"] for source in ("independent", "a-GPS")]
    places = range(len(names))
    shown = [(law, source) for law in record["laws"].values() for source in ("independent", "a-GPS")]
    for place, (law, source) in enumerate(shown):
        excess = [after - before for before, after in zip(law[source]["draws"], law[source]["swag"], strict=True)]
        colour = "#EE6677" if law["modes"] > 1 else "#4477AA"
        axes[0].plot(excess, [place] * len(excess), "o", color=colour, alpha=0.7)
    axes[0].set_yticks(places, names, fontsize=8)
    axes[0].invert_yaxis()
    axes[0].set_xscale("symlog", linthresh=1)
    axes[0].set_xlim(-10, 2000)
    axes[0].axvline(0, color="0.8", zorder=0)
    axes[0].set_xlabel("U of SWAG's draws above that of the draws (nats)")
    axes[0].set_title("blue: one mode; red: two. A dot is a run of 20 draws", fontsize=10)
    for name, row in record["digits"].items():
        if "below" not in row:
            continue
        kind = name.split(",")[0]
        colour = {"a-GPS": "#4477AA", "blind walk": "0.6", "trained apart": "#EE6677"}[kind]
        gap = [after["nll"] - before["nll"] for before, after in zip(row["draws"], row["swag"], strict=True)]
        axes[1].plot(row["below"], gap, "o", color=colour, alpha=0.7, label=kind)
    axes[1].set_xscale("symlog", linthresh=0.01)
    axes[1].set_yscale("symlog", linthresh=0.01)
    axes[1].set_xlabel("barrier between the minima below first and last draw (nats)")
    axes[1].set_ylabel("NLL of SWAG above that of the draws (nats)")
    legend_once(axes[1])
    axes[1].set_title("digits: the probe against the truth", fontsize=10)
    figure.savefig(directory / f"{NAME}.png", dpi=110)
    plt.close(figure)


def main() -> None:
    """Run at full size and keep the record."""
    torch.set_num_threads(1)
    keep(NAME, lambda: run(Settings()))


if __name__ == "__main__":
    main()
