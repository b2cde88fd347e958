from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from hf_bayes import EnsembleConfig
from hf_bayes.cli.evaluate_labels import LABEL_CASE
from hf_bayes.cli.evaluate_windows import WINDOW_CASE
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


@pytest.mark.parametrize("case", [LABEL_CASE, WINDOW_CASE], ids=["labels", "windows"])
def test_a_run_has_the_figures_of_the_table(case: object) -> None:
    several = case is LABEL_CASE

    def model(seed: int) -> object:
        torch.manual_seed(seed)
        if several:
            base, target = tiny_bert(num_labels=3, problem_type="multi_label_classification"), "query"
        else:
            base, target = tiny_llama(), "q_proj"
        return get_peft_model(
            base, LoraConfig(task_type="SEQ_CLS" if several else "CAUSAL_LM", target_modules=[target])
        )

    labels = 3 if several else None
    sets = {name: rows(60, labels, seed) for seed, name in enumerate(("train", "heldout", "test"))}
    task = Task(model, sets, {"other": rows(20, labels, 9)}, case, batch=8)
    found = recommend.Bench(task).run(
        Candidate("deep ensemble", EnsembleConfig(num_chains=2), None, 2), 0, gradients=12
    )
    assert len(found["rows"]) == 60
    assert sum(found["rows"]) / 60_000 == pytest.approx(found["nll"], abs=1e-3)  # kept to a thousandth
    assert set(found["auroc"]["other"]) >= {"total", "epistemic"}
    assert found["gradients"] == 24
