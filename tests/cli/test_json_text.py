"""Results in JSON, as every reader of JSON accepts them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hf_bayes.cli.json_text import json_text


def refuse(constant: str) -> Any:
    raise ValueError(constant)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_is_null(number: float) -> None:
    text = json_text({"scores": [1.5, number], "nll": {"mean": number}, "name": "é"}, indent=2)
    assert json.loads(text, parse_constant=refuse) == {"scores": [1.5, None], "nll": {"mean": None}, "name": "é"}
    with pytest.raises(ValueError, match=r"NaN|Infinity"):  # what json writes by itself
        json.loads(json.dumps(number), parse_constant=refuse)
