"""A launched script: which of gloo's threads are left when it is done. ``python -m ... OUT end|twin``."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from accelerate import PartialState

from hf_bayes.cli.scripts import end_process_group
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs


def main(out: str) -> None:
    trainer = runs.trainer(Path(out), SGHMCConfig(num_chains=2))
    trainer.train()
    trainer.save_model()


def gloo_threads() -> list[str]:
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    gc.disable()  # it would come by chance
    main(sys.argv[1])
    running = len(gloo_threads())
    PartialState().destroy_process_group() if sys.argv[2] == "twin" else end_process_group()
    found = json.dumps([running, len(gloo_threads())])
    Path(sys.argv[1], f"threads_{os.environ['RANK']}.json").write_text(found)  # lines of two processes may mix
