"""A batch of 4 x 128 in the curvature pass, LoRA on all layers, in plain LoRA AdamW steps.

What is timed is a batch, from its request to the next one's. The gradient at the MAP takes batches of its own, from a
part of the rows of a large data set: a batch of the pass bears that part of one of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.harness import Line, Settings, Work, compare, interleave, synchronize
from benchmarks.models import WHERE, members, tokens
from benchmarks.training import LENGTH, ROWS, plain_step
from hf_bayes.members.module_hooks import LayerHooks
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import run_curvature_pass

MANY_ROWS = 10_000
"""The rows of a data set whose gradient is estimated from a part of them."""


def measure(settings: Settings) -> list[Line]:
    """The lines of this group."""
    model = settings.subject.trainable(WHERE[0])
    ids = tokens(model, ROWS, LENGTH)
    with attach(model) as bayesian:
        theta = members(bayesian.theta[0].detach(), 1)[0]

        def batch_of(structure: str, *, num_rows: int = MANY_ROWS, one_factor: bool = True) -> Work:
            return lambda: seconds(settings, bayesian, theta, ids, structure, num_rows=num_rows, one_factor=one_factor)

        works = {
            "single": plain_step(settings.subject, WHERE[0]),
            "diagonal": batch_of("diagonal"),
            "gradient from all rows": batch_of("diagonal", num_rows=2 * ROWS),
            "kronecker": batch_of("kronecker"),
            "input factors of q, k, v apart": batch_of("kronecker", one_factor=False),
        }
        found = interleave(works, settings.rounds)
    return [
        compare("laplace", f"a batch of the Laplace pass, {name}, LoRA on all layers", found, ours=ours,
                unit="x AdamW step", limit=limit, others=others)
        for name, ours, limit, others in (
            ("diagonal", "diagonal", 1.15, ["gradient from all rows"]),
            ("K-FAC", "kronecker", 1.45, ["input factors of q, k, v apart"]),
        )
    ]  # fmt: skip


def seconds(
    settings: Settings, model: Any, theta: Tensor, ids: Tensor, structure: str, *, num_rows: int, one_factor: bool
) -> float:
    """Return the seconds of a batch; ``one_factor``: modules that read one tensor share its factor, the default."""
    spent: list[tuple[int, float]] = []

    def batches(rows: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        for _ in range(2):  # the first one makes room
            synchronize(settings.device)
            start = time.perf_counter()
            yield {"input_ids": ids, "labels": ids}
            synchronize(settings.device)
            elapsed = time.perf_counter() - start
        spent.append((len(rows), elapsed))

    apart = mock.patch.object(LayerHooks, "_input_hook", return_value=lambda module, args, kwargs: None)
    with nullcontext() if one_factor else apart:
        run_curvature_pass(model, theta, batches, num_rows, CurvatureSpec(structure=structure))
    return sum(size / num_rows * elapsed for size, elapsed in spent)
