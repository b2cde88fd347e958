"""Tasks of lm-evaluation-harness on rows that a test writes: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DOCUMENTS = [
    {"text": "The mitochondrion is the powerhouse", "choices": [" of the cell.", " of an energy."], "label": 0},
    {"text": "Langevin dynamics samples", "choices": [" in nats.", " from the Gibbs distribution"], "label": 1},
    {"text": "Uncertainty is total,", "choices": [" aleatoric and epistemic", " powerhouse"], "label": 0},
]


def write_tasks(folder: Path) -> str:
    """Write a choice of answers and a perplexity, "tiny_choice" and "tiny_text", and return the folder."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    shared: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
    }
    choice = shared | {
        "task": "tiny_choice",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    text = shared | {
        "task": "tiny_text",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    for task in (choice, text):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return str(folder)
