"""Records of the generation pipeline as a picture: tokens coloured by their uncertainty, in HTML or in a terminal.

The colours are ColorBrewer's YlOrBr: one hue family with strictly monotone lightness. They keep their order for
colour-blind readers, on a grey printer and, reversed, on a dark background. Texts come from a model and are not
trusted: the template engine escapes HTML, the page forbids scripts, and characters that are invisible or control a
terminal become visible codes.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from rich.console import Console
from rich.style import Style
from rich.text import Text

from hf_bayes.core.number_checks import is_number
from hf_bayes.core.text_safety import HIDDEN, code
from hf_bayes.uncertainty.colour_scale import NUM_LEVELS, PARTS, Record, Scale, scale_of

_TEMPLATES = Path(__file__).parent / "templates"
CAPTIONS = {
    "epistemic": "Epistemic uncertainty of each token in nats: what the members of the posterior disagree about.",
    "aleatoric": "Aleatoric uncertainty of each token in nats: what every member by itself leaves open.",
    "total": "Total uncertainty of each token in nats: the entropy of the posterior predictive.",
}
_STOPS = ("#fff7bc", "#fee391", "#fec44f", "#fe9929", "#ec7014", "#cc4c02", "#993404", "#662506")
_INKS = ("#000000", "#ffffff")  # of these two, one has a contrast of 4.5 or more with any colour (WCAG AA)
_LARGEST = sys.float_info.max
_ROUNDING = 1e-3  # rounding may leave a log-probability slightly above 0
_MINUS = "\N{MINUS SIGN}"
_SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)  # the names of special tokens
# One space before a word or between two needs no mark.
_PIECES = re.compile(f"(?P<newline>\n)|(?P<tab>\t)|(?P<control>{HIDDEN.pattern})|(?P<space>  +|^ +$| +(?=[\n\t])| +$)")


class Level(NamedTuple):
    """A step of the colour scale."""

    background: str
    text: str


class Theme(NamedTuple):
    """Colours on a light or a dark background."""

    page: str
    accent: str
    levels: tuple[Level, ...]


def _theme(page: str, accent: str, stops: Sequence[str]) -> Theme:
    path = [_rgb(stop) for stop in (page, *stops)]
    levels = []
    for level in range(NUM_LEVELS + 1):
        place = level / NUM_LEVELS * (len(path) - 1)
        start = min(int(place), len(path) - 2)
        mixed = [a + (place - start) * (b - a) for a, b in zip(path[start], path[start + 1], strict=True)]
        background = "#" + "".join(f"{round(value):02x}" for value in mixed)
        levels.append(Level(background, max(_INKS, key=lambda ink: _contrast(ink, background))))
    return Theme(page, accent, tuple(levels))


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb", from 0 to 1 (WCAG 2)."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in _rgb(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


LIGHT = _theme("#ffffff", "#ec7014", _STOPS)
DARK = _theme("#17181c", "#fe9929", _STOPS[::-1])


# -- common to both renderings --------------------------------------------------------------------------------------


def _flat(records: Any) -> list[Record]:
    """Return the records of any nesting that pipelines return as one list."""
    if isinstance(records, Mapping):
        if not records.get("tokens"):
            raise ValueError(
                "a record to render has 'tokens', as from \"bayesian-text-generation\" or its score(); "
                f"got one with {', '.join(map(repr, records)) or 'nothing'}"
            )
        _check(records)
        return [records]
    if not isinstance(records, Iterable) or isinstance(records, str | bytes):
        raise ValueError(
            'a record to render is what "bayesian-text-generation" or its score() returns, or lists of it; '
            f"got {records!r:.100}"
        )
    flat = [record for item in records for record in _flat(item)]
    if not flat:
        raise ValueError("no records to render")
    return flat


def _check(record: Record) -> None:
    """Raise for a token without its text, and for numbers that have no colour and no height.

    A NaN is neither above nor below another number: the scale of all tokens would depend on its place.
    """
    for index, token in enumerate(record["tokens"]):
        match token:
            case {"token": str(text)}:
                _check_numbers(token, ("logprob",), f"token {index} ({text!r:.40})")
            case _:
                raise ValueError(f"token {index} of a record to render has its text as 'token', got {token!r:.100}")
    if not isinstance(record.get("uncertainty"), Mapping):
        raise ValueError(
            "a record to render has the means of its tokens as 'uncertainty', "
            f"got one with {', '.join(map(repr, record))}"
        )
    _check_numbers(record["uncertainty"], ("sequence_logprob", "sequence_logprob_tokenwise"), "'uncertainty'")


def _check_numbers(values: Record, logprobs: Sequence[str], what: str) -> None:
    for name in (*PARTS, *logprobs):
        value = values.get(name)
        expected, lowest, highest = (
            ("a log-probability, 0 or below", -math.inf, _ROUNDING)  # of what is impossible, -inf
            if name in logprobs
            else ("a finite number of nats", -_LARGEST, _LARGEST)
        )
        if not is_number(value) or not lowest <= value <= highest:
            raise ValueError(
                f"{what} of a record to render: {name!r} is {expected}, got {value!r:.40}. Leave the record out"
            )


class TextContext(NamedTuple):
    """The context of the tokens: a chat's earlier messages, the role of the message, the beginning of the text."""

    messages: list[dict[str, str]]
    role: str
    prompt: str


def context_of(record: Record) -> TextContext:
    """Return the context of the tokens of a record, of generated text or of ``score``."""
    text, messages, role = record.get("generated_text", record.get("text", "")), [], ""
    if isinstance(text, str) and "generated_text" not in record:
        text = record.get("prompt", "") + text
    if not isinstance(text, str):
        messages = [{"role": readable(str(turn["role"])), "content": readable(_said(turn))} for turn in text[:-1]]
        role, text = readable(text[-1]["role"]), _said(text[-1])
    return TextContext(
        messages, role, readable(text[: _start_of([token["token"] for token in record["tokens"]], text)])
    )


def _start_of(tokens: Sequence[str], text: str) -> int:
    """Return where ``tokens`` begin, which end ``text``; 0 if it does not end with them.

    Special tokens are in a record under their names, and not in the text: the last one (whatever its name), and others.
    """
    start = len(text)
    for place, token in reversed(list(enumerate(tokens, 1))):
        if text.endswith(token, 0, start):
            start -= len(token)
        elif place != len(tokens) and not _SPECIAL.fullmatch(token):
            return 0
    return start


def _said(turn: Mapping[str, Any]) -> str:
    """Return the text of a message with the types of its other parts, or its fields if it has none, as a tool call."""
    match turn.get("content"):
        case str(content):
            return content
        case [*parts] if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
            return "".join(str(part["text"]) if part["type"] == "text" else f"[{part['type']}]" for part in parts)
    return str({name: turn[name] for name in turn if name != "role"})


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".replace("-", _MINUS)


def readable(text: str) -> str:
    """Return ``text`` with a visible code in place of every character that acts or that is not seen."""
    return HIDDEN.sub(code, text)


# -- HTML -----------------------------------------------------------------------------------------------------------


def to_html(
    record_or_records: Any, *, measure: str = "epistemic", title: str | None = None, vmax: float | None = None
) -> str:
    """Return a page of HTML without network access or scripts. Pointing at a token shows its numbers.

    Args:
        record_or_records: a record of the generation pipeline or of its ``score``, or lists of them, on one scale.
        measure: the quantity shown by the colours: "epistemic", "aleatoric" or "total".
        title: the title of the page.
        vmax: nats at the dark end of the scale; None takes a fixed reference (``colour_scale.REFERENCES``): 1 nat of
            epistemic, 4 nats of aleatoric or total uncertainty. The legend states it.
    Raises:
        ValueError: for records without tokens or with invalid numbers, an unknown measure, or a vmax that is not
            positive.
    """
    records = _flat(record_or_records)
    scale = scale_of(records, measure, vmax)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    widest = max(record["uncertainty"]["total"] for record in records)
    highest = max(token["total"] for record in records for token in record["tokens"])
    return environment.get_template("heat_map.html").render(
        title=readable(title or f"{measure.capitalize()} uncertainty, token by token"),
        themes={"light": LIGHT, "dark": DARK},
        ticks=scale.ticks,
        legend=scale.legend,
        caption=CAPTIONS[measure],
        measure=measure,
        records=[
            _page_record(index, record, scale, widest or 1.0, highest or 1.0) for index, record in enumerate(records, 1)
        ],
    )


def _page_record(index: int, record: Record, scale: Scale, widest: float, highest: float) -> dict[str, Any]:
    context = context_of(record)
    tokens, uncertainty = record["tokens"], record["uncertainty"]
    text = context.prompt + "".join(token["token"] for token in tokens)
    return {
        "heading": f"Record {index}",
        "excerpt": readable(" ".join(text.split())[:120]),
        **context._asdict(),
        "tokens": [{"level": scale.level(token), **shown_token(token)} for token in tokens],
        "highest": _number(max(token[scale.measure] for token in tokens)),
        "widths": [f"{max(0.0, 100 * uncertainty[part] / widest):.2f}" for part in ("aleatoric", "epistemic")],
        "paths": {part: _steps([token[part] / highest for token in tokens]) for part in ("total", "aleatoric")},
        **{part: _number(uncertainty[part]) for part in PARTS},
        **{name: _number(uncertainty[name], 2) for name in ("sequence_logprob", "sequence_logprob_tokenwise")},
    }


def shown_token(token: Record) -> dict[str, Any]:
    """Return the numbers of a token as lines of text, and its text as (kind, text) parts for a template."""
    lines = [f"{part:<10}{_number(token[part]):>9} nats" for part in reversed(PARTS)]
    lines.append(f"{'log p':<10}{_number(token['logprob']):>9}  p {100 * math.exp(token['logprob']):.3g} %")
    lines.append(f"{'id':<10}{token['id']:>9}")
    return {"numbers": "\n".join(lines), "parts": _parts(token["token"])}


def _parts(token: str) -> list[tuple[str, str]]:
    """Split a token into (kind, text): visible "text", or white space and controls, which need a mark."""
    if not token:
        return [("part", "")]
    parts, start = [], 0
    for match in _PIECES.finditer(token):
        kind = str(match.lastgroup)
        parts.append(("text", token[start : match.start()]))
        parts += [(kind, readable(character)) for character in match[0]]
        start = match.end()
    return [(kind, text) for kind, text in [*parts, ("text", token[start:])] if text]


def _steps(heights: Sequence[float]) -> str:
    """Return an SVG path with one step of width 1 for each height, from below; 1 is the top."""
    steps = "".join(f"V{1 - max(0.0, height):.4f}h1" for height in heights)
    return f"M0 1{steps}V1Z"


# -- terminal -------------------------------------------------------------------------------------------------------


def to_terminal(
    record_or_records: Any, *, measure: str = "epistemic", vmax: float | None = None, dark: bool = True
) -> Text:
    """Return text for ``rich``: the tokens in the colours of ``to_html``, a scale, and the means.

    Args:
        record_or_records: as in ``to_html``.
        measure: as in ``to_html``.
        vmax: as in ``to_html``.
        dark: True for a terminal with a dark background.
    Raises:
        ValueError: as ``to_html``.
    """
    records = _flat(record_or_records)
    scale, theme = scale_of(records, measure, vmax), DARK if dark else LIGHT
    styles = [Style(), *(Style(bgcolor=level.background, color=level.text) for level in theme.levels[1:])]
    text = Text()
    for record in records:
        context = context_of(record)
        for message in context.messages:
            text.append(f"{message['role']}: {message['content']}\n", "dim")
        text.append(f"{context.role}: " if context.role else "", "dim")
        text.append(context.prompt, "dim")
        for token in record["tokens"]:
            shown = readable(token["token"]).replace("\n", "↵\n").replace("\t", "→   ")
            text.append(shown, styles[scale.level(token)])
        text.append("\n")
        mean = record["uncertainty"]
        parts = "  ".join(f"{part} {_number(mean[part])}" for part in PARTS)
        text.append(
            f"mean {parts} nats;  log p(sequence) {_number(mean['sequence_logprob'], 2)},"
            f"  Σ log p(token) {_number(mean['sequence_logprob_tokenwise'], 2)}\n\n",
            "dim",
        )
    first, _, last = scale.ticks
    text.append(f"{measure} {first} ")
    for style in styles:
        text.append(" ", style)
    text.append(f" {last}\n{scale.legend}")
    return text


def print_record(record_or_records: Any, *, console: Console | None = None, **options: Any) -> None:
    """Print the tokens of records in the colours of an uncertainty, with a scale and the means.

    Args:
        record_or_records: as in ``to_html``.
        console: a console of ``rich``; None prints to the standard output.
        options: ``measure``, ``vmax`` (nats) and ``dark`` of ``to_terminal``.
    Raises:
        ValueError: as ``to_html``.
    """
    (console or Console()).print(to_terminal(record_or_records, **options), soft_wrap=False)
