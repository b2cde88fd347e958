"""The figure of a tuning."""

from __future__ import annotations

from pathlib import Path

from matplotlib.image import imread

from hf_bayes.training.tuning.figure import draw
from tests.training.tuning.test_choice import scored
from tests.training.tuning.test_record import trial


def test_the_figure_has_a_row_for_every_method_that_ran(tmp_path: Path) -> None:
    plain, failed = scored("plain", 0.0, 1), trial("swag", nll=[], failure="diverged")
    rounds = [plain, scored("ensemble", 0.1, 4), scored("sghmc", -0.2, 16), failed], [plain, scored("ensemble", 0.1, 4)]
    draw(rounds, plain, tmp_path / "tuning.png")
    few = imread(tmp_path / "tuning.png")
    draw(([plain, failed], [plain]), plain, tmp_path / "one.png")
    one = imread(tmp_path / "one.png")
    assert few.shape[1] == one.shape[1]
    assert few.shape[0] - one.shape[0] == round(2 * 0.35 * 130)  # two rows more
