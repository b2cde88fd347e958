from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from hf_bayes.diagnostics.temperatures import share_within_interval
from hf_bayes.diagnostics.verdict import Diagnostics
from tests.diagnostics.good_run import GOOD


def test_a_good_run_has_converged() -> None:
    assert GOOD.verdict == "converged"
    assert GOOD.converged
    assert Diagnostics(dim=3, distance=[0.1, 0.1], rhat=1.0, ess=100.0).verdict == "converged"


def test_a_single_chain_is_not_called_converged_by_its_halves() -> None:
    alone = Diagnostics(dim=3, distance=[0.1], rhat=1.0, ess=100.0, num_values=100)
    assert alone.verdict.startswith("convergence not known: the chain's halves agree (R-hat 1.00), but one chain")
    assert alone.converged is None
    moving = dataclasses.replace(alone, rhat=1.4)
    assert moving.verdict == "R-hat 1.40 between the halves of the chain: longer burn-in"
    assert moving.converged is False
    few = dataclasses.replace(alone, rhat=1.4, num_values=8)
    assert few.verdict.startswith("convergence not known: R-hat 1.40 is within chance for 8 values of each of 1 chain")
    short = dataclasses.replace(alone, ess=20.0)
    assert short.verdict.endswith("ESS 20, 100 needed: more draws, or further apart")
    assert short.converged is False


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"distance": [1e-6] * 4}, "the chains did not move (1e-06 prior std): raise the learning rate or temperature"),
        ({"distance": [0.1, 1e-6, 0.1, 0.0]}, "chains 1, 3 did not move (1e-06 prior std)"),
        ({"distance": [0.1, math.nan, 0.1, 0.2]}, "chain 1 not finite: lower the learning rate"),
        ({"rhat": 1.3}, "R-hat 1.30 over 4 chains: longer burn-in"),
        ({"rhat": None}, "convergence not measured: no R-hat"),
        ({"rhat": math.nan}, "convergence not known: R-hat needs at least 2 chains of 4 draws that vary"),
        ({"rhat": math.inf}, "R-hat inf over 4 chains: every chain is constant, at a different place"),
        (
            {"capped": [0.0, 0.4, 0.0, 0.0]},
            "40% of the coordinates are at the cap of the proposal's standard deviation",
        ),
        ({"ess": 20.0}, "ESS 20, 100 needed"),
        ({"kinetic_temperature": [1.0, 5.0, 1.1, 1.0]}, "kinetic temperature 5 where 1.05 is expected (1 of 4 chains)"),
        ({"kinetic_temperature": [0.2, 1.0, 1.1, 1.0]}, "kinetic temperature 0.2 where 1.05 is expected"),
        ({"divergences": [0, 10, 0, 0]}, "10 divergent moves (0.2% of moves): smaller step size"),
        ({"acceptance": [0.01] * 4}, "acceptance 0.01: longer burn-in, or a smaller step size"),
        ({"acceptance": [0.8, 0.0, 0.8, 0.8]}, "chain 1 accepted no proposal: a smaller step size, or longer burn-in"),
        ({"acceptance": [0.0] * 4}, "the chains accepted no proposal: a smaller step size"),
        (
            {"beyond_series": [0.0, 0.2, 0.0, 0.0]},
            "in 20% of the moves the minibatch noise was too large to be",
        ),
        ({"noise_ratio": [3.0, 0.25, 3.0, 3.0]}, "the noise of minibatches is 4 times the sampler's own: larger batch"),
        ({"unmoved": [0.0, 0.3, 0.0, 0.0]}, "rounding took the first update of 30% of the weights: raise the learning"),
        (
            {"kinetic_share": [0.05] * 4, "num_tensors": 20},
            "the kinetic temperature of 76 of 80 tensors is not the expected one, 0.8 by chance: larger batch",
        ),
        (
            {"temperature": 1.0, "configurational_temperature": [20.0, 18.0, 22.0, 20.0]},
            "configurational temperature 20 where 1 is expected: the positions are far from their law",
        ),
        (
            {"temperature": 1.0, "configurational_temperature": [0.1] * 4},
            "configurational temperature 0.1 where 1 is expected: the positions are on their way",
        ),
        ({"rhat_terms": 1.3}, "R-hat 1.30 of single terms over 4 chains: longer burn-in"),
        ({"rhat_terms": 1.3, "rhat_logits": 1.6}, "R-hat 1.60 of logits over 4 chains: longer burn-in"),
        ({"rhat_terms": 1.3, "rhat_logits": 1.2}, "R-hat 1.30 of single terms over 4 chains: longer burn-in"),
        (
            {"rhat_logits": 1.3, "num_values": 4},
            "convergence not known: R-hat 1.30 of logits is within chance for 4 values of each",
        ),
        ({"ess_logits": 15.0}, "ESS 15, 100 needed"),
        ({"rhat": 1.3, "num_values": 100}, "R-hat 1.30 over 4 chains: longer burn-in"),
        (
            {"rhat": 1.3, "num_values": 4},
            "convergence not known: R-hat 1.30 is within chance for 4 values of each",
        ),
        ({"ess": 30.0, "num_values": 10}, "convergence not known: 40 values cannot have an ESS of 100: more draws"),
        ({"ess": 15.0, "num_values": 10}, "ESS 15, 100 needed"),
        ({"ess_terms": 15.0}, "ESS 15, 100 needed"),
        ({"acceptance": [0.999] * 4}, "acceptance 0.999: longer burn-in, or a larger step size"),
    ],
)
def test_the_verdict_says_what_is_wrong(change: dict[str, object], verdict: str) -> None:
    assert dataclasses.replace(GOOD, **change).verdict.startswith(verdict)


def test_all_complaints_are_told_the_gravest_first() -> None:
    verdict = dataclasses.replace(GOOD, distance=[0.0] * 4, rhat=2.0, ess=5.0).verdict
    assert [part.split()[0] for part in verdict.split("; ")] == ["the", "R-hat", "ESS"]


@pytest.mark.parametrize("change", [{"rhat": math.inf}, {"distance": [0.0] * 4, "rhat": 2.0}])
def test_chains_that_stand_still_are_not_told_to_burn_in_longer(change: dict[str, object]) -> None:
    verdict = dataclasses.replace(GOOD, **change).verdict
    assert f"R-hat {change['rhat']:.2f} over 4 chains" in verdict
    assert "burn-in" not in verdict


def test_a_run_where_nothing_fits_has_not_converged() -> None:
    """Check a run whose mean over tensors is right while the tensors are wrong."""
    found = Diagnostics(
        dim=10**6,
        distance=[0.3] * 4,
        kinetic_temperature=[1.05] * 4,
        kinetic_temperature_law=1.05,
        kinetic_share=[0.05] * 4,
        configurational_temperature=[20.0] * 4,
        temperature=1.0,
        rhat=1.0,
        ess=1000.0,
    ).verdict
    assert [part.split(" temperature")[0] for part in found.split("; ")] == ["the kinetic", "configurational"]


def test_tensors_of_wrong_temperature_count_beyond_a_tolerance() -> None:
    sizes, law = (10, 1_000_000), torch.tensor([2.0])
    for relative, share in (([0.9, 1.05], 1.0), ([0.9, 1.2], 0.5), ([5.0, 1.05], 0.5)):
        temperatures = 2 * torch.tensor([relative])
        assert share_within_interval(temperatures, sizes, law, tolerance=0.1).tolist() == [share]
    assert share_within_interval(2 * torch.tensor([[0.9, 1.05]]), sizes, law).tolist() == [0.5]


def test_summary_is_strict_json() -> None:
    summary = dataclasses.replace(GOOD, rhat=math.inf, distance=[0.1, math.nan, 0.1, 0.1]).summary()
    restored = json.loads(json.dumps(summary, allow_nan=False))
    assert restored == summary
    assert restored["rhat"] is None
    assert restored["distance"] == [0.1, None, 0.1, 0.1]
    assert restored["num_chains"] == 4
    assert restored["verdict"].startswith("chain 1 not finite")


def test_a_spread_that_is_wrong_is_named_with_its_side() -> None:
    right = dataclasses.replace(GOOD, temperature=1.0, informed_spread=1.1, informed_spread_std_error=0.03)
    assert right.verdict == "converged"
    wide, narrow = (dataclasses.replace(right, informed_spread=value) for value in (1.4, 0.6))
    assert wide.verdict.startswith("the draws are too wide where the data outweigh the prior")
    assert "epistemic uncertainty is too small by about as much" in narrow.verdict
    # twice the standard error explains it
    assert dataclasses.replace(wide, informed_spread_std_error=0.2).verdict == "converged"
    assert dataclasses.replace(wide, temperature=1.4).verdict == "converged"


def test_too_few_draws_of_the_right_spread_have_the_right_size() -> None:
    few = dataclasses.replace(GOOD, ess=40.0, temperature=0.5, informed_spread=0.52, informed_spread_std_error=0.02)
    assert few.converged is False
    assert few.epistemic_size == "right"
    assert few.verdict.startswith("ESS 40, 100 needed")
    assert ". The size of epistemic uncertainty is right nevertheless (configurational temperature 0.52" in few.verdict
    assert few.summary()["epistemic_size"] == "right"
    # the twin: the same few draws, too wide for T = 0.5, or of a spread that was not measured well enough
    wide = dataclasses.replace(few, informed_spread=1.0)
    assert wide.epistemic_size == "too large"
    vague = dataclasses.replace(few, informed_spread_std_error=0.1)
    assert vague.epistemic_size is None
    assert not any("nevertheless" in other.verdict for other in (wide, vague))
    assert dataclasses.replace(few, kind="optimum").epistemic_size is None


def test_an_unmeasured_run_stays_unknown_with_the_right_spread() -> None:
    unknown = dataclasses.replace(GOOD, rhat=None, temperature=1.0, informed_spread=1.0, informed_spread_std_error=0.02)
    assert unknown.verdict.startswith("convergence not measured: no R-hat. The size of epistemic")
    assert unknown.converged is None


def test_a_gaussian_is_judged_by_its_spread_alone() -> None:
    gaussian = Diagnostics(dim=9, distance=[0.3], kind="gaussian", informed_spread=1.05, informed_spread_std_error=0.05)
    assert gaussian.verdict == "converged"
    assert dataclasses.replace(gaussian, informed_spread=1.9).converged is False
    vague = dataclasses.replace(gaussian, informed_spread_std_error=0.5)
    assert vague.verdict == "convergence not measured: the Gaussian was not compared with the posterior"
    assert vague.converged is None


def test_a_gaussian_of_a_wrong_width_has_its_methods_remedy() -> None:
    wide = Diagnostics(dim=9, distance=[0.3], kind="gaussian", informed_spread=1.9, informed_spread_std_error=0.05)
    assert wide.verdict.endswith("by about as much; a sampler, or the curvature at a mode (docs/laplace.md)")
    advised = dataclasses.replace(wide, spread_advice="structure='full'")
    assert advised.verdict.endswith("by about as much; a sampler, or structure='full'")
    assert "spread_advice" not in advised.summary()


def test_a_gaussian_whose_uncertainty_drifts_is_not_called_right() -> None:
    gaussian = Diagnostics(dim=9, distance=[0.3], kind="gaussian", informed_spread=1.01, informed_spread_std_error=0.04)
    for drift, size in ((0.79, "too large"), (0.85, "right"), (1.19, "right"), (1.3, "too small"), (None, "right")):
        found = dataclasses.replace(gaussian, epistemic_drift=drift)
        assert found.epistemic_size == size
        assert found.converged is (size == "right")
    large = dataclasses.replace(gaussian, epistemic_drift=0.79)
    assert large.verdict.startswith("epistemic uncertainty is too large: it changes by a factor of 0.79 on training")
    # the spread is said first, and once
    assert "changes by a factor" not in dataclasses.replace(large, informed_spread=1.9).verdict


def test_a_temperature_chosen_by_predictions_asks_for_no_draws() -> None:
    chosen = dataclasses.replace(GOOD, rhat=3.0, chosen_temperature=0.3)
    assert chosen.converged is None
    assert chosen.verdict == (
        "convergence not asked for: held-out rows chose T = 0.3 because it predicts best, and not for draws of a "
        "posterior. Checks of such draws that failed: R-hat 3.00 over 4 chains: longer burn-in"
    )
    given = dataclasses.replace(chosen, chosen_temperature=None)
    assert given.converged is False
    assert given.verdict == "R-hat 3.00 over 4 chains: longer burn-in"
    for lost in ({"distance": [math.inf, 0.2, 0.3, 0.4]}, {"prior_loss_ratio": [1e3] * 4}):  # no place to predict from
        assert dataclasses.replace(chosen, **lost).converged is False
    assert dataclasses.replace(GOOD, chosen_temperature=0.3).verdict == "converged"


def test_members_of_an_optimiser_are_called_no_draws() -> None:
    members = dataclasses.replace(GOOD, kind="optimum", informed_spread=1.0, informed_spread_std_error=0.01)
    assert members.verdict.startswith("convergence not defined: members of an optimiser are no draws")
    assert members.converged is None


def test_many_short_chains_with_the_right_spread_agree() -> None:
    """R-hat^2 = 1 + 2 K / ESS: 1.09 of 16 chains is an ESS of 170, and 1.3 one of 46."""
    short = dataclasses.replace(
        Diagnostics(dim=9, distance=[0.3] * 16, rhat=1.09, ess=170.0, num_values=100),
        temperature=1.0, informed_spread=1.0, informed_spread_std_error=0.03,
    )  # fmt: skip
    assert short.verdict == "converged"
    assert dataclasses.replace(short, informed_spread=None).verdict.startswith("R-hat 1.09 over 16 chains")
    assert dataclasses.replace(short, rhat=1.3).verdict.startswith("R-hat 1.30 over 16 chains")
    # of mirrored chains pairs count: 1.11 of 16 chains, of which 8 are independent, is above 1.10
    mirrored = dataclasses.replace(short, rhat=1.11, mirrored=True)
    assert mirrored.verdict.startswith("R-hat 1.11 over 16 chains")
    assert dataclasses.replace(mirrored, mirrored=False).verdict == "converged"
