"""Steps of SGHMC by the package ``posteriors``: one for every line of stdin, its seconds on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

import posteriors
import torch
from torch import Tensor
from torch.func import functional_call

from benchmarks.harness import timed
from benchmarks.models import Subject, tokens


def main() -> None:
    """Answer every line of stdin."""
    fields, where, rows, length, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    subject = Subject(*fields)
    model = subject.trainable(where).train()
    ids = tokens(model, rows, length)
    params = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def log_posterior(params: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        keywords: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
        log_lik = -functional_call(model, params, (), keywords).loss
        return log_lik + posteriors.diag_normal_log_prob(params) / 1e6, log_lik

    transform = posteriors.sgmcmc.sghmc.build(log_posterior, lr=1e-4)
    state = transform.init(params)
    for _ in sys.stdin:

        def step() -> None:
            nonlocal state
            state, _ = transform.update(state, ids)

        print(timed(step, subject.device), flush=True)


if __name__ == "__main__":
    main()
