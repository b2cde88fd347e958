"""Planted faults: what was mended after the seventh review."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
SEVENTH_REVIEW = (
    Fault("seventh: rows of a trained head get the names of the sorted classes", "cli/labels.py",
          "if sorted(names) == sorted(known):", "if False:",
          ("cli/test_classifier.py::test_classes_that_the_model_predicts_keep_its_order",)),
    Fault("seventh: labels keep the numbers of the sorted classes", "cli/labels.py",
          "{value: ordered.index(names[number]) for value, number in index.items()}", "dict(index)",
          ("cli/test_labels.py::test_rows_have_the_classes_of_the_known_order",)),
    Fault("seventh: names that no model has learnt fix the order of classes", "cli/arguments.py",
          'not all(name.startswith("LABEL_") for name in names)', "True",
          ("cli/test_classifier.py::test_names_that_nobody_gave_are_no_classes",)),
    Fault("seventh: a difference that is not shown is told", "training/map_comparison.py",
          "<= max(2 * std_error, SHOWN):", "<= 2 * std_error:",
          ("training/test_map_comparison.py::test_a_difference_within_two_standard_errors_is_not_told",)),
    Fault("seventh: names that were read as numbers are not explained", "cli/model_labels.py",
          "(_NUMBERS if numbers and", "(_NUMBERS if not numbers and",
          ("cli/test_model_labels.py::test_names_that_a_table_has_read_as_numbers_are_explained",)),
)
# fmt: on
