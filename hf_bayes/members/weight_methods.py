"""Methods of a live model that write or move its own weights. They raise while the model has members."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

NAMES = ("save_pretrained", "push_to_hub", "merge_and_unload", "unload")
"""Methods of transformers' and peft's models. The weights that they would read are those from before the training."""


class WeightMethods:
    """The methods ``NAMES`` of a model, which raise between ``install`` and ``remove``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before: dict[str, Any] = {}

    def install(self) -> None:
        """Replace the methods that the model has."""
        self.before = {name: vars(self.model)[name] for name in NAMES if name in vars(self.model)}
        for name in NAMES:
            if hasattr(self.model, name):
                vars(self.model)[name] = _Refusal(type(self.model).__name__, name)

    def remove(self) -> None:
        """Restore the methods."""
        for name in NAMES:
            vars(self.model).pop(name, None)
        vars(self.model).update(self.before)


class _Refusal:
    """A method that raises. It can be copied and pickled with its model."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"{self.kind}.{self.name}() would leave the members out: while a BayesianModel holds this model, its "
            "weights are those from before the training. Save the posterior (BayesianTrainer.save_model()), write one "
            "set of weights (hf-bayes export), or call detach() of the BayesianModel first, which gives this model "
            "back as it was"
        )
