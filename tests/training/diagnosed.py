"""Short runs with a probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_bayes import SGHMCConfig
from tests import runs

CONFIG = SGHMCConfig(num_chains=3, draws_per_chain=3, prior_std=0.3)


def run(directory: Path, method: Any = CONFIG, **changes: Any) -> Any:
    fields: dict[str, Any] = {"max_steps": 24, "probe_steps": 2, "logging_steps": 3}
    trainer = runs.trainer(directory, method, **(fields | changes))
    trainer.train()
    return trainer


ONE_DRAW = SGHMCConfig(num_chains=3, prior_std=0.3)
