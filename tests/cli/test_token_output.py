from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_bayes.cli.token_output import OutputArguments, show

NUMBERS = {"logprob": -1.5, "total": 0.75, "aleatoric": 0.5, "epistemic": 0.25}
MEANS = {**NUMBERS, "sequence_logprob": -3.0, "sequence_logprob_tokenwise": -3.1}
RECORD: dict[str, Any] = {
    "text": "a [b]",
    "tokens": [{"token": " [b]", "id": 5, **NUMBERS}, {"token": "\x1b\n", "id": 6, **NUMBERS}],
    "uncertainty": MEANS,
}


def test_a_table_has_a_row_for_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    show([RECORD], OutputArguments())
    header, first, second, last, whole = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["token", "log-probability", "total", "aleatoric", "epistemic"]
    assert first == ["[b]", "-1.500", "0.750", "0.500", "0.250"]
    assert second == ["U+001BU+000A", "-1.500", "0.750", "0.500", "0.250"]
    assert last == ["2", "tokens", "-3.100", "0.750", "0.500", "0.250"]  # the sum, as a heat map has it
    assert whole == ["log", "p(sequence)", "-3.000"]


def test_of_several_tables_each_has_the_text_as_title(capsys: pytest.CaptureFixture[str]) -> None:
    generated = {name: value for name, value in RECORD.items() if name != "text"}
    texts = ["first\nline [b]\x1b\n", f"{'long ' * 30} [b]\x1b\n"]
    show([*({**generated, "generated_text": text} for text in texts), RECORD], OutputArguments())
    lines = capsys.readouterr().out.splitlines()
    places = [place for place, line in enumerate(lines) if line.startswith("token")]
    assert len(places) == 3
    titles = [lines[place - 1].rstrip() for place in places]
    assert titles[0] == "1. first line"
    assert titles[1].startswith("2. long long ")
    assert titles[1].endswith("…")
    assert titles[2] == "3. a [b]"


def test_json_has_a_line_for_each_text(capsys: pytest.CaptureFixture[str]) -> None:
    show([RECORD, RECORD], OutputArguments(json=True))
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [RECORD, RECORD]


def test_json_has_null_where_a_number_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    show([{**RECORD, "tokens": [{**RECORD["tokens"][0], "logprob": float("-inf")}]}], OutputArguments(json=True))
    printed = capsys.readouterr().out
    assert "Infinity" not in printed
    assert json.loads(printed)["tokens"][0]["logprob"] is None


def test_a_page_is_written_beside_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show([RECORD], OutputArguments(html=str(tmp_path / "map.html")))
    assert "[b]" in (tmp_path / "map.html").read_text()
    assert "log-probability" in capsys.readouterr().out
