"""The files of a Space on the Hub that shows posteriors with the page of ``demo_page``."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jinja2
from huggingface_hub import SpaceCardData

from hf_bayes.posteriors.compat import is_repo_id
from hf_bayes.posteriors.config import library_versions
from hf_bayes.posteriors.storage import disk, new_directory

_APP = Path(__file__).parent / "templates" / "space_app.py.jinja"
_REQUIREMENTS = "hf-bayes[demo]=={version}\n"
_GRADIO = "6.0.0"
"""The oldest version of gradio that the page runs with, for a computer without gradio."""


def write_space(
    directory: str | os.PathLike[str], posteriors: Sequence[str], *, title: str = "Uncertainty, token by token"
) -> None:
    """Write the files of a Space: the app, its requirements, and a README with the header that the Hub reads.

    Args:
        directory: a new or empty directory.
        posteriors: ids of repositories on the Hub, one or two.
        title: the title of the Space.
    Raises:
        ValueError: for a name that is no id of the Hub, for two equal ids, and if the directory is not empty.
        OSError: if the directory cannot be written. No file is left then.
    """
    for name in posteriors:
        if Path(name).exists() or not is_repo_id(name) or "/" not in name:
            raise ValueError(
                f"a Space loads posteriors from the Hub, got {name!r:.200}: push the posterior, and give its id "
                "(user/name)"
            )
    if len(set(posteriors)) < len(posteriors):  # the page knows a posterior by its id
        raise ValueError(f"a Space shows each posterior once, got {posteriors[0]} twice: give another id, or one alone")
    data = SpaceCardData(
        title=title, emoji="🎲", colorFrom="yellow", colorTo="red", sdk="gradio", sdk_version=_version_of_gradio(),
        app_file="app.py", models=list(posteriors),
    )  # fmt: skip
    names = ", ".join(f"`{name}`" for name in posteriors)
    text = f"# {title}\n\nText from {names}, with the uncertainty of every token, by hf_bayes.\n"
    files = {
        "app.py": app_file(posteriors),
        "requirements.txt": _REQUIREMENTS.format(version=library_versions()["hf-bayes"]),
        "README.md": f"---\n{data}\n---\n\n{text}",
    }
    with new_directory(directory) as staging:
        for name, content in files.items():
            disk.write(staging / name, content.encode())


def app_file(posteriors: Sequence[str]) -> str:
    """Return the text of the app. Names are written as literals of Python."""
    template = jinja2.Template(_APP.read_text(encoding="utf-8"), undefined=jinja2.StrictUndefined)
    names = [json.dumps(name) for name in posteriors]
    return template.render(version=library_versions()["hf-bayes"], posteriors=names) + "\n"  # type: ignore[no-any-return]


def _version_of_gradio() -> str:
    try:
        return importlib.metadata.version("gradio")
    except importlib.metadata.PackageNotFoundError:
        return _GRADIO
