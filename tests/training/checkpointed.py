"""Runs with checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import tiny_gpt2, with_lora

STEPS, CUTS = 12, 10


def dropout_model() -> Any:
    return with_lora(tiny_gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1))


def trainer(output_dir: Any, method: Any, **changes: Any) -> Any:
    """12 updates of 4 rows out of 10: 3 an epoch, the last of them reaching into the next permutation."""
    settings = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "logging_steps": 1000, **changes}
    return runs.trainer(output_dir, method, **{"model": dropout_model(), **settings})


def run(directory: Path, method: Any = None, **changes: Any) -> Any:
    fields = {"save_strategy": "steps", "save_steps": 2, **changes}
    return runs.trainer(directory, method or SGHMCConfig(num_chains=2, draws_per_chain=2), **fields)
