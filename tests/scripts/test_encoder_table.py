from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.reproduce import encoder_table
from scripts.reproduce.debian_sections import KNOWN, UNKNOWN, Row, fingerprint, rows_of, splits
from scripts.reproduce.encoder_table_bench import Bench
from scripts.reproduce.encoder_table_methods import Scale, at_first_point, methods, num_gradients, num_updates, points
from scripts.reproduce.encoder_table_record import DIVERGED, best
from scripts.reproduce.report import spread
from tests.tiny_models import tiny_bert, tiny_tokenizer

INDEX = """\
Package: ardour
Section: sound
Description: audio recorder
 with more lines

Package: ardour-data
Source: ardour
Section: sound
Description: audio recorder (data)

Package: lmms
Source: studio (1.2)
Section: contrib/sound
Description: music station

Package: calf
Source: studio
Section: sound
Description: music plugins

Package: mixx
Section: sound
Description: audio recorder

Package: old
Section: sound
Description: transitional package

Package: libc
Section: libs
Description: C library
"""

SMALL = Scale(
    rows={"train": 16, "validation": 8, "test": 8, "ood": 8}, updates=40, members=2, seeds=2, tokens=8, batch_size=4
)


def test_each_source_package_gives_one_row_of_unique_text() -> None:
    assert rows_of(INDEX) == [Row("audio recorder", "sound"), Row("music station", "sound")]


def test_splits_share_no_row_and_ood_uses_other_sections() -> None:
    rows = [Row(f"{section} {i}", section) for section in (*KNOWN, *UNKNOWN) for i in range(4)]
    parts = splits(rows, {"train": 20, "test": 10, "ood": 30})
    assert [len(part) for part in parts.values()] == [20, 10, 30]
    assert len({row for part in parts.values() for row in part}) == 60
    assert {row.section for row in parts["train"]} <= set(KNOWN)
    assert {row.section for row in parts["ood"]} <= set(UNKNOWN)
    assert fingerprint(parts) != fingerprint({**parts, "test": parts["test"][::-1]})
    with pytest.raises(ValueError, match="2 rows left for 'test', 10 are wanted"):
        splits(rows, {"train": 30, "test": 10})


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Row]]:
    tiny_bert(num_labels=len(KNOWN)).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    monkeypatch.setattr(encoder_table, "encoder", lambda: tmp_path / "bert")
    rows = [Row(f"the {section} of package {i}", section) for section in (*KNOWN, *UNKNOWN) for i in range(5)]
    return splits(rows, SMALL.rows)


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, list[Row]]
) -> None:
    all_methods = methods(SMALL)
    grids = {"map": 2, "laplace_diagonal": 1, "agps_swag": 1}  # points of each
    few = {
        name: all_methods[name]._replace(
            grid={k: v[: size if k == "std" else 1] for k, v in all_methods[name].grid.items()}
        )
        for name, size in grids.items()
    }
    monkeypatch.setattr(encoder_table, "methods", lambda scale: few)
    ran: list[tuple[str, int]] = []
    run = Bench.run

    def counted(self: Bench, name: str, method: Any, choice: Any, seed: int, *args: Any, **options: Any) -> Any:
        ran.append((name, seed))
        return run(self, name, method, choice, seed, *args, **options)

    monkeypatch.setattr(Bench, "run", counted)
    path = tmp_path / "encoder_table.json"
    encoder_table.experiment(["map", "laplace_diagonal"], SMALL, parts, path)
    # the grid's points with one seed, then what was chosen with both; three rows are read off a run of Laplace's
    assert ran == [*[("map", 0)] * 3, ("map", 1), *[("laplace_diagonal", 0)] * 2, ("laplace_diagonal", 1)]
    ran.clear()
    record = encoder_table.experiment([], SMALL, parts, path)
    assert ran == [("agps_swag", 0), ("agps_swag", 0), ("agps_swag", 1)]
    assert record == json.loads(path.read_text())

    tables = encoder_table.blocks(record)
    assert all(row in tables["quality"] for row in ("MAP", "Laplace, diagonal, GLM", "SWAG of a-GPS"))
    assert "| MAP | 1 | 1 | 1.0 ± 0.0 | 1.0 ± 0.0 |" in tables["cost"]
    encoder_table.figures(record, tmp_path)
    assert (tmp_path / "encoder_table.png").exists()

    # diagnostics are those of the run, and a run that was kept without them, elsewhere, is made again
    cells = record["rows"]["Laplace, diagonal, GLM"]["cells"]
    moved = spread([numbers["diagnostics"]["distance"] for *_, numbers in cells], 2)
    assert f"| Laplace, diagonal, GLM | {moved} | - | - | - | - |" in tables["diagnostics"]
    seconds = {}
    for _, seed, numbers in record["rows"]["MAP"]["cells"]:
        del numbers["diagnostics"]
        numbers["processor"], seconds[seed] = "another", numbers["training"]
    record["rows"]["SWAG of a-GPS"]["cells"][0][-1]["processor"] = "another"
    path.write_text(json.dumps(record))
    assert "| MAP |" not in encoder_table.blocks(record)["diagnostics"]
    ran.clear()
    record = encoder_table.experiment([], SMALL, parts, path)
    assert ran == [("map", 0), ("map", 1)]
    agps, *_ = encoder_table.results(record)["SWAG of a-GPS"]
    points = encoder_table._map_on_the_same_machine(record, [agps])
    assert [point["training"] for point in points] == [seconds[0]]
    assert encoder_table._map_on_the_same_machine(record, [{"processor": "a third"}]) == []

    def of_no_cost(self: Bench, name: str, method: Any, choice: Any, seed: int, readings: Any, **options: Any) -> Any:
        ran.append((name, seed))
        return {row: {"nll": 1.0} for row in readings}

    monkeypatch.setattr(Bench, "run", of_no_cost)
    ran.clear()
    few["agps_swag"] = few["agps_swag"]._replace(accumulation=2)
    encoder_table.experiment([], SMALL, parts, path)
    assert {name for name, _ in ran} == {"agps_swag"}
    with pytest.raises(ValueError, match="other data or of another size"):
        encoder_table.experiment([], SMALL, {**parts, "test": parts["ood"]}, path)


def test_the_choice_is_the_validation_nll_alone() -> None:
    method = methods(SMALL)["map_long"]
    low, high, *_ = points(method.grid)
    kept = {"grid": [[low, DIVERGED], [high, 0.7], [{"std": 9.0}, 0.1]]}  # the last is of an older grid
    assert best(kept, method) == high
    with pytest.raises(ValueError, match="lower its learning rates"):
        best({"grid": [[low, DIVERGED]]}, method)


def test_runs_keep_to_the_budget_of_gradients() -> None:
    table_of = methods(SMALL)
    updates = {name: num_updates(SMALL, table_of[name], at_first_point(table_of[name])) for name in table_of}
    gradients = {name: num_gradients(SMALL, method) for name, method in table_of.items()}
    assert (updates["map"], gradients["map"]) == (40, 40)
    assert (updates["mean_field"], gradients["mean_field"]) == (80, 80)
    assert (updates["mean_field_pairs"], gradients["mean_field_pairs"]) == (40, 40)  # all of them are the warm start
    assert (updates["ivon"], gradients["ivon"]) == (74, 40 + 34 + 3)  # one update in fourteen takes a pair
    assert (updates["ekf"], gradients["ekf"]) == (16, 16 / 4)  # gradients of one row, of batches of four
    assert (updates["ekf_passes"], gradients["ekf_passes"]) == (8 * 16, 8 * 16 / 4)


def test_a_filter_reads_single_rows(parts: dict[str, list[Row]], tmp_path: Path) -> None:
    table_of, bench = methods(SMALL), Bench(SMALL, parts, tmp_path / "bert")
    counts = {}
    for name in ("ekf", "ekf_passes"):
        (row,), config = table_of[name].readings, at_first_point(table_of[name])
        assert config.prior_weight / config.temperature == 1  # q starts at the prior at any number of passes
        counts[name] = config.temperature / table_of[name].passes
        found = bench.run(name, table_of[name], {"learning_rate": 1.0, "std": 0.3}, 0, {row: None}, test=False)
        assert 0 < found[row]["nll"] < 10
    assert set(counts.values()) == {1.0}  # so that every row counts once
