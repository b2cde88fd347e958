from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from hf_bayes import EnsembleConfig, LaplaceConfig
from hf_bayes.cli.evaluation.labels import LABEL_CASE
from hf_bayes.cli.evaluation.windows import WINDOW_CASE
from hf_bayes.training.tuning.candidates import Candidate
from scripts.reproduce import recommend
from scripts.reproduce.debian_tags import TAGS, tagged_rows
from scripts.reproduce.recommend_tasks import Task
from tests.tiny_models import tiny_bert, tiny_llama

INDEX = """\
Package: ardour
Section: sound
Tag: interface::x11, role::program,
 works-with::audio
Description: audio recorder
 with more lines

Package: mixx
Section: web
Tag: works-with::audio
Description: a player of the web

Package: libc
Section: libs
Description: a library without tags

Package: python-x
Section: python
Tag: role::shared-lib
Description: tags of other kinds
"""


def test_rows_have_the_tags_of_all_lines_of_their_field() -> None:
    inside, outside = tagged_rows(INDEX)
    assert [row.text for row in inside] == ["audio recorder"]
    assert [tag for tag, label in zip(TAGS, inside[0].labels, strict=True) if label] == [
        "interface::x11", "role::program", "works-with::audio"
    ]  # fmt: skip
    assert [row.text for row in outside] == ["a player of the web"]


def rows(count: int, labels: int | None, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 30, (count, 8), generator=generator).tolist()
    if labels is None:
        return Dataset.from_dict({"input_ids": ids, "labels": ids})
    wanted = torch.randint(0, 2, (count, labels), generator=generator).float().tolist()
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 8] * count, "labels": wanted})


def labelled_task() -> Task:
    def model(seed: int) -> object:
        torch.manual_seed(seed)
        base = tiny_bert(num_labels=3, problem_type="multi_label_classification")
        return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))

    return small_task(model, 3)


def language_task() -> Task:
    def model(seed: int) -> object:
        torch.manual_seed(seed)
        return get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))

    return small_task(model, None)


def small_task(model: Callable[[int], object], labels: int | None) -> Task:
    sets = {name: rows(60, labels, seed) for seed, name in enumerate(("train", "heldout", "test"))}
    case = WINDOW_CASE if labels is None else LABEL_CASE
    return Task(model, sets, {"other": rows(20, labels, 9)}, case, batch=8)


def test_a_run_is_scored_by_the_predictions_of_its_posterior(monkeypatch) -> None:
    """Members of a Laplace approximation predict far worse than its linearised predictions."""
    ways, evaluate = [], recommend.evaluate

    def watched(model, *args, **options):
        ways.append(model.predictor.prediction.startswith("linearised"))
        return evaluate(model, *args, **options)

    monkeypatch.setattr(recommend, "evaluate", watched)
    laplace = Candidate("Laplace", LaplaceConfig(structure="diagonal", check_gradient=False), None, 3)
    recommend.Bench(labelled_task()).run(laplace, 0, gradients=12)
    assert ways == [True]


def test_a_row_has_the_time_of_its_runs_on_the_cpu_only() -> None:
    on_cpu, on_gpu = {"seconds": 30}, {"gpu": "a GPU"}
    assert recommend._seconds({0: on_cpu, 1: {"seconds": 40}, 2: on_gpu}) == "35"
    assert recommend._seconds({0: on_gpu}) == "-"


@pytest.mark.parametrize("make", [labelled_task, language_task], ids=["labels", "windows"])
def test_a_run_has_the_figures_of_the_table(make: Callable[[], Task]) -> None:
    deep_ensemble = Candidate("deep ensemble", EnsembleConfig(num_chains=2), None, 2)
    found = recommend.Bench(make()).run(deep_ensemble, 0, gradients=12)
    assert len(found["rows"]) == 60
    assert sum(found["rows"]) / 60_000 == pytest.approx(found["nll"], abs=1e-3)  # kept to a thousandth
    assert set(found["auroc"]["other"]) >= {"total", "epistemic"}
    assert found["gradients"] == 24
