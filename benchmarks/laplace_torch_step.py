"""Fits by the package ``laplace-torch``: one for every line of stdin that names a work, its seconds on stdout.

``--once WORK`` makes one fit and prints its memory and the trace of its curvature.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from laplace import Laplace
from laplace.utils.matrix import Kron
from torch import Tensor, nn

from benchmarks.classifier import FAMILIES, PRIOR_STD, WORKS, classifier, loader
from benchmarks.harness import peak_memory, timed


class Logits(nn.Module):
    """A model as laplace-torch takes it: a batch in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def fit(model: nn.Module, work: str) -> Any:
    """The exact GGN by the package's own choice of backend."""
    todo = WORKS[work]
    options: dict[str, Any] = {"subset_of_weights": "all"}
    # its diagonal of a last layer takes no head that is called at every position, as Llama's is
    if todo.where == "head" and (todo.family != "Llama" or todo.structure != "diagonal"):
        options = {"subset_of_weights": "last_layer", "last_layer_name": f"model.{FAMILIES[todo.family][1]}"}
    found = Laplace(
        model, "classification", hessian_structure={"diagonal": "diag", "kronecker": "kron"}[todo.structure],
        prior_precision=PRIOR_STD**-2, **options,
    )  # fmt: skip
    found.fit(loader(model.model.config.num_labels))
    return found


def main() -> None:
    """Answer every line of stdin, or one argument."""
    torch.set_num_threads(int(sys.argv[1]))
    if sys.argv[2:3] == ["--once"]:
        kept: list[Any] = []
        model = Logits(classifier(WORKS[sys.argv[3]]))
        fit(model, sys.argv[3])  # what is imported and compiled at the first fit is no memory of a fit
        peak = peak_memory("cpu", lambda: kept.append(fit(model, sys.argv[3])))
        curvature = kept[0].H_facs if isinstance(getattr(kept[0], "H_facs", None), Kron) else kept[0].H
        diagonal = curvature if isinstance(curvature, Tensor) else curvature.diag()
        print("RESULT" + json.dumps({"peak": peak, "trace": float(diagonal.sum())}))
        return
    models = {name: Logits(classifier(work)) for name, work in WORKS.items()}
    for line in sys.stdin:
        name = line.strip()
        print(timed(lambda name=name: fit(models[name], name)), flush=True)


if __name__ == "__main__":
    main()
