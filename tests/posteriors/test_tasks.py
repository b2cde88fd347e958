from __future__ import annotations

from hf_bayes.models.attaching import MODELS
from hf_bayes.models.loading.recognition import mappings
from hf_bayes.posteriors.tasks import TASKS


def test_every_task_has_one_row_a_class_and_an_auto_class() -> None:
    assert list(MODELS) == list(TASKS)
    assert {task.auto_class for task in TASKS.values()} <= set(mappings().values())
