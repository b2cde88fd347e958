"""a-GPS and the exact GPS kernel on targets on a line, against NUTS and MALA (agps section 3.1, Table 1, Figures 1-8).

    python -m scripts.reproduce.agps_targets

The table has time and effective sample size as in Table 1, and also the distance of the draws from the target. The
baselines are Pyro's (``pip install "hf-bayes[reproduce]"``), as in the paper. They run on an unconstrained coordinate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hf_bayes.diagnostics.convergence import ess
from scripts.reproduce.agps_targets_mixtures import TARGETS
from scripts.reproduce.agps_targets_samplers import methods
from scripts.reproduce.pyro_package import require_pyro
from scripts.reproduce.report import keep, spread, table

NAME = "agps_targets"


def run(*, num_draws: int = 1000, burn_in: int = 1000, replications: int = 40, baselines: int = 10) -> dict[str, Any]:
    """Run every method on every target: ``baselines`` replications of Pyro's (0: none), as many timed runs of ours."""
    if baselines:
        require_pyro()  # a missing package is better found now than after ten minutes
    targets: dict[str, Any] = {}
    for name, target in TARGETS.items():
        targets[name] = {"figure": target.figure, "family": target.family, "methods": {}}
        low, high = target.quantile(0.01), target.quantile(0.99)
        edges = np.linspace(low, high, 61)
        for method, find in methods(burn_in).items():
            if method in ("NUTS", "MALA") and not (baselines and target.compared):
                continue
            draws, seconds = find(target, replications, num_draws, max(1, baselines) if target.compared else 0)
            each = [target.distances(row) for row in draws.numpy()]
            targets[name]["methods"][method] = {
                "replications": len(draws),
                "seconds": seconds,
                # not defined (NaN) for a chain that never moved: its draws are worth no draw of the target
                "ess": [float(ess(row[None, :, None]).nan_to_num(0.0)) for row in draws],
                "ks": [row["ks"] for row in each],
                "wasserstein": [row["wasserstein"] for row in each],
                "pooled": target.distances(draws.flatten().numpy()),
                "histogram": (np.histogram(draws, edges)[0] / draws.numel()).round(5).tolist(),
            }
        targets[name]["edges"] = [low, high]
        targets[name]["mass"] = np.diff(target.cdf(edges)).round(5).tolist()
    return {"num_draws": num_draws, "burn_in": burn_in, "targets": targets}


PAPER = {"N(2, 4)": {"NUTS": (4.6, 364), "MALA": (2.3, 74.9), "a-GPS": (0.4, 954)}} | {
    "mixture": {"NUTS": (30.0, 105.2), "MALA": (4.9, 36.8), "a-GPS": (2.0, 70.2)}
}
"""Table 1: seconds for burn-in and 1000 draws, ESS of 1000 draws."""


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables: Table 1 beside the paper's numbers, and all further targets."""
    columns = ["target", "method", "runs", "CPU s", "paper", "ESS", "paper", "ESS / s", "KS", "KS, pooled"]
    columns += ["W1", "W1, pooled"]
    only_table1 = ("CPU s", "paper", "ESS / s")
    first, second = [], []
    for name, target in record["targets"].items():
        for method, row in target["methods"].items():
            seconds, size = np.mean(row["seconds"]) if row["seconds"] else None, spread(row["ess"], 0)
            paper = PAPER.get(name, {}).get(method, ("", ""))
            speed = "" if seconds is None else f"{np.mean(row['ess']) / seconds:.0f}"
            timed = "" if seconds is None else f"{seconds:.2f}"
            distances = [spread(row["ks"]), f"{row['pooled']['ks']:.3f}"]
            distances += [spread(row["wasserstein"]), f"{row['pooled']['wasserstein']:.3f}"]
            line = [name, method, row["replications"], timed, paper[0], size, paper[1], speed, *distances]
            if name in PAPER:
                first.append(line)
            else:
                second.append([cell for column, cell in zip(columns, line, strict=True) if column not in only_table1])
    return {
        "table1": table(columns, first),
        "others": table([column for column in columns if column not in only_table1], second),
    }


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw the densities and the draws of all replications."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(16, 7))
    colours = {"a-GPS": "tab:red", "GPS, exact": "tab:blue", "NUTS": "tab:green"}
    for axis, (name, target) in zip(axes.flat, record["targets"].items(), strict=True):
        edges = np.linspace(*target["edges"], len(target["mass"]) + 1)
        width = edges[1] - edges[0]
        axis.stairs(np.array(target["mass"]) / width, edges, fill=True, color="0.85", label="target")
        for method, colour in colours.items():
            if method in target["methods"]:
                row = target["methods"][method]
                label = f"{method}: KS {row['pooled']['ks']:.3f}"
                axis.stairs(np.array(row["histogram"]) / width, edges, color=colour, label=label, linewidth=1.2)
        axis.set_title(f"{name}, {target['family']} proposals ({target['figure']})", fontsize=9)
        axis.set_yticks([])
        axis.legend(fontsize=8)
        axis.set_ylim(top=1.35 * axis.get_ylim()[1])
    figure.tight_layout()
    figure.savefig(directory / f"{NAME}.png", dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baselines", type=int, default=10, help="replications of NUTS and MALA; 0 leaves them out")
    keep(NAME, lambda: run(baselines=parser.parse_args().baselines))
