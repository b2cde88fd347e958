"""SG-MCMC against HMC on multilayer perceptrons (cold_posteriors, Figure 4, section 4.2 and apps N and O).

    python -m scripts.reproduce.cold_posteriors_mlp

An MLP of depth 2 drawn from its prior labels 100 points in R^5 with 3 classes. MLPs of depth 1 to 3, ten units a layer,
learn them at temperatures from 1e-3 to 1, once by HMC and once by SG-MCMC on full batches. The model behind the data
is in the family. Hence T = 1 is optimal in expectation, and an advantage of T < 1 would be an error of the sampler.

All data sets, chains and (in HMC) temperatures are rows of one theta: row m uses data set m and, in HMC, U / T_m.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.diagnostics.convergence import ess, rhat, unconverged
from scripts.reproduce.cold_posteriors_mlp_chains import MLP, Arguments, Data, draw_data, hmc, sgmcmc
from scripts.reproduce.report import keep, spread, table

NAME = "cold_posteriors_mlp"
RHAT, ESS = 1.05, 200
"""The limits of convergence: largest R-hat, smallest ESS."""
NUM_PROBES = 10
"""The number of held-out points for R-hat and ESS, in addition to the log-likelihood of the training data."""


def predictive(net: MLP, draws: Tensor, x: Tensor) -> Tensor:
    """Return the mean probabilities [n, C] of draws [S, d] at x [n, 5]."""
    return sum(net.logits(part, x[None]).softmax(-1).sum(0) for part in draws.split(20)) / len(draws)  # type: ignore[return-value]


def converged(net: MLP, draws: Tensor, data: Data) -> tuple[float, float]:
    """Return the largest R-hat and smallest ESS of draws [D, K, S, d], over data sets and functions of theta."""
    worst, least = 0.0, math.inf
    for values in watched(net, draws, data):
        worst, least = max(worst, float(rhat(values).max())), min(least, float(ess(values).min()))
    return worst, least


def watched(net: MLP, draws: Tensor, data: Data) -> Iterator[Tensor]:
    """Return [K, S, k] for each data set: class probabilities of the probes and the log-likelihood of the draws."""
    for index, of_set in enumerate(draws):
        rows = of_set.flatten(0, 1)
        probs = net.logits(rows, data.test_x[index, None, :NUM_PROBES]).softmax(-1)[..., :-1].flatten(1)
        log_lik = net.log_lik(rows, data.x[index].expand(len(rows), -1, -1), data.y[index].expand(len(rows), -1))
        yield torch.cat([probs, log_lik[:, None]], 1).unflatten(0, of_set.shape[:2])


def symmetrised_kl(p: Tensor, q: Tensor) -> float:
    """Return the mean over points of KL(p || q) + KL(q || p), in nats."""
    return float(((p - q) * (p.clamp_min(1e-30).log() - q.clamp_min(1e-30).log())).sum(-1).mean())


def compare(net: MLP, data: Data, draws: dict[str, Tensor]) -> dict[str, Any]:
    """Return held-out cross-entropy and convergence of each sampler's draws [D, K, S, d], and their distance."""
    record: dict[str, Any] = {}
    means: dict[str, list[Tensor]] = {}
    for name, of_sampler in draws.items():
        means[name] = [
            torch.stack([predictive(net, chain, data.test_x[index]) for chain in of_set])
            for index, of_set in enumerate(of_sampler)
        ]  # [K, n, C] each
        record[f"{name}_nll"] = [
            float(F.nll_loss(chains.mean(0).log(), y)) for chains, y in zip(means[name], data.test_y, strict=True)
        ]
        record[f"{name}_rhat"], record[f"{name}_ess"] = converged(net, of_sampler, data)
    pairs = list(zip(means["hmc"], means["sgmcmc"], strict=True))
    record["kl"] = [symmetrised_kl(exact.mean(0), other.mean(0)) for exact, other in pairs]
    # the difference between two independent halves of the HMC chains: the resolution of any comparison
    record["kl_hmc"] = [symmetrised_kl(exact[::2].mean(0), exact[1::2].mean(0)) for exact in means["hmc"]]
    return record


def experiment(args: Arguments) -> dict[str, Any]:
    """Return the record of all depths and temperatures."""
    data, rows = draw_data(args), []
    for depth in range(1, args.depths + 1):
        net = MLP(depth)
        exact, acceptance = hmc(net, data, args)
        for temperature in args.temperatures:
            for index, values in enumerate(watched(net, exact[temperature], data)):
                doubts = unconverged(values)
                if doubts is not None:  # as in the page's table
                    where = f"depth {depth}, T = {temperature:g}, data set {index}"
                    warnings.warn(f"{where}: HMC is no gold standard here, {doubts}", stacklevel=1)
            other, configurational = sgmcmc(net, data, temperature, args)
            found = compare(net, data, {"hmc": exact[temperature], "sgmcmc": other})
            rows.append(
                {
                    **{"depth": depth, "temperature": temperature, **found},
                    **{"acceptance": acceptance[temperature], "configurational_temperature": configurational},
                }
            )
    return {"settings": asdict(args), "truth_nll": data.truth_nll, "rows": rows}


def _of(record: dict[str, Any], depth: int, key: str) -> list[Any]:
    return [row[key] for row in record["rows"] if row["depth"] == depth]


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    sets = len(record["truth_nll"])
    columns = ["depth", "T", "HMC nll", "SG-MCMC nll", "difference", "sym. KL", "sym. KL of HMC's halves"]
    predictions = table(
        columns,
        (
            [
                *[row["depth"], f"{row['temperature']:g}"],
                *[f"{spread(row[f'{key}_nll'])}{'' if trusted(row, key) else ' *'}" for key in ("hmc", "sgmcmc")],
                spread([b - a for a, b in zip(row["hmc_nll"], row["sgmcmc_nll"], strict=True)], 4),
                *[f"{sum(row[key]) / sets:.1e}" for key in ("kl", "kl_hmc")],
            ]
            for row in record["rows"]
        ),
    )
    names = ["HMC R-hat", "HMC ESS", "HMC acceptance", "SG-MCMC R-hat", "SG-MCMC ESS", "configurational T / T"]
    keys = ["hmc_rhat", "hmc_ess", "acceptance", "sgmcmc_rhat", "sgmcmc_ess", "configurational_temperature"]
    convergence = table(
        ["depth", "T", *names],
        ([row["depth"], f"{row['temperature']:g}", *(_shown(key, row[key]) for key in keys)] for row in record["rows"]),
    )
    best = table(
        ["depth", "best T by HMC", "best T by SG-MCMC", "T = 1 is best on, HMC", "T = 1 is best on, SG-MCMC"],
        ([depth, *_best(record, depth)] for depth in sorted({row["depth"] for row in record["rows"]})),
    )
    return {"predictions": predictions, "convergence": convergence, "best": best}


def trusted(row: dict[str, Any], key: str) -> bool:
    """Return whether a sampler's worst R-hat and ESS at one depth and temperature show convergence."""
    return bool(row[f"{key}_rhat"] <= RHAT and row[f"{key}_ess"] >= ESS)


def _shown(key: str, value: float) -> str:
    return f"{value:.0f}" if key.endswith("ess") else f"{value:.3f}"


def _best(record: dict[str, Any], depth: int) -> list[str]:
    """Return, by sampler, the temperature of least mean held-out nll, and the number of data sets with T = 1 best."""
    temperatures, means, ones = _of(record, depth, "temperature"), [], []
    for key in ("hmc_nll", "sgmcmc_nll"):
        values = torch.tensor(_of(record, depth, key))  # [temperatures, data sets]
        means.append(f"{temperatures[int(values.mean(1).argmin())]:g}")
        hottest = max(range(len(temperatures)), key=temperatures.__getitem__)
        ones.append(f"{int((values.argmin(0) == hottest).sum())} of {values.shape[1]} data sets")
    return means + ones


def figures(record: dict[str, Any], directory: Path) -> None:
    """Draw the paper's Figure 4 (top) and Figure 32 (bottom)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    depths = sorted({row["depth"] for row in record["rows"]})
    figure, axes = plt.subplots(2, 3, figsize=(12, 7.2), layout="constrained")
    colours = ("#4477AA", "#EE6677", "#228833")
    for axis, depth in zip(axes[0], depths, strict=False):
        temperatures = _of(record, depth, "temperature")
        for key, name, marker, colour in (
            ("hmc_nll", "HMC", "o-", "#4477AA"),
            ("sgmcmc_nll", "SG-MCMC", "s--", "#EE6677"),
        ):
            values = [sum(v) / len(v) for v in _of(record, depth, key)]
            axis.plot(temperatures, values, marker, ms=5, color=colour, label=name)
            rows = [row for row in record["rows"] if row["depth"] == depth]
            doubtful = [place for place, row in enumerate(rows) if not trusted(row, key.removesuffix("_nll"))]
            places = [temperatures[place] for place in doubtful], [values[place] for place in doubtful]
            axis.plot(*places, marker[0], ms=5, mfc="white", color=colour, label=f"{name}, not converged")
            best = min(range(len(values)), key=values.__getitem__)
            axis.plot(temperatures[best], values[best], "*", ms=16, color=colour, label=f"best T of {name}")
        axis.set(title=f"depth {depth}", xlabel="temperature T", xscale="log")
    axes[0, 0].set_ylabel("held-out cross-entropy (nats)\nmean over data sets")
    axes[0, 0].legend(frameon=False, fontsize=8)
    truth = sum(record["truth_nll"]) / len(record["truth_nll"])
    words = f"the network that made the data: {truth:.3f}"
    axes[0, 1].text(0.05, 0.05, words, transform=axes[0, 1].transAxes, fontsize=8)
    panels = (
        ("_rhat", "largest R-hat", RHAT, "HMC", "SG-MCMC"),
        ("_ess", "smallest ESS of all chains", ESS, "HMC", "SG-MCMC"),
        ("kl", "symmetrised KL of predictives (nats)", None, "SG-MCMC and HMC", "halves of HMC's chains"),
    )
    for axis, (key, label, line, solid, dashed) in zip(axes[1], panels, strict=True):
        for depth, colour in zip(depths, colours, strict=False):
            names = ("kl", "kl_hmc") if key == "kl" else (f"hmc{key}", f"sgmcmc{key}")
            for name, style in zip(names, ("o-", "s--"), strict=True):
                values = [sum(v) / len(v) if isinstance(v, list) else v for v in _of(record, depth, name)]
                temperatures = _of(record, depth, "temperature")
                axis.plot(temperatures, values, style, ms=4, color=colour)
        if line is not None:
            axis.axhline(line, color="0.5", lw=1, ls=":")
        axis.set(xlabel="temperature T", ylabel=label, xscale="log", yscale="linear" if key == "_rhat" else "log")
        axis.set_title(f"solid: {solid}; dashed: {dashed}", fontsize=8)
    # colours and the dotted line mean the same in all three panels: one legend is enough, where there is room
    for depth, colour in zip(depths, colours, strict=False):
        axes[1, 0].plot([], [], color=colour, label=f"depth {depth}")
    axes[1, 0].plot([], [], color="0.5", lw=1, ls=":", label="limits of convergence")
    axes[1, 0].legend(frameon=False, fontsize=8)
    figure.savefig(directory / f"{NAME}.png", dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    (arguments,) = parse_arguments(Arguments)
    torch.set_num_threads(1)
    keep(NAME, lambda: experiment(arguments))
