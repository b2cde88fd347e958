"""Several methods within a budget, and the posterior of the best."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi, RepoUrl
from transformers import default_data_collator

from hf_bayes import Posterior, attach
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.variational.ivon import IVONConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.training.tuning import trials as trials_module
from hf_bayes.training.tuning import tune as module
from hf_bayes.training.tuning.candidates import Candidate
from hf_bayes.training.tuning.trials import Trials, trial_folder
from hf_bayes.training.tuning.tune import Tuning, tune
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from tests import runs
from tests.tiny_models import tiny_bert
from tests.training.test_custom_likelihoods import lstm, rows
from tests.training.tuning.tuned import CANDIDATES, arguments, call, learnable, only_failing


def test_the_best_posterior_is_saved_with_its_temperature(tuned: tuple[Path, Tuning]) -> None:
    directory, result = tuned
    assert result.chosen.name in ("plain fine-tuning", "ensemble")
    saved = Posterior.from_pretrained(directory)
    assert saved.config.method["name"] == ("map" if result.chosen.cost == 1 else "ensemble")
    assert torch.equal(saved.approximation.theta, result.posterior.approximation.theta)
    assert saved.config.calibration["temperature"] == result.chosen.metrics["temperature"]
    assert result.chosen.mean_nll == pytest.approx(saved.config.metrics["nll"], rel=1e-4)
    assert (directory / "tuning.png").exists()


def test_rounds_share_the_budget_and_a_failure_ends_nothing(tuned: tuple[Path, Tuning]) -> None:
    _, result = tuned
    first, second = result.rounds
    assert [trial.name for trial in first] == [candidate.name for candidate in CANDIDATES]
    assert {trial.gradients for trial in first} == {200}  # 4000 / (4 + 4 * 4)
    assert {trial.gradients for trial in second} == {800}
    assert "hmc with these settings needs a learning_rate" in first[-1].failure
    assert "is chosen: held-out NLL" in result.sentence
    finalists = {trial.name for trial in second}
    assert result.kept == (*(trial for trial in first if trial.name in finalists), *second)
    assert sum(trial.gradients for trial in (*first, *second)) <= 4000


def test_a_candidate_that_needs_a_long_run_has_one_later(tmp_path: Path) -> None:
    patient = Candidate("patient", MAPConfig(prior_std=1.0), 3e-2, least_updates=300)
    late = call(tmp_path, (*CANDIDATES[:2], patient), budget=2800)
    first, second = late.rounds
    assert [trial.name for trial in first] == ["slow", "plain fine-tuning"]
    assert {trial.gradients for trial in first} == {200}  # 2800 / (2 + (2 + 1) * 4); with three in it, 186
    assert {(trial.name, trial.gradients) for trial in second} >= {("patient", 800), ("plain fine-tuning", 800)}
    assert not any(trial.failure for trial in (*first, *second))


def test_a_late_candidate_can_make_another_one_late() -> None:
    args = runs.arguments(Path("unused"))

    def planned(*least: int) -> tuple[list[str], list[str], int]:
        rows = [Candidate(name, MAPConfig(), least_updates=n) for name, n in zip("abcdef", least, strict=False)]
        plan = module._plan(rows, args, 2200, 80)
        return [c.name for c in plan.early], [c.name for c in plan.late], plan.per_trial

    assert planned(1, 1, 1, 1, 1, 100) == (list("abcdef"), [], 100)  # 2200 / (6 + 4 * 4)
    assert planned(1, 1, 1, 1, 1, 101) == (list("abcde"), ["f"], 88)  # 2200 / (5 + (4 + 1) * 4)
    assert planned(1, 1, 1, 1, 89, 101) == (list("abcd"), ["f", "e"], 78)  # 2200 / (4 + (4 + 2) * 4)
    with pytest.raises(ValueError, match=r"440 updates .* in the first round, and 441 are needed: .* least 2,205 \("):
        planned(441)


@pytest.mark.parametrize("chains", [1, 4])
def test_a_budget_pays_for_the_runs_of_the_second_round(chains: int) -> None:
    args = runs.arguments(Path("unused"))
    rows = [Candidate("a", MAPConfig()), Candidate("late", MAPConfig(num_chains=chains), least_updates=1001)]
    least = -(-1001 * chains // 4) * 9  # the parts are 1 + 4 for "a", and 4 for "late"
    short = r"give 1000 updates to each of \d chains of late in the second round, and 1001 are needed: "
    with pytest.raises(ValueError, match=rf"{short}give at least {least:,} \("):
        module._plan(rows, args, least - 1, 80)
    assert module._plan(rows, args, least, 80).late == (rows[1],)


@pytest.mark.parametrize("budget", [5, 200, 6000])
def test_the_budget_of_a_refusal_is_enough(budget: int) -> None:
    args = runs.arguments(Path("unused"))
    costs = [("plain", MAPConfig(), 1), *((str(k), MeanFieldConfig(num_chains=4, num_draws=k), 1) for k in (1, 2))]
    others = [(f"map {k}", MAPConfig(), 1) for k in range(9)]
    rows = [
        Candidate(name, method, least_updates=n) for name, method, n in (*costs, *others, ("late", MAPConfig(), 400))
    ]
    with pytest.raises(ValueError, match=r"give at least 10,240 \("):
        module._plan(rows, args, budget, 80)
    assert module._plan(rows, args, 10240, 80).per_trial == 320


def test_the_shorter_run_is_kept_if_the_longer_one_is_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Trials._train

    def worse_with_time(self: Any, candidate: Candidate, gradients: int) -> Any:
        metrics, nll, terms = train(self, candidate, gradients)
        return metrics, [nats + gradients / 1000 for nats in nll], terms

    monkeypatch.setattr(Trials, "_train", worse_with_time)
    result = call(tmp_path, CANDIDATES[1:2], budget=1000)
    short, long = (
        Posterior.from_pretrained(trial_folder(tmp_path, "plain fine-tuning", gradients)).approximation.theta
        for gradients in (200, 800)
    )
    saved = Posterior.from_pretrained(tmp_path).approximation.theta
    assert result.chosen.gradients == 200
    assert torch.equal(saved, short)
    assert not torch.equal(saved, long)
    assert "with 800 the NLL is" in result.sentence


def test_a_second_call_repeats_no_run(tuned: tuple[Path, Tuning], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, result = tuned
    names = only_failing(monkeypatch, ValueError("still impossible"), "hmc")
    again = call(directory)
    assert names == ["hmc", "hmc"]  # in both rounds
    assert again.chosen == result.chosen
    for before, now in zip(result.rounds, again.rounds, strict=True):
        assert [trial for trial in now if not trial.failure] == [trial for trial in before if not trial.failure]


def test_a_choice_no_better_than_guessing_is_said(tmp_path: Path) -> None:
    two = {"input_ids": [[5] * 6, [9] * 6], "attention_mask": [[1] * 6] * 2, "labels": [0, 1]}
    data = {"train_dataset": Dataset.from_dict(two).repeat(40), "eval_dataset": Dataset.from_dict(two).repeat(100)}
    learnt = call(tmp_path / "learnt", CANDIDATES[1:2], budget=1000, **data)
    assert "guessing" not in learnt.sentence
    slow = call(tmp_path / "slow", CANDIDATES[:1], budget=1000, **data)
    assert "no better than guessing by the label frequencies" in slow.sentence


def test_the_model_comes_back_as_it_was(tmp_path: Path) -> None:
    model = tiny_bert()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    call(tmp_path, CANDIDATES[1:2], model=model, budget=400)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_dataset": learnable(199, 1)}, r"199 rows, too few to choose by.* at least 200 .*--validation_fraction"),
        ({"eval_dataset": None}, "one data set with a length, got NoneType"),
        ({"eval_dataset": {"a": learnable(200, 1)}}, "one data set with a length, got dict"),
        ({"train_dataset": iter(learnable(80, 0))}, "generator is a stream: materialise it"),
        ({"train_dataset": None}, "train_dataset must be a list or data set of rows"),
        (
            {"eval_dataset": learnable(200, 1).map(lambda row: {"labels": 7})},
            "row 0 of eval_dataset has a label outside",
        ),
        ({"budget": 1e4}, "budget must be a number of minibatch gradients, an integer >= 1, got 10000.0"),
        ({"budget": 1000}, r"budget=1,000 gradients give 25 updates to each of 2 chains.*give at least 1,600"),
        ({"candidates": CANDIDATES[:1] * 2}, r"names of their own, got \['slow', 'slow'\]"),
        ({"candidates": ()}, r"names of their own, got \[\]"),
        (
            {"candidates": [c._replace(name=name) for c, name in zip(CANDIDATES, ("a b", "a.b"), strict=False)]},
            "choose names that differ in letters or digits",
        ),
    ],
)
def test_bad_input_is_refused_before_the_first_run(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(tmp_path, **changes)
    assert not (tmp_path / "tuning.json").exists()


def test_a_learning_rate_for_all_candidates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"learning_rate=0\.1 would be ignored: each method has its own rate"):
        call(tmp_path, CANDIDATES[1:2], settings={"learning_rate": 0.1}, budget=200)
    assert not (tmp_path / "tuning.json").exists()


def test_the_best_posterior_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Posterior, str, dict[str, Any]]] = []
    monkeypatch.setattr(Posterior, "push_to_hub", lambda self, repo_id, **given: sent.append((self, repo_id, given)))
    made: list[Any] = []
    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, *args, **given: made.append(sent[:]) or RepoUrl("https://huggingface.co/u/x")
    )
    settings = {"push_to_hub": True, "hub_model_id": "user/x", "hub_token": "t", "hub_private_repo": True}
    result = call(tmp_path, CANDIDATES[1:3], settings=settings, budget=1600)
    ((posterior, repository, given),) = sent  # no trial is pushed
    assert posterior is result.posterior
    assert (repository, given["token"], given["private"], given["revision"]) == ("user/x", "t", True, None)
    assert made == [[]]  # the repository was made first


def test_a_refused_token_stops_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "create_repo", Mock(side_effect=PermissionError("no such token")))
    with pytest.raises(PermissionError, match="no such token"):
        call(tmp_path, CANDIDATES[1:3], settings={"push_to_hub": True, "hub_model_id": "user/x"}, budget=1600)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        ({"max_steps": 5}, "max_steps=5"),
        ({"num_train_epochs": 2}, "num_train_epochs=2"),
        ({"max_steps": 5, "num_train_epochs": 2}, "max_steps=5 and num_train_epochs=2"),
    ],
)
def test_a_length_beside_a_budget_is_warned_of(tmp_path: Path, settings: dict[str, Any], ignored: str) -> None:
    with pytest.warns(UserWarning, match=f"budget=200 gives the length of the runs: {ignored} of the arg"):
        call(tmp_path, CANDIDATES[1:2], settings=settings, budget=200)


def test_a_length_or_a_budget_alone_is_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gives the length of the runs")
        call(tmp_path / "budget", CANDIDATES[1:2], budget=200)
        call(tmp_path / "length", CANDIDATES[1:2], budget=None, settings={"max_steps": 20})


def test_an_attached_model_is_refused(tmp_path: Path) -> None:
    model = attach(tiny_bert(), subspace="last_layer")
    with pytest.raises(ValueError, match="got an attached BayesianModelForSeq"):
        tune(model, runs.arguments(tmp_path), train_dataset=learnable(80, 0), eval_dataset=learnable(200, 1))


def test_single_runs_print_nothing_and_finalists_are_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NUM_FINALISTS", 1)
    result = call(tmp_path, CANDIDATES[:2], budget=2400)
    printed = capsys.readouterr().out
    assert "train_runtime" not in printed
    assert "eval_nll" not in printed
    assert result.sentence in " ".join(printed.split())
    (name,) = {trial.name for trial in result.rounds[1]}
    found = {path.parent for path in (tmp_path / "finalists").glob("*/manifest.json")}
    assert found == {trial_folder(tmp_path, name, trial.gradients) for trial in result.kept}
    assert len(found) == 2


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.TrainingArguments.world_size", property(lambda self: 2))
    with pytest.raises(ValueError, match="tune runs in one process, and there are 2"):
        call(tmp_path)


def test_the_best_single_set_of_weights_always_runs_again() -> None:
    rows = [Candidate(str(index), MAPConfig(), None, cost) for index, cost in enumerate((4, 4, 4, 4, 1, 1))]
    trials = [runs_of(str(index), nll) for index, nll in enumerate((0.1, 0.2, 0.3, 0.4, 0.9, 0.8))]
    assert [row.name for row in module._finalists(rows, trials)] == ["0", "1", "2", "5"]
    assert [row.name for row in module._finalists(rows, trials[:5])] == ["0", "1", "2", "4"]
    failed = [trial._replace(nll=[], failure="diverged") for trial in trials[4:]]
    assert [row.name for row in module._finalists(rows, [*trials[:4], *failed])] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("seed", range(20))
def test_a_candidate_that_is_removed_is_no_finalist_later(seed: int) -> None:
    chance = random.Random(seed)
    rows = [Candidate(str(index), MAPConfig(), None, chance.choice((1, 4))) for index in range(9)]
    trials = [runs_of(str(index), chance.random()) for index in range(9)]
    finalists = [{row.name for row in module._finalists(rows, trials[:count])} for count in range(1, 10)]
    assert all(name in some for name in finalists[-1] for count, some in enumerate(finalists) if int(name) <= count)


def runs_of(name: str, nll: float) -> Any:
    from tests.training.tuning.test_record import trial

    return trial(name, nll=[nll] * 4)


def test_methods_are_compared_under_a_likelihood(tmp_path: Path) -> None:
    data = rows(200)
    args = arguments(tmp_path)
    options: dict[str, Any] = {"train_dataset": data, "eval_dataset": data, "data_collator": default_data_collator}
    result = tune(lstm(2), args, candidates=CANDIDATES[1:3], budget=1600, likelihood=Heteroscedastic(), **options)
    assert all(trial.failure == "" for trial in result.rounds[1])
    saved = Posterior.from_pretrained(tmp_path)
    assert saved.config.head["likelihood"] == Heteroscedastic().to_dict()
    assert result.chosen.mean_nll == pytest.approx(saved.config.metrics["nll"], rel=1e-4)
    with pytest.raises(ValueError, match="record of another tuning: likelihood: saved"):
        tune(lstm(2), args, candidates=CANDIDATES[1:3], budget=1600, likelihood=Heteroscedastic(min_std=0.1), **options)


def test_a_budget_counts_the_gradients_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, int] = {}

    @contextmanager
    def run(model: Any, method: Any, args: Any, **options: Any) -> Iterator[Any]:
        steps.setdefault(f"{method.name} {method.num_draws}", options["max_steps"])  # of the first round
        raise ValueError("not run")
        yield

    monkeypatch.setattr(trials_module, "finished_run", run)
    methods = [MeanFieldConfig(num_chains=2, num_draws=k) for k in (1, 2)]
    pairs = [Candidate(str(method.num_draws), method) for method in methods]
    with pytest.raises(ValueError, match="no candidate ran to its end"):
        call(tmp_path, pairs, budget=8000)
    assert steps == {"mean_field 1": 400, "mean_field 2": 200}  # 800 gradients of two chains
    some = [Candidate("ivon", IVONConfig(num_chains=2, pair_period=3)), *pairs[:1]]
    with pytest.raises(ValueError, match="no candidate ran to its end"):
        call(tmp_path / "some", some, budget=8000)
    assert steps["ivon 1"] == 300  # 100 of them take two gradients, so that there are 400 of each chain
    with pytest.raises(
        ValueError, match=r"give 39 updates to each of 2 chains of 2 in the first round.* at least 1,600"
    ):
        call(tmp_path / "few", pairs, budget=1599)
