from __future__ import annotations

import pytest

from hf_bayes.posteriors.lora_adapter import Adapter
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.posteriors.tasks import PEFT_TASK_TYPES


@pytest.mark.parametrize(("ours", "theirs"), [(ours, theirs) for ours, theirs in PEFT_TASK_TYPES.items() if theirs])
def test_peft_s_name_of_a_task_is_translated(ours: str, theirs: str) -> None:
    assert Adapter("here", {"task_type": theirs}, {}, {}, None, Sidecars()).task() == ours


@pytest.mark.parametrize("theirs", [None, "QUESTION_ANS"])
def test_a_task_without_a_name_is_asked_for(theirs: str | None) -> None:
    with pytest.raises(ValueError, match=r"pass task= one of causal_lm, .*image_classification"):
        Adapter("here", {"task_type": theirs}, {}, {}, None, Sidecars()).task()
