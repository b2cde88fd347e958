from __future__ import annotations

from contextlib import suppress

from torch import nn

from hf_bayes.members.evaluation_mode import evaluating


def test_every_module_gets_its_own_mode_back_after_an_error_too() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.Sequential(nn.Dropout())).eval()
    model[1].training = True
    before, within = [module.training for module in model.modules()], []
    with suppress(ZeroDivisionError), evaluating(model):
        within = [module.training for module in model.modules()]
        raise ZeroDivisionError
    assert within == [False] * 5
    assert [module.training for module in model.modules()] == before
