"""The hooks of lm-evaluation-harness. It is no dependency: ``make test-doors`` has an environment with it."""

from __future__ import annotations

import pytest

from hf_bayes.core.compat import PrivateName
from hf_bayes.members.compat.lm_eval import NAMES
from tests.host_names import fault_of, label


def test_one_hook_of_the_harness_is_overridden() -> None:
    assert [(entry.name, entry.use) for entry in NAMES] == [("_loglikelihood_tokens", "overridden")]


@pytest.mark.slow
@pytest.mark.parametrize("entry", NAMES, ids=label)
def test_lm_eval_has_the_hooks_of_the_list(entry: PrivateName) -> None:
    hosts = pytest.importorskip("lm_eval.models.huggingface", reason="lm_eval is no dependency: make test-doors")
    assert entry.owner == f"{hosts.HFLM.__module__}.{hosts.HFLM.__name__}"
    assert fault_of(entry) == ""
