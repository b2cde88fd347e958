"""Make the page of a short run of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.reproduce import report

MACHINE = dict.fromkeys(("processor", "threads", "python", "torch", "transformers", "peft", "hf_bayes"), "x")


def page(module: ModuleType, record: Mapping[str, Any], directory: Path) -> str:
    """Return the experiment's page with the tables of ``record``. The figure is written to ``directory``."""
    module.figures(record, directory)
    assert (directory / f"{module.NAME}.png").stat().st_size > 10_000
    text = (report.RESULTS / f"{module.NAME}.md").read_text()
    return report.tables(module.NAME, {**record, "seconds": 1, "machine": MACHINE}, text)
