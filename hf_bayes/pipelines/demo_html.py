"""The tokens of a record as a part of the demo's page: colours as in ``to_html``, marks, and a table of the numbers.

Texts come from a model and are not trusted: the template engine escapes HTML.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hf_bayes.pipelines.rendering import CAPTIONS, DARK, LIGHT, readable, shown_token
from hf_bayes.uncertainty.colour_scale import PARTS, scale_of

_TEMPLATES = Path(__file__).parent / "templates"


def tokens_html(
    name: str,
    prompt: str,
    tokens: Sequence[Mapping[str, Any]],
    *,
    measure: str,
    threshold: float,
    num_members: int | None = None,
    running: bool = False,
    error: str | None = None,
) -> str:
    """Return the HTML of the tokens of one posterior.

    Args:
        name: the name of the posterior.
        tokens: the records of the tokens so far.
        measure: the quantity of the colours and of the marks: "epistemic", "aleatoric" or "total".
        threshold: tokens above this number of nats are marked.
        num_members: M, if members are averaged.
        running: True while more tokens follow.
        error: a sentence that is shown in place of further tokens.
    Raises:
        ValueError: for an unknown measure.
    """
    scale = scale_of([{"tokens": tokens, "num_members": num_members}], measure, None)
    marked = [token[measure] > threshold for token in tokens]
    members = "" if num_members is None else f"{num_members} member{'' if num_members == 1 else 's'}"
    return (
        _environment()
        .get_template("demo_tokens.html")
        .render(
            name=readable(name),
            note=members,
            prompt=readable(prompt),
            error=error,
            running=running,
            levels=LIGHT.levels,
            ticks=scale.ticks,
            caption=f"{CAPTIONS[measure]} Colours: {scale.legend}.",
            threshold=f"{threshold:g}",
            num_marked=sum(marked),
            means={part: f"{sum(token[part] for token in tokens) / max(1, len(tokens)):.3f}" for part in PARTS},
            tokens=[
                {
                    "level": scale.level(token),
                    "marked": is_marked,
                    "probability": f"{math.exp(min(0.0, token['logprob'])):.3f}",
                    **{part: f"{token[part]:.3f}" for part in PARTS},
                    **shown_token(token),
                }
                for token, is_marked in zip(tokens, marked, strict=True)
            ],
        )
    )


def styles() -> str:
    """Return the CSS of the page."""
    return _environment().get_template("demo.css").render(themes={"light": LIGHT, "dark": DARK})


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
