from __future__ import annotations

import pytest
import torch

from hf_bayes.core.types import UNNAMED
from hf_bayes.methods.variational.points import check_expression, random_elements

SHAPES = {"q.lora_A.d.weight": (2, 3), "q.lora_B.d.weight": (4, 2), "head.bias": (3,)}


def test_elements_are_random_unless_their_name_matches() -> None:
    assert random_elements("blob", None, SHAPES) is None
    expected = torch.tensor([True] * 6 + [False] * 8 + [True] * 3)
    assert torch.equal(random_elements("blob", "lora_B", SHAPES), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("points", "shapes", "words"),
    [
        ("lora_B", {UNNAMED: (5,)}, "theta is one tensor without names here: leave it out"),
        ("lora_C", SHAPES, r"matches no random parameter \(q\.lora_A.*: add LoRA, or name some of them"),
        ("", SHAPES, 'matches all random parameters, and nothing is left .* use method="map"'),
    ],
)
def test_names_that_leave_nothing_to_choose_are_refused(
    points: str, shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        random_elements("mean_field", points, shapes)


def test_what_is_no_expression_is_refused() -> None:
    check_expression("blob", "lora_B|classifier")
    for points in ("(", 3):
        with pytest.raises(ValueError, match="blob: points must be a regular expression, got"):
            check_expression("blob", points)  # type: ignore[arg-type]
