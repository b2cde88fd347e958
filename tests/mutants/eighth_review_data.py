"""Planted faults: what was mended in the data of the commands after the eighth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
EIGHTH_REVIEW_DATA = (
    Fault("eighth: a long cell of a table has no line", "cli/row_places.py",
          "csv.field_size_limit(_LONGEST_CELL)", "csv.field_size_limit()",
          ("cli/test_row_places.py::test_a_long_cell_hides_no_line",)),
    Fault("eighth: all rows of a class may be held out", "cli/hold_out.py",
          "if label_column in train.column_names:", "if False:",
          ("cli/test_hold_out.py::test_the_training_rows_keep_a_row_of_each_class",
           "cli/test_classifier.py::test_the_split_of_a_run_keeps_each_class")),
    Fault("eighth: the last row of a class is exchanged", "cli/hold_out.py",
          "all(counts[each] > 1 for", "all(counts[each] > 0 for",
          ("cli/test_hold_out.py::test_rows_move_alone_if_none_can_be_spared",)),
    Fault("eighth: a command does not say which column has the classes", "cli/classifier.py",
          "label_column=None if numbers else labels.label_column", "label_column=None",
          ("cli/test_classifier.py::test_the_split_of_a_run_keeps_each_class",)),
    Fault("eighth: texts are not cut at the model's context", "cli/classifier.py",
          "    give_length(cutting, longest, has_table=has_table)\n", "",
          ("cli/test_classifier.py::test_texts_are_cut_at_the_model_s_context",)),
    Fault("eighth: a row of a validation file keeps the kind of its own file", "cli/data.py",
          "with_kinds_of(load_files(group), splits[\"train\"])", "load_files(group)",
          ("cli/test_data.py::test_numbers_are_names_beside_a_file_with_names",)),
)
# fmt: on
