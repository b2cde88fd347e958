from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import bounds, breakdown, laplace_torch, scaling, table
from benchmarks.harness import Line, interleave, ratio, timed
from benchmarks.models import WHERE, Subject


@pytest.mark.parametrize("name", table.RECORDS)
def test_the_document_shows_the_numbers_that_were_measured(name: str) -> None:
    document = table.DOCUMENT.read_text()
    assert document == table.replaced(document, name, table.block(name)), "run python -m benchmarks.table"


def test_the_row_that_the_page_explains_is_one_of_its_table() -> None:
    explanation, tables = table.DOCUMENT.read_text().split("<!-- cpu: begin -->")
    (example,) = [line.strip() for line in explanation.splitlines() if line.startswith("    | ")]
    assert example in tables.splitlines()


def test_the_document_shows_the_scaling_that_was_measured() -> None:
    document, file = scaling.DOCUMENT.read_text(), table.RESULTS / "scaling.json"
    text = scaling.render(json.loads(file.read_text())) if file.exists() else "No run is kept yet."
    assert document == table.replaced(document, "scaling", text), "run python -m benchmarks.scaling"


def test_the_document_shows_the_measured_laplace_torch_results() -> None:
    document, file = laplace_torch.DOCUMENT.read_text(), table.RESULTS / "laplace_torch.json"
    text = laplace_torch.render(json.loads(file.read_text())) if file.exists() else "No run is kept yet."
    assert document == table.replaced(document, "laplace-torch", text), "run python -m benchmarks.laplace_torch"


def test_the_readme_has_the_speeds_that_were_measured_on_a_gpu() -> None:
    lines = json.loads((table.RESULTS / "cuda.json").read_text())["lines"]
    (line,) = [line for line in lines if line["unit"] == "tokens/s" and "all layers" in line["work"]]
    ours, single, loop = line["value"], line["others"]["single"], line["others"]["set_adapter"]
    words = f"{ours:.0f} tokens a second](docs/benchmarks.md#a-gpu), the plain model {single:.0f}, and a loop over ten"
    readme = " ".join((table.ROOT / "README.md").read_text().split())
    assert f"{words} adapters {loop:.1f}." in readme


def test_a_changed_number_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line("decode", "decode", "x single", 1.5, (1.4, 1.6), limit=1.9, others={"loop": 9.0})
    about = dict.fromkeys(
        ("accelerator", "processor", "threads", "system", "python", "torch", "transformers", "peft"), "?"
    )
    record = {"machine": {**about, "hf_bayes": "0"}, "model": "30M", "dtype": "float32", "rounds": 9}
    record["load_before"] = 0.25
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    (tmp_path / "cpu.json").write_text(json.dumps({**record, "lines": [line.to_json()]}))
    document = table.replaced(table.DOCUMENT.read_text(), "cpu", table.block("cpu"))
    assert "; load 0.2 beforehand." in document
    assert "| decode | 1.5 x single | 1.4 to 1.6 | at most 1.9 |  | loop 9 |" in document
    assert document != table.replaced(document, "cpu", table.block("cpu").replace("1.5", "1.6"))


def test_the_breakdown_counts_each_operation_once() -> None:
    x = torch.randn(256, 256)

    def work() -> float:
        time.sleep(0.05)
        return timed(lambda: torch.cat([x @ x, x]).exp().sum())

    found = breakdown.look("a work", work, counted=1e6, best=1e9, limit="products")
    assert all(found.shares[kind] > 0 for kind in ("matrix products", "copies", "elementwise", "reductions"))
    assert found.shares["attention"] == 0
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["Python"] > 0.5  # it slept
    assert found.rate == pytest.approx(1e-3 / found.seconds)
    text = table.breakdown({"best": {"products": 1e11, "reading": 1e10}, "rows": [dataclasses.asdict(found)]})
    assert "100 G multiply-adds a second (matrices of 2048 x 2048), 40 GB read a second" in text
    assert "| a work |" in text


@pytest.mark.parametrize(
    ("at", "interval", "holds"),
    [
        ("most", (1.8, 2.0), True),
        ("most", (1.95, 2.0), False),
        ("least", (1.8, 2.0), True),
        ("least", (1.7, 1.8), False),
    ],
)
def test_a_line_holds_if_its_interval_reaches_the_limit(at: str, interval: tuple[float, float], holds: bool) -> None:
    assert Line("", "", "", sum(interval) / 2, interval, limit=1.9, at=at).holds is holds


def test_rounds_are_interleaved_and_the_first_is_not_counted() -> None:
    calls: list[str] = []

    def work(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    seconds = interleave({name: lambda name=name: work(name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "abcabcbca"
    assert seconds == {"a": [4, 9], "b": [5, 7], "c": [6, 8]}


def test_the_ratio_is_of_minima_and_lies_in_its_interval() -> None:
    value, (low, high) = ratio([3.0, 2.0, 2.5], [1.0, 1.25, 2.0], times=0.5)
    assert value == 1.0
    assert low <= value <= high
    assert high > low


def test_counted_bounds_are_those_of_a_count_by_hand() -> None:
    """Millions of weights of the 30M Llama: a layer 3.2113 (q, k and v 0.7864 of it), head 4.1943, LoRA 0.032768."""
    subject = Subject("30M", "cpu", "float32")
    layer = 3.2113 + 512 * 128 / 1e6
    plain, last, shared = 8 * layer + 4.1943, layer + 0.032768 + 4.1943, 7 * 0.7864
    hand = (8 * (plain + 8 * 0.032768) - shared) / plain
    assert bounds.prefill(subject, WHERE[0], 8, 128, heads=128) == pytest.approx(hand, rel=1e-4)
    hand = (7 * layer + 8 * last - shared) / plain
    assert bounds.prefill(subject, WHERE[1], 8, 128, heads=128) == pytest.approx(hand, rel=1e-4)
    feed_forward, head = 3 * 512 * 1408 / 1e6, 4.1943 / 128  # the head at one position of 128
    last = layer + 0.032768 + head - feed_forward * 127 / 128
    hand = (7 * layer + 8 * last - shared) / (8 * layer + head)
    assert bounds.prefill(subject, WHERE[1], 8, 128, heads=1) == pytest.approx(hand, rel=1e-4)
    own = 2 * (3.2113 - 0.7864 + 4.1943)
    trunk = 7 * 3.2113 + 0.7864
    assert bounds.training(subject, WHERE[1], 8) == pytest.approx((trunk / 8 + own) / (trunk + own), rel=1e-4)
    assert bounds.decode(subject, WHERE[2], 1, 96) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("group", [group for groups in command.GROUPS.values() for group in groups])
def test_every_group_runs_on_a_tiny_model_and_can_be_shown(group: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ["--shape", "tiny", "--rounds", "1", "--threads", "1", "--output", str(file)]
    command.main([*options, "--only", group])
    record = json.loads(file.read_text())
    assert len(table.render(record).splitlines()) == 4 + len(record["lines"])
    assert all(line["value"] > 0 for line in record["lines"])
