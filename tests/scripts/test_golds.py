"""The exact references of last layers and of a LoRA, and the distance of a method to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes import LaplaceConfig, SGHMCConfig
from scripts.reproduce import gold_chains, gold_lora, golds
from scripts.reproduce.gold_chains import Gold, gold_of_logits, make_gold, variation
from scripts.reproduce.gold_lora import Energy, LoraTarget
from scripts.reproduce.gold_runs import Row, begin, distance, least_variation, measured
from scripts.reproduce.gold_targets import RECIPES, Recipe, Target


def small_target() -> Target:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    features = torch.nn.functional.normalize(torch.randn(80, 4, generator=rng), dim=1)
    features[:60, 0] += 0.5 * labels
    return Target(features[:60], labels, features[60:])


def small_lora() -> LoraTarget:
    torch.manual_seed(0)
    base = gold_lora.BertForSequenceClassification(gold_lora.config(20, 3)).state_dict()
    encoder = {name: weight for name, weight in base.items() if name.startswith("bert.")}
    tokens = torch.randint(1, 20, (12, gold_lora.MAX_TOKENS)) * (torch.rand(12, gold_lora.MAX_TOKENS) < 0.8)
    tokens[:, 0].clamp_(min=1)  # a text begins with a token: padding there would be moved behind it
    return LoraTarget(encoder, tokens[:8], torch.arange(8) % 3, tokens[8:])


def logits_of_chains(spread: float = 0.0) -> Tensor:
    """[M, S, B, C] independent normal logits; the chains' means are ``spread`` apart."""
    rng = torch.Generator().manual_seed(1)
    noise = torch.randn(8, 250, 5, 3, generator=rng)
    return noise + spread * torch.randn(8, 1, 5, 3, generator=rng)


def test_the_sampling_error_of_draws_is_predicted() -> None:
    logits = logits_of_chains()
    gold = gold_of_logits("x", logits, {})
    rng = torch.Generator().manual_seed(2)
    found = [variation(torch.randn(50, 5, 3, generator=rng).softmax(-1).mean(0), gold.probs) for _ in range(200)]
    # TV of a set of 50 has a relative standard deviation of about .3: 2 % for 200 sets
    assert sum(found) / 200 == pytest.approx(least_variation(gold, 50), rel=0.08)
    assert sum(found) / 200 != pytest.approx(2 * least_variation(gold, 100), rel=0.08)  # sqrt(2) too large


def test_a_gold_has_no_distance_to_its_own_draws() -> None:
    logits = logits_of_chains()
    gold = gold_of_logits("x", logits, {"chains": 8})
    assert distance(logits.flatten(0, 1).double(), gold) == {"tv": pytest.approx(0, abs=1e-5), "eu": pytest.approx(1)}
    assert gold.about["chains"] == "8"


def test_chains_that_disagree_are_no_gold() -> None:
    with pytest.raises(ValueError, match=r"x: R-hat .* where 1.01 is allowed"):
        gold_of_logits("x", logits_of_chains(spread=0.5), {})


def test_a_full_laplace_of_a_small_target_is_near_its_gold(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = small_target()
    monkeypatch.setattr(gold_chains, "target", lambda name: rows)
    monkeypatch.setattr(gold_chains, "MAX_RHAT", 1.05)  # 300 draws a chain
    monkeypatch.setitem(RECIPES, "small", Recipe("", 3, 60, 2, 300))
    gold = make_gold("small", num_chains=8, burn_in=100)
    assert gold.about["rows"] == rows.digest()
    found = measured(rows, gold, Row(lambda draws: LaplaceConfig(num_chains=1, structure="full"), 200, batch=16))
    # sampling and the shape of the posterior; with the classes in another order TV is above .1
    assert found["tv"] < 0.04
    assert found["eu"] == pytest.approx(1, abs=0.3)
    turned = gold._replace(probs=gold.probs.roll(1, 1))
    assert distance(rows.member_logits(torch.zeros(1, 15)).double(), turned)["tv"] > 0.1


def test_a_run_counts_its_passes_and_the_draws_of_its_chains() -> None:
    rows = small_target()
    gold = Gold(torch.full((20, 3), 1 / 3), torch.ones(20), {})
    row = Row(lambda draws: SGHMCConfig(num_chains=2, draws_per_chain=draws), 200, 1.0, 1.75, batch=16)
    found = measured(rows, gold, row)
    assert found["members"] == 2 * (found["members"] // 2) > 8
    assert 130 < found["passes"] < 260  # 1 to 2 gradients an update, range test and curvature passes beside
    assert found["rhat"] > 0.99
    # a budget of everything: the two passes of a chain over 60 rows take 2 / (1.75 * 16 / 60) = 4 updates
    whole, rest = (num_updates(rows, row._replace(beside=beside)) for beside in (0, 2))
    assert whole - rest in (4, 5)


def num_updates(rows: Target, row: Row) -> int:
    """Return the number of updates of a run."""
    return begin(rows, row)[0].run.problem.num_steps


def test_the_energy_of_a_lora_is_that_of_the_member_axis() -> None:
    """The gold writes the model out; a wrong order of columns, or a part left out, would give another energy."""
    rows = small_lora()
    energy = Energy.of(rows)
    z = torch.randn(3, energy.logits.layout.dim, generator=torch.Generator().manual_seed(0))
    theta = z * energy.prior.std
    with rows.attached(3) as model, torch.no_grad():
        assert model.layout == energy.logits.layout
        model.theta.copy_(theta)
        logits = model.member_logits(gold_lora.inputs_of(rows.tokens)).double()
    terms = torch.nn.functional.cross_entropy(
        logits.permute(1, 2, 0), rows.labels[:, None].expand(-1, 3), reduction="none"
    )
    expected = terms.sum(0) + z.double().square().sum(1) / 2
    assert energy(z).tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_every_gold_has_its_rows_in_the_table() -> None:
    names = {path.stem for path in gold_chains.GOLDS.glob("*.safetensors")}
    assert names <= {*RECIPES, gold_lora.NAME}
    for name in names:
        gold = gold_chains.load(name)
        assert float(gold.about["rhat"]) <= gold_chains.MAX_RHAT
        assert gold.probs.sum(1).tolist() == pytest.approx([1.0] * len(gold.probs), abs=1e-5)
    assert {"SGHMC, 16 chains, 1000 passes in all", "Laplace, full"} < golds.ROWS.keys()
