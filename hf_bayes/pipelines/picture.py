"""The tokens of one record as a picture, for a model card: the colours of ``to_html`` on a light background.

A model card shows no HTML of its own, but it shows a PNG file beside it. Every character takes one cell of a monospaced
font, so wide characters (Chinese, for example) are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hf_bayes.pipelines.rendering import CAPTIONS, LIGHT, Level, context_of, readable
from hf_bayes.uncertainty.colour_scale import scale_of

COLUMNS = 84
"""Characters of a line."""
_CELL = 0.0836, 0.235  # inches: the advance of DejaVu Sans Mono at 10 points, and a line
_MARGIN = 0.15
_PLAIN = Level("none", "#6a6a70")


def to_picture(record: Mapping[str, Any], *, measure: str = "epistemic", vmax: float | None = None) -> Figure:
    """Return a figure with the text of a record, its tokens coloured by their uncertainty, and the colour scale.

    Args:
        record: a record of the generation pipeline or of its ``score``.
        measure: "epistemic", "aleatoric" or "total".
        vmax: as for ``to_html``.
    Raises:
        ValueError: as ``to_html``.
    """
    scale = scale_of([record], measure, vmax)
    words = [(readable(context_of(record).prompt), _PLAIN)]
    words += [(readable(token["token"]), LIGHT.levels[scale.level(token)]) for token in record["tokens"]]
    cells = list(_laid_out(words))
    num_lines = max((line for line, *_ in cells), default=0) + 1
    width, height = COLUMNS * _CELL[0], (num_lines + 3) * _CELL[1]
    figure = Figure((width + 2 * _MARGIN, height + 2 * _MARGIN), dpi=150, facecolor=LIGHT.page)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((_MARGIN / (width + 2 * _MARGIN), _MARGIN / (height + 2 * _MARGIN),
                            width / (width + 2 * _MARGIN), height / (height + 2 * _MARGIN)))  # fmt: skip
    axes.set(xlim=(0, COLUMNS), ylim=(num_lines + 3, 0))
    axes.axis("off")
    font: dict[str, Any] = {"fontsize": 10, "family": "DejaVu Sans Mono", "va": "center_baseline", "parse_math": False}
    for line, column, text, level in cells:
        if level.background != "none":
            axes.add_patch(Rectangle((column, line + 0.06), len(text), 0.88, color=level.background, lw=0))
        axes.text(column, line + 0.5, text, color=level.text, ha="left", **font)
    for index, level in enumerate(LIGHT.levels):
        axes.add_patch(Rectangle((index, num_lines + 1), 1, 0.5, color=level.background, lw=0))
    axes.add_patch(Rectangle((0, num_lines + 1), len(LIGHT.levels), 0.5, fill=False, edgecolor="#c9c9cf", lw=0.6))
    for place, tick in zip(("left", "center", "right"), scale.ticks, strict=True):
        end = {"left": 0, "center": len(LIGHT.levels) / 2, "right": len(LIGHT.levels)}[place]
        axes.text(end, num_lines + 2.1, tick, ha=place, va="center", fontsize=8, color=_PLAIN.text)
    caption = CAPTIONS[measure].split(":")[0] + f"\n{scale.legend}"
    axes.text(len(LIGHT.levels) + 2, num_lines + 1.5, caption, va="center", fontsize=8, color=_PLAIN.text)
    return figure


def _laid_out(words: list[tuple[str, Level]]) -> Iterator[tuple[int, int, str, Level]]:
    """Yield (line, column, text, colours) of pieces that do not cross the end of a line: tokens, where they fit."""
    line, column = 0, 0
    for text, level in words:
        for index, part in enumerate(text.replace("\t", "    ").split("\n")):
            if index or (column and COLUMNS - column < len(part) <= COLUMNS):
                line, column = line + 1, 0
            while part:
                piece = part[: COLUMNS - column]
                if piece:
                    yield line, column, piece, level
                part, column = part[len(piece) :], column + len(piece)
                if part:
                    line, column = line + 1, 0
