"""docs/multi_gpu.md says what the record of the launches says."""

from __future__ import annotations

import json

from benchmarks.table import replaced
from tests.processes import agreement


def test_the_page_shows_how_closely_launches_agreed():
    record, page = json.loads(agreement.RECORD.read_text()), agreement.DOCUMENT.read_text()
    assert page == replaced(page, "agreement", agreement.render(record)), "run python -m tests.processes.agreement"
    for row, (_, limit) in agreement.ROWS.items():
        found = record["rows"][row]
        assert list(found) == [str(processes) for processes in sorted(agreement.LAYOUTS)]
        assert found["4"] is not None
        assert all(value <= limit for value in found.values() if value is not None), row
