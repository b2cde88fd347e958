from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_bayes.cli.training_table import table
from hf_bayes.posteriors.posterior import Posterior
from tests.runs import token_rows
from tests.training.diagnosed import run


def shown(config: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(config, "out [x]"))
    return captured.get()


def test_the_table_says_what_was_saved_and_how_good_it_is(tmp_path: Path) -> None:
    trainer = run(tmp_path / "run", eval_dataset=token_rows(4, seed=1))
    trainer.save_model()
    config = Posterior.from_pretrained(tmp_path / "run").config
    lines = {" ".join(line.split()) for line in shown(config).splitlines()}
    assert "method sghmc at temperature 1" in lines
    assert f"members {config.num_members}" in lines
    assert any(line.startswith(f"held-out NLL {config.metrics['nll']:.4f} (a MAP estimate: ") for line in lines)
    assert "chains not converged, see hf-bayes diagnose out [x]" in lines
    for chosen, words in ((0.3, "T was chosen by predictions"), (None, "not assessed")):
        diagnostics = {**config.diagnostics, "converged": None, "chosen_temperature": chosen}
        text = " ".join(shown(dataclasses.replace(config, diagnostics=diagnostics)).split())
        assert f"chains {words}, see hf-bayes diagnose" in text
    assert "saved in out [x]" in lines
    stopped = dataclasses.replace(config, method={**config.method, "ladder": {"temperature": [1.0, 0.3]}})
    assert "method sghmc no temperature chosen" in " ".join(shown(stopped).split())


def test_without_held_out_rows_the_table_has_no_figures(tmp_path: Path) -> None:
    text = shown(run(tmp_path / "run").posterior.config)
    assert "held-out" not in text
    assert "accuracy" not in text
