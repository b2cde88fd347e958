"""Models with scattered members, and a check that a model is unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.core.layout import select
from tests.members.reference import core_of, scattered
from tests.members.subjects import SUBJECTS
from tests.tiny_models import inputs_of


def prepared(name: str, num_members: int = 3) -> tuple[nn.Module, Any, Tensor, str]:
    make, subspace, *_ = SUBJECTS[name]
    model = make(torch.float64)
    layout = select(model, subspace)
    return model, layout, scattered(model, layout, num_members), subspace


class unchanged:
    """Asserts that a model is, in the end, what it was: values, flags, hooks, attributes, config and answers."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.before = model, self.state(model)

    @staticmethod
    def state(model: nn.Module) -> dict[str, Any]:
        core = core_of(model)
        with torch.no_grad():
            answer = core(**inputs_of(model)).logits
        return {
            "values": {name: value.clone() for name, value in model.state_dict().items()},
            "answer": {"logits": answer},
            "flags": {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)},
            "identities": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
            "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
            "hooks": {
                name: [dict(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks") and isinstance(v, dict)]
                for name, module in model.named_modules()
            },
            "config": (core.config.to_dict(), core.config._attn_implementation),
        }

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        after = self.state(self.model)
        for part, before in self.before.items():
            if part in ("values", "answer"):
                assert before.keys() == after[part].keys()
                assert all(torch.equal(before[key], after[part][key]) for key in before), part
            else:
                assert after[part] == before, part


# float64 but for transformers' Llama, which normalises and rotates in float32
TOLERANCE = 2e-5
