"""Planted faults: what was mended in the data of the commands after the eighth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
EIGHTH_HUNT_F2 = (
    Fault("eighth: a long cell of a table has no line", "cli/row_places.py",
          "csv.field_size_limit(_LONGEST_CELL)", "csv.field_size_limit()",
          ("cli/test_row_places.py::test_a_long_cell_hides_no_line",)),
)
# fmt: on
