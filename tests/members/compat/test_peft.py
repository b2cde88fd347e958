from __future__ import annotations

import pytest
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from hf_bayes.core.compat import PrivateName
from hf_bayes.members.compat import peft
from tests.host_names import fault_of, label


@pytest.mark.parametrize("entry", peft.NAMES, ids=label)
def test_peft_has_the_name(entry: PrivateName) -> None:
    assert fault_of(entry, {entry.owner: lambda: LoraLayer(nn.Linear(2, 2))}) == ""
