"""The model card that a trainer leaves in its output directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_bayes import hub
from hf_bayes.artifact import Posterior


def write_card(
    posterior: Posterior,
    directory: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    tags: str | Sequence[str] | None = None,
    others: dict[str, Any],
) -> None:
    """Write a posterior's card into a directory, in place of the one that is there.

    Args:
        repo_id: where the posterior will be found; None leaves a placeholder.
        tags: of the card, beside its own.
        others: what a trainer's ``create_model_card`` was given beside tags.
    Raises:
        ValueError: if ``others`` holds anything: a card is written from what the run was.
    """
    if given := sorted(name for name, value in others.items() if value is not None):
        raise ValueError(
            f"create_model_card takes tags, got {', '.join(given)}: the card is written from what the run was. Edit "
            f"{hub.CARD} in the directory that save_model has written"
        )
    text = hub.render_card(posterior.config.to_dict(), adapter=posterior.adapter_config is not None, repo_id=repo_id)
    Path(directory, hub.CARD).write_text(text)
    if tags:
        hub.add_tags(directory, tags)
