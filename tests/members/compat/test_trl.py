"""The names of TRL's DPOTrainer. TRL is no dependency: ``make test-slow`` installs it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from hf_bayes.core.compat import PrivateName
from hf_bayes.members.compat import trl
from tests.host_names import fault_of, label


@pytest.mark.slow
@pytest.mark.parametrize("entry", trl.NAMES, ids=label)
def test_the_installed_trl_has_the_names_that_are_used(entry: PrivateName) -> None:
    from trl import DPOTrainer

    if entry.use == "read":  # set by __init__
        assert f"self.{entry.name}" in inspect.getsource(DPOTrainer)
        return
    assert fault_of(entry) == ""
    if entry.use == "argument":
        assert entry.name in inspect.signature(DPOTrainer.__init__).parameters


def test_the_functions_read_the_names_of_the_list() -> None:
    trainer = SimpleNamespace(ref_model="reference", precompute_ref_logps=True)
    assert not trl.computes_reference(trainer)
    trl.replace_reference_log_probs(trainer, lambda model, inputs: (torch.ones(1), inputs[model]))
    assert trl.computes_reference(trainer)
    assert trl.reference_log_probs(trainer, {"reference": torch.zeros(1)}) == (torch.ones(1), torch.zeros(1))
    assert trl.precomputes_reference(trainer)
    assert {"compute_ref_log_probs", *vars(trainer)} == {entry.name for entry in trl.NAMES}
