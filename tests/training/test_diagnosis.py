"""The probe, what is stored of it, and the command that shows it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console
from torch import Tensor
from transformers import default_data_collator

from hf_bayes import (
    AGPSConfig,
    EnsembleConfig,
    HMCConfig,
    MAPConfig,
    MCDropoutConfig,
    MeanFieldConfig,
    PenaltyConfig,
    SGHMCConfig,
    SnapshotConfig,
    SWAGConfig,
)
from hf_bayes.cli.diagnose import main
from hf_bayes.cli.diagnosis_figure import plot
from hf_bayes.cli.diagnosis_table import table
from hf_bayes.diagnostics.convergence import ess, rhat
from hf_bayes.diagnostics.temperatures import share_within_interval
from hf_bayes.distributions.approximations import Draws
from hf_bayes.objectives.model_objective import ModelObjective, Pass
from hf_bayes.objectives.probe import PROBE_TERMS
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training import evaluation
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.announcement import announce, rows_vary
from hf_bayes.training.compat import TrainerHost
from hf_bayes.training.trace import thinned
from tests import runs
from tests.runs import token_rows
from tests.tiny_models import tiny_bert, tiny_llama, with_lora

ONE_DRAW = SGHMCConfig(num_chains=3, prior_std=0.3)
CONFIG = SGHMCConfig(num_chains=3, draws_per_chain=3, prior_std=0.3)


def run(directory: Path, method: Any = CONFIG, **changes: Any) -> Any:
    fields: dict[str, Any] = {"max_steps": 24, "probe_steps": 2, "logging_steps": 3}
    trainer = runs.trainer(directory, method, **(fields | changes))
    trainer.train()
    return trainer


def direct(rows: list[dict[str, Any]], theta: Tensor) -> Tensor:
    """[M, n]: log-probabilities of the labels, each member as a plain peft model."""
    labels = torch.tensor([row["input_ids"] for row in rows])[:, 1:, None]
    return torch.stack([found.gather(2, labels).flatten() for found in all_words(rows, theta)]).double()


def all_words(rows: list[dict[str, Any]], theta: Tensor) -> list[Tensor]:
    """[rows, T, V] log-probabilities of each member as a plain peft model."""
    found = []
    model = with_lora(tiny_llama())
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = dict(model.named_parameters())
    for row in theta:
        begin = 0
        for name in names:
            size = parameters[name].numel()
            parameters[name].data = row[begin : begin + size].view(parameters[name].shape)
            begin += size
        ids = torch.tensor([row["input_ids"] for row in rows])
        found.append(model(input_ids=ids).logits[:, :-1].log_softmax(-1).detach())
    return found


def test_the_probe_holds_log_probabilities_of_the_first_rows(tmp_path: Path) -> None:
    trainer = run(tmp_path, ONE_DRAW, max_steps=1, probe_steps=900, train=token_rows(40))
    theta = trainer.run.state.theta
    found = trainer.monitor.probe(theta)
    assert [len(batch["input_ids"]) for batch in trainer.monitor.probe.batches] == [3] * 12  # those of evaluation
    # 900 updates of 2 rows allow for 36 rows of 7 terms
    torch.testing.assert_close(found.log_lik, direct(token_rows(40)[:36], theta), rtol=1e-4, atol=1e-4)


def test_a_probe_of_many_terms_stops_at_256(tmp_path: Path) -> None:
    trainer = run(tmp_path, ONE_DRAW, max_steps=1, probe_steps=100, train=token_rows(10, length=100))
    assert trainer.monitor.probe(trainer.run.state.theta).log_lik.shape == (3, 256)
    assert sum(len(batch["input_ids"]) for batch in trainer.monitor.probe.batches) == 3  # of 99 terms


def test_the_probe_takes_words_that_were_likely_at_the_start(tmp_path: Path) -> None:
    trainer = run(tmp_path, ONE_DRAW, learning_rate=0.3, train=token_rows(10))
    theta = trainer.run.state.theta
    look = trainer.monitor.probe(theta)
    (start,) = all_words(token_rows(10), trainer.setup.start[None])
    labels = torch.tensor([row["input_ids"] for row in token_rows(10)])[:, 1:, None]
    words = start.scatter(2, labels, -1.0e9).topk(4).indices  # beside the label, whose log p is known
    expected = torch.stack([found.gather(2, words).flatten() for found in all_words(token_rows(10), theta)])
    assert look.logits.dtype == torch.float32
    torch.testing.assert_close(look.logits, expected, rtol=1e-4, atol=1e-4)
    other = all_words(token_rows(10), theta)[0].scatter(2, labels, -1.0e9).topk(4).indices
    assert not torch.equal(words, other)  # the chain's own favourites are others by now
    assert torch.equal(look.logits, trainer.monitor.probe_logits[-1])  # of the last update


def test_of_few_classes_all_logits_are_looked_at_less_their_mean(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"model": tiny_bert(), "subspace": "last_layer", "train": runs.label_rows(10)}
    trainer = run(tmp_path, ONE_DRAW, max_steps=2, **fields)
    trainer.bayesian.show(None)
    theta = trainer.run.state.theta
    (batch, *_) = trainer.monitor.probe.batches
    logits = torch.stack([_member(trainer.bayesian, row, batch) for row in theta])
    expected = (logits - logits.mean(-1, keepdim=True)).flatten(1)
    torch.testing.assert_close(
        trainer.monitor.probe(theta).logits[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-5
    )
    found = trainer.monitor.probe(theta + 0).logits.unflatten(1, (-1, 3))
    assert found.sum(2).abs().max() < 1e-5  # a softmax does not see what is added to all of them


def test_the_probe_takes_four_of_many_classes_for_any_head(tmp_path: Path) -> None:
    def columns(folder: str, seed: int) -> Tensor:
        torch.manual_seed(seed)
        model = tiny_bert(num_labels=12)
        torch.nn.init.normal_(model.classifier.weight, std=5.0)
        fields = {"model": model, "subspace": "last_layer", "train": runs.label_rows(10)}
        trainer = run(tmp_path / folder, ONE_DRAW, max_steps=2, **fields)
        trainer.monitor.probe(trainer.run.state.theta)
        assert trainer.monitor.probe.columns is not None
        return trainer.monitor.probe.columns

    found = columns("one", 1)
    assert found.shape == (10, 4)
    labels = torch.tensor([row["label"] for row in runs.label_rows(10)])
    assert not bool((found == labels[:, None]).any())  # whose log p is known
    assert all(len(set(row)) == 4 for row in found.tolist())
    assert torch.equal(found, columns("two", 2))  # as for a resumed run, whose head is drawn anew


def _member(model: Any, theta: Tensor, batch: dict[str, Tensor]) -> Tensor:
    model.show(theta[None])
    try:
        with torch.no_grad():
            return model.member_logits({name: value for name, value in batch.items() if name != "labels"})[0]
    finally:
        model.show(None)


def test_of_a_regression_the_predicted_means_are_looked_at(tmp_path: Path) -> None:
    rows = [{**row, "label": float(row["label"])} for row in runs.label_rows(10)]
    model = tiny_bert(num_labels=1, problem_type="regression")
    trainer = run(tmp_path, ONE_DRAW, max_steps=2, noise_std=0.5, model=model, subspace="last_layer", train=rows)
    theta = trainer.run.state.theta
    expected = [_member(trainer.bayesian, theta[0], batch)[:, 0] for batch in trainer.monitor.probe.batches]
    torch.testing.assert_close(trainer.monitor.probe(theta).logits[0], torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_logits_reveal_chains_that_differ_in_wrong_classes_only(tmp_path: Path) -> None:
    """Planted draws: log p of the label is of one law, how the rest is shared among the others each chain's own."""
    rows = [{**row, "label": 0} for row in runs.label_rows(10)]
    config = SGHMCConfig(num_chains=4, prior_std=1.0, draws_per_chain=1)
    trainer = run(tmp_path, config, model=tiny_bert(), subspace="last_layer", train=rows, max_steps=1)
    for apart in (True, False):
        draws = torch.zeros(4, 100, trainer.bayesian.layout.dim)
        generator = torch.Generator().manual_seed(0)
        label, share = (torch.rand(4, 100, generator=generator) * 0.1 for _ in range(2))
        share += 0.2 * torch.arange(1, 5)[:, None] if apart else 0.5
        probs = torch.stack([0.5 + label, (0.5 - label) * share, (0.5 - label) * (1 - share)], 2)
        draws[..., -3:] = probs.log()  # biases, beside weights of 0
        trainer.run.draws = list(draws.unbind(1))
        found, trace = trainer.diagnosis.summary()
        assert found["values"] == "draws"
        assert max(found["rhat"], found["rhat_terms"]) < 1.05
        assert min(found["ess"], found["ess_terms"]) > 200
        assert (found["num_terms"], found["num_logits"]) == (10, 30)
        assert (found["rhat_logits"] > 1.5) == apart
        assert (f"R-hat {found['rhat_logits']:.2f} of logits over 4 chains" in found["verdict"]) == apart
        assert ("R-hat" in found["verdict"]) == apart
        assert len(trace["logits"]["rhat"]) == 30


def test_logs_tell_rhat_of_the_looks_so_far(tmp_path: Path) -> None:
    trainer = run(tmp_path, ONE_DRAW)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries if "probe_rhat" in entry] == [21, 24]  # looks at 14, 16, 18, 20
    looks = torch.stack(trainer.monitor.probes[6:], 1).sum(2, keepdim=True)
    for entry, count in zip(entries[-2:], (4, 6), strict=True):
        assert entry["probe_rhat"] == pytest.approx(float(rhat(looks[:, :count])))
        assert entry["probe_ess"] == pytest.approx(float(ess(looks[:, :count])))
    assert entries[-1]["probe_rhat"] == pytest.approx(trainer.posterior.config.diagnostics["rhat"])
    assert trainer.posterior.trace["convergence"]["step"] == [21, 24]


@pytest.mark.filterwarnings("ignore:sghmc at temperature 0")
@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(ONE_DRAW, temperature=0.0),
        dataclasses.replace(CONFIG, schedule={"name": "cyclical"}),
        MeanFieldConfig(num_chains=2),
    ],
)
def test_looks_that_stand_for_no_draws_have_no_rhat_in_the_logs(tmp_path: Path, config: Any) -> None:
    trainer = run(tmp_path, config, probe_steps=1)
    assert not any("probe_rhat" in entry for entry in trainer.state.log_history)
    assert trainer.posterior.trace["convergence"] == {}


@pytest.mark.parametrize("config", [MeanFieldConfig(num_chains=1), SWAGConfig(rank=2), ONE_DRAW])
def test_methods_that_end_in_states_of_their_chains_say_so(tmp_path: Path, config: Any) -> None:
    approximation = run(tmp_path, config).posterior.approximation
    assert isinstance(approximation, Draws) == config.requirements.draws_are_chain_states


def test_looking_does_not_change_the_chains(tmp_path: Path) -> None:
    draws = []
    for probe_steps in (0, 1):
        model = with_lora(tiny_llama(), lora_dropout=0.3)
        trainer = run(tmp_path, max_steps=6, probe_steps=probe_steps, model=model)
        assert len(trainer.monitor.probes) == 6 * probe_steps
        draws.append(trainer.posterior.approximation.theta)
    assert torch.equal(*draws)


def test_rhat_and_ess_are_those_of_the_looks_after_burn_in(tmp_path: Path) -> None:
    trainer = run(tmp_path)
    found = trainer.posterior.config.diagnostics
    looks = torch.stack(trainer.monitor.probes[6:], 1)  # burn-in: 12 of 24 updates
    assert looks.shape == (3, 6, 70)  # ten rows: all there are, and fewer than the least
    total = looks.sum(2, keepdim=True)
    assert found["rhat"] == pytest.approx(float(rhat(total)))
    assert found["ess"] == pytest.approx(float(ess(total)))
    assert found["rhat_terms"] == pytest.approx(float(rhat(looks).sort().values[66]))  # 95 % of 70
    assert (found["num_values"], found["values"], found["num_terms"]) == (6, "looks while training", 70)


def test_draws_are_preferred_and_optimisers_get_no_rhat(tmp_path: Path) -> None:
    found = run(tmp_path, dataclasses.replace(CONFIG, draws_per_chain=4)).posterior.config.diagnostics
    assert (found["num_values"], found["values"]) == (4, "draws")
    for config in (
        EnsembleConfig(num_chains=3),
        dataclasses.replace(CONFIG, schedule={"name": "cyclical"}),
    ):
        found = run(tmp_path, config, max_steps=12, probe_steps=1).posterior.config.diagnostics
        assert found["rhat"] is None
        assert "R-hat" not in found["verdict"].replace("no R-hat", "")


@pytest.mark.filterwarnings("ignore:sghmc at temperature 0")
@pytest.mark.parametrize(
    "config", [dataclasses.replace(CONFIG, temperature=0.0, draws_per_chain=4), SnapshotConfig(num_chains=2)]
)
def test_at_temperature_zero_nothing_is_held_against_a_law(tmp_path: Path, config: Any) -> None:
    found = run(tmp_path, config, gradient_accumulation_steps=2).posterior.config.diagnostics
    assert found["verdict"] == "convergence not measured: no R-hat"
    assert found["converged"] is None


def test_distance_in_noise_is_one_for_free_langevin_noise(tmp_path: Path) -> None:
    """So little data that the gradient is nothing, a wide prior, and no momentum: theta diffuses by 2 T l / N."""
    config = SGHMCConfig(num_chains=3, momentum=0.0, prior_std=1e3, temperature=1e4)
    trainer = run(tmp_path, config, learning_rate=1e-4, num_data=1e-3, max_steps=20)
    found = trainer.posterior.config.diagnostics
    assert found["distance_in_noise"] == pytest.approx([1.0] * 3, abs=4 / (2 * 384) ** 0.5)  # chi over 384 coordinates
    assert found["unmoved"] == [0.0] * 3


def test_a_warm_start_does_not_hide_chains_that_stand_still(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, warm_start_steps=6, warm_start_learning_rate=1e-2)
    found = run(tmp_path, config, learning_rate=1e-10).posterior.config.diagnostics
    assert found["verdict"].startswith("the chains did not move")
    assert max(found["distance_in_noise"]) < 10  # in the momentum they begin with, not in AdamW's steps: 5000


def test_updates_without_movement_do_not_count_as_noise(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, preconditioner="layerwise", preconditioner_batches=2)
    trainer = run(tmp_path, config, gradient_accumulation_steps=2)
    moved = 24 - 6 * 2  # six cycles of four updates, two of them an estimate
    assert trainer.monitor.totals["rates"].tolist() == pytest.approx([moved * 1e-2] * 3)
    assert trainer.monitor.sums["noise_ratio"][:, 1].tolist() == [moved / 2] * 3  # after burn-in


@pytest.mark.parametrize(
    ("rows", "accumulation", "wanted", "measured"),
    [(2, 1, None, True), (1, 2, None, True), (1, 1, None, False), (2, 1, False, False), (1, 2, False, False)],
)
def test_minibatch_noise_is_reported_for_two_or_more_rows(
    tmp_path: Path, rows: int, accumulation: int, wanted: bool | None, measured: bool
) -> None:
    fields = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    config = dataclasses.replace(CONFIG, measure_gradient_noise=wanted)
    trainer = run(tmp_path, config, max_steps=6, logging_steps=6, **fields)
    posterior = trainer.posterior
    assert (posterior.config.diagnostics["noise_ratio"] is not None) == measured
    assert ("noise_ratio/chain_2" in trainer.state.log_history[0]) == measured
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(posterior.config.to_dict()))
    assert ("takes 2 rows an update" in capture.get()) != measured


def test_the_noise_of_updates_is_averaged_and_not_its_reciprocal(tmp_path: Path) -> None:
    trainer = run(tmp_path, max_steps=12, logging_steps=1, gradient_accumulation_steps=2)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > 6]
    for chain, found in enumerate(trainer.posterior.config.diagnostics["noise_ratio"]):
        inverses = [1 / entry[f"noise_ratio/chain_{chain}"] for entry in entries]
        assert len(inverses) == 6
        assert 1 / found == pytest.approx(sum(inverses) / 6)


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_measuring_noise_by_halves_does_not_change_the_chains(tmp_path: Path, minibatch: str, dropout: float) -> None:
    """Nor what is drawn beside them: the collator draws from torch's own generator."""
    draws, drawn = [], []
    for wanted in (None, False):
        seen: list[float] = []

        def collate(rows: list[Any], seen: list[float] = seen) -> Any:
            seen.append(float(torch.rand(())))
            return default_data_collator(rows)

        config = dataclasses.replace(CONFIG, measure_gradient_noise=wanted, burn_in=2)
        model = with_lora(tiny_llama(), lora_dropout=dropout)
        trainer = run(tmp_path, config, max_steps=6, model=model, minibatch=minibatch, collator=collate)
        assert ("noise_ratio" in trainer.monitor.noise_info) == (wanted is None)
        draws.append(trainer.posterior.approximation.theta)
        drawn.append(seen)
    assert torch.equal(*draws)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
@pytest.mark.parametrize(("subspace", "dropout"), [("trainable", 0.0), ("last_block", 0.0), ("trainable", 0.3)])
def test_halves_of_a_micro_batch_add_up_to_its_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minibatch: str, subspace: str, dropout: float
) -> None:
    """Rows of many lengths, an odd number of them, chains in passes of two."""
    seen: list[tuple[int, Pass, Any]] = []
    passes = ModelObjective.passes

    def watch(self: ModelObjective, theta: Any, batch: Any, **options: Any) -> Iterator[Pass]:
        groups = 1 if self.shared else len(self.chains)
        for one in passes(self, theta, batch, **options):
            assert one.grad is not None
            seen.append((len(batch["input_ids"]) // groups, one._replace(grad=one.grad.clone()), batch))
            yield one

    monkeypatch.setattr(ModelObjective, "passes", watch)
    model = tiny_llama() if subspace == "last_block" else with_lora(tiny_llama(), lora_dropout=dropout)
    changes: dict[str, Any] = {
        "subspace": subspace, "minibatch": minibatch, "train": token_rows([8, 5, 7, 8, 3, 8, 6]), "members_per_pass": 2,
        "collator": runs.padding_collator(), "per_device_train_batch_size": 5, "model": model, "max_steps": 1,
    }  # fmt: skip
    trainer = run(tmp_path, dataclasses.replace(ONE_DRAW, burn_in=0), map_updates=0, **changes)
    update = seen[1:]  # after the one that is timed
    firsts = [one for rows, one, _ in update if rows == 2]
    assert [one.members for one in firsts] == [slice(0, 2), slice(2, 3)]
    # masks differ: neither half is what the other leaves
    assert [one.members for rows, one, _ in update if rows == 3] == ([one.members for one in firsts] if dropout else [])
    if dropout:
        return
    wholes = [(one, batch) for rows, one, batch in update if rows == 5]
    objective = trainer.active.objective
    groups = 1 if objective.shared else 3
    chosen = (torch.arange(5).repeat(groups) >= 2).nonzero()[:, 0]
    second = trainer.bayesian.take_rows(wholes[0][1], chosen)
    theta, chunks = trainer.setup.origin, [one.members for one in firsts]
    trainer.bayesian.train()
    rests = passes(objective, theta, second, gradient=True, step=0, micro=1, chunks=chunks)
    for (whole, _), first, rest in zip(wholes, firsts, rests, strict=True):
        assert whole.grad is not None
        assert float(rest.grad.norm()) > 0.1 * float(whole.grad.norm()) > 0
        # float32, sums of 35 terms in another order
        torch.testing.assert_close(
            first.grad + rest.grad, whole.grad, rtol=1e-4, atol=1e-4 * float(whole.grad.abs().max())
        )


def test_a_resumed_run_logs_the_same_noise(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, burn_in=2)  # told by the third update, and by the last
    whole = run(tmp_path / "whole", config, max_steps=12)
    run(tmp_path / "cut", config, max_steps=12, save_strategy="steps", save_steps=5)
    resumed = runs.trainer(tmp_path / "cut", config, max_steps=12, probe_steps=2, logging_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-5"))
    told = [
        [{name: value for name, value in entry.items() if "/chain_" in name or "probe_" in name} for entry in history]
        for history in (whole.state.log_history, resumed.state.log_history)
    ]
    assert told[0] == told[1]
    assert "noise_ratio/chain_0" in told[0][1]  # update 6
    looks = [trainer.monitor.probe_logits for trainer in (whole, resumed)]
    assert torch.equal(*map(torch.stack, looks))


def test_a_penalty_run_stores_how_often_its_noise_was_too_large(tmp_path: Path) -> None:
    config = PenaltyConfig(num_chains=2, draws_per_chain=3, step_size=1e-4, target_acceptance=None)
    found = run(tmp_path, config, gradient_accumulation_steps=4, max_steps=12).posterior.config.diagnostics
    assert all(0 <= share <= 1 for share in found["beyond_series"])
    assert all(penalty > 0 for penalty in found["penalty"])


def test_a_resumed_run_has_the_looks_of_the_whole_one(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, warm_start_steps=3)
    whole = run(tmp_path / "whole", config, max_steps=12)
    run(tmp_path / "cut", config, max_steps=12, save_strategy="steps", save_steps=5)
    resumed = runs.trainer(tmp_path / "cut", config, max_steps=12, probe_steps=2, logging_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-5"))
    assert resumed.posterior.config.diagnostics == whole.posterior.config.diagnostics
    assert resumed.posterior.trace == whole.posterior.trace


# ------------------------------------------------------------------------------------------------- stored and shown


def test_the_limit_of_some_terms_stands_beside_the_nll_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_KEPT", 9 * 8)  # 8 terms of 9 members
    trainer = run(tmp_path, eval_dataset=token_rows(8, seed=1))
    trainer.save_model()
    risk, metrics = trainer.posterior.trace["risk"], trainer.posterior.config.metrics
    assert risk["num_terms"] == 8  # of 56
    assert risk["risks"][-1] == pytest.approx(metrics["nll"], rel=1e-6)
    whole = trainer.outcome.evaluator.latest.member_log_lik
    assert abs(float(-(whole.logsumexp(1) - math.log(9)).mean()) - metrics["nll"]) > 1e-3  # these 8 are not all
    assert metrics["limit_nll"] < metrics["nll"]


def test_what_is_stored_is_small_and_shown_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run(tmp_path / "run", eval_dataset=token_rows(4, seed=1), logging_steps=1)
    trainer.save_model()
    loaded = Posterior.from_pretrained(tmp_path / "run")
    assert loaded.trace == trainer.posterior.trace
    risk, metrics = loaded.trace["risk"], loaded.config.metrics
    assert len(risk["sizes"]) == 9
    assert risk["risks"][-1] == pytest.approx(metrics["nll"], rel=1e-6)
    assert risk["risks"][0] == pytest.approx(metrics["member_nll"], rel=0.05)  # 16 orders of 9 members
    assert metrics["limit_nll"] == risk["limit"] < metrics["nll"]
    assert len(json.dumps(loaded.trace)) < 20_000
    tensors = torch.tensor(loaded.trace["kinetic_of_tensors"]["relative_to_law"])
    hottest = loaded.trace["logs"]["hottest_tensor"]
    assert hottest[11] == [None] * 3  # burn-in: 12 of 24 updates
    assert hottest[-1] == pytest.approx(tensors.amax(1).tolist(), rel=1e-4)
    monkeypatch.setenv("COLUMNS", "140")
    main([str(tmp_path / "run"), "--output", str(tmp_path / "figure.png")])
    shown = capsys.readouterr().out
    for words in ("sghmc, 3 chains", "kinetic temperature", "R-hat, single terms", "held-out NLL of a MAP estimate"):
        assert words in shown
    assert loaded.config.diagnostics["verdict"][:30] in shown
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    figure = plot(loaded.config.to_dict(), loaded.trace)
    assert figure is not None
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert [title.split(":")[0].split(" of ")[0] for title in titles] == [
        "probe", "log-likelihood", "R-hat", "held-out NLL", "kinetic temperature", "kinetic temperature",
        "configurational temperature", "injected over minibatch noise (variances)", "distance from the start",
        "distance over the reach", "weights that the first noisy update left unchanged", "loss",
    ]  # fmt: skip


def test_the_table_has_the_figures_of_every_eval_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Dataset.from_list(token_rows(4, seed=1))
    trainer = run(tmp_path / "run", eval_dataset={"near": rows.select([0, 1]), "far_off": rows.select([2, 3])})
    trainer.save_model()
    monkeypatch.setenv("COLUMNS", "140")
    main([str(tmp_path / "run"), "--output", str(tmp_path / "figure.png")])
    shown, metrics = capsys.readouterr().out, Posterior.from_pretrained(tmp_path / "run").config.metrics
    for words, name, of in (
        ("held-out NLL", "nll", ("near", "far_off")),
        ("held-out NLL of a MAP estimate", "map_nll", ("near", "far_off")),
        ("held-out NLL, of infinitely many members", "limit_nll", ("far_off",)),
    ):
        for eval_set in of:
            (line,) = (line for line in shown.splitlines() if f"{words} ({eval_set}) " in line)
            assert f"{metrics[f'{eval_set}_{name}']:.4f}" in line


def test_a_posterior_without_a_run_has_a_table_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = run(tmp_path / "run", EnsembleConfig(num_chains=2), max_steps=2)
    untraced = dataclasses.replace(trainer.posterior, trace=None)
    untraced.save_pretrained(tmp_path / "run")
    assert Posterior.from_pretrained(tmp_path / "run").trace is None
    main([str(tmp_path / "run"), "--output", str(tmp_path / "figure.png")])
    assert "nothing to plot" in capsys.readouterr().out
    assert not (tmp_path / "figure.png").exists()


def test_curves_are_thinned_for_plots_and_keep_their_end() -> None:
    assert thinned(list(range(200))) == list(range(200))
    thin = thinned(list(range(1, 1002)))
    assert len(thin) <= 200
    assert thin[-1] == 1001


# -------------------------------------------------------------------------------------------------- Jensen posterior


class Augmented(torch.utils.data.Dataset):
    """Rows whose tokens are drawn anew at each look."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**token_rows(1)[0], "input_ids": torch.randint(3, 100, (8,)).tolist()}


def test_dropout_and_augmentation_warn_of_another_posterior(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_bayes.training.trainer"):
        run(tmp_path, ONE_DRAW, max_steps=1)
        assert "Jensen" not in caplog.text
        run(tmp_path, ONE_DRAW, max_steps=1, train=Augmented())
        assert "rows of train_dataset differ from one look to the next" in caplog.text
        caplog.clear()
        run(tmp_path, ONE_DRAW, max_steps=1, model=with_lora(tiny_llama(), lora_dropout=0.1))
        assert "the model has dropout" in caplog.text
        assert "Jensen" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ONE_DRAW, "this is the posterior of the dropout-averaged log-likelihood"),
        (HMCConfig(num_chains=2), "hmc evaluates it without"),
        (MAPConfig(), "this run optimises the log-likelihood averaged over its masks"),
        (MCDropoutConfig(), "inputs are dropped twice. Set it to 0"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_dropout_is_spoken_of_as_each_method_meets_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, words: str
) -> None:
    trainer = runs.trainer(tmp_path, config, model=with_lora(tiny_llama(), lora_dropout=0.1))
    active = ActiveRun(TrainerHost(trainer), trainer.setup, trainer.rows)
    with caplog.at_level(logging.INFO, "hf_bayes.training.trainer"), warnings.catch_warnings():
        warnings.simplefilter("error")
        announce(active)
    assert words in caplog.text
    assert ("Jensen" in caplog.text) == ("MCDropoutConfig" in caplog.text) == (config is ONE_DRAW)


class Reversed(Augmented):
    """Rows that are read backwards half of the time."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = token_rows(8)[index]
        return {**row, "input_ids": row["input_ids"][:: random.choice((1, -1))]}


def test_augmentation_that_spares_half_of_the_rows_is_noticed(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, ONE_DRAW, train=Reversed())
    active = ActiveRun(TrainerHost(trainer), trainer.setup, trainer.rows)
    assert all(rows_vary(active) for _ in range(20))  # 8 rows alike in 4 looks: 6e-8


def test_classifiers_have_probes_of_one_term_a_row(tmp_path: Path) -> None:
    """A fiftieth of the rows since the last look, 16 at least and 256 at most."""
    fields: dict[str, Any] = {"model": tiny_bert(), "subspace": "last_layer", "train": runs.label_rows(300)}
    trainer = run(tmp_path, ONE_DRAW, probe_steps=700, max_steps=1, **fields)
    theta = trainer.run.state.theta
    assert trainer.monitor.probe(theta).log_lik.shape == (3, 28)
    assert trainer.active.probe_of_draws(theta).log_lik.shape == (3, 16)  # of a run of one update
    for interval, rows in ((5, 16), (5000, 200), (10_000, 256)):
        found = trainer.active._probe(interval)._choose(PROBE_TERMS)
        assert sum(len(batch["input_ids"]) for batch in found) == rows


def test_the_halves_of_a_single_chain_are_compared(tmp_path: Path) -> None:
    trainer = run(tmp_path, dataclasses.replace(CONFIG, num_chains=1), max_steps=38)
    found = trainer.posterior.config.diagnostics
    looks = torch.stack(trainer.monitor.probes[9:], 1)  # burn-in: 19 of 38 updates
    assert looks.shape == (1, 10, 70)
    halves = looks.view(2, 5, 70).sum(2, keepdim=True)
    assert found["rhat"] == pytest.approx(float(rhat(halves)))
    assert found["ess"] == pytest.approx(float(ess(looks.sum(2, keepdim=True))))
    assert "within chance for 10 values of each of 1 chain" in found["verdict"]


def test_temperatures_are_compared_at_every_update(tmp_path: Path) -> None:
    trainer = run(tmp_path, dataclasses.replace(ONE_DRAW, burn_in=0.0), max_steps=1)
    state, layout = trainer.run.state, trainer.bayesian.layout
    kinetic = torch.stack([part.square().mean(1) for part in state.momentum.split(layout.sizes, 1)], 1)
    law = trainer.monitor.info["kinetic_temperature_law"]
    share = share_within_interval(kinetic, layout.sizes, law)
    assert trainer.posterior.config.diagnostics["kinetic_inside"] == pytest.approx(share.tolist())
    hot = run(tmp_path, ONE_DRAW, learning_rate=0.3, max_steps=20, num_data=1e5)  # heated by minibatches
    assert max(hot.posterior.config.diagnostics["kinetic_inside"]) < 0.9


@pytest.mark.parametrize(("method", "rate", "level"), [(CONFIG, 1e-10, "WARNING"), (MAPConfig(), 1e-2, "INFO")])
def test_the_verdict_is_told_at_the_end_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: Any, rate: float, level: str
) -> None:
    with caplog.at_level(logging.INFO, logger="hf_bayes.training.trainer"):
        trainer = run(tmp_path, method, learning_rate=rate)
    verdict = trainer.posterior.config.diagnostics["verdict"]
    assert [r.levelname for r in caplog.records if r.getMessage() == f"{method.name}: {verdict}"] == [level]


def test_an_adaptive_proposal_at_its_cap_is_told_of(tmp_path: Path) -> None:
    found = run(tmp_path, AGPSConfig(num_chains=2, draws_per_chain=4), learning_rate=1e-3).posterior.config.diagnostics
    assert min(found["capped"]) > 0.05
    assert "are at the cap of the proposal's standard deviation" in found["verdict"]


@pytest.mark.parametrize("length", [3, 12, 40])
def test_a_long_verdict_stays_within_the_figure(length: int) -> None:
    verdict = "; ".join([" ".join(["positions"] * length), "no R-hat"])
    found = {"verdict": verdict, "unmoved": [0.0, 0.0]}
    figure = plot({"method": {"name": "sghmc"}, "diagnostics": found}, {})
    assert figure is not None
    (title,) = figure.texts
    box = title.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    assert box.width <= figure.bbox.width
    assert title.get_text().split() == f"sghmc: {verdict}".split()


def test_the_command_shows_foreign_text_as_it_is(tmp_path: Path, capsys: Any) -> None:
    trainer = run(tmp_path / "run")
    acting = "\x1b]0;owned\x07 \u202e [bold]$\\frac{$ \n"
    found, trace = trainer.diagnosis.summary()
    found |= {"verdict": acting, "values": acting}
    metrics = {f"{acting}_nll": 1.0, f"{acting}_member_nll": 1.0}
    config = dataclasses.replace(trainer.posterior.config, diagnostics=found, metrics=metrics)
    risk = {"sizes": [1, 2], "risks": [1.0, 0.9], "limit": 0.8, "slope": 0.1, "curvature": 0.0, "std_error": 0.1}
    trace |= {"risk": {**risk, "eval_set": acting}}
    Posterior(trainer.posterior.approximation, config, trainer.posterior.adapter_config, trace).save_pretrained(
        tmp_path / "saved"
    )
    main([str(tmp_path / "saved"), "--output", str(tmp_path / "figure.png")])
    shown = capsys.readouterr().out
    assert not set("\x1b\x07\u202e") & set(shown)
    assert "U+001B" in shown
    assert "[bold]" in shown
    assert (tmp_path / "figure.png").stat().st_size > 0
