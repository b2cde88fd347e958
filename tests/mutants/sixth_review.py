"""Planted faults: what was mended after the sixth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
SIXTH_REVIEW = (
    Fault("sixth: settings of a schedule beside a constant rate", "training/checks/arguments.py",
          "    if args.lr_scheduler_kwargs:\n", "    if args.lr_scheduler_kwargs and not constant:\n",
          ("training/checks/test_arguments.py::test_settings_that_no_schedule_takes_are_refused",)),
    Fault("sixth: a regression's choice speaks of a temperature", "training/tuning/choice.py",
          'if "temperature" in chosen.metrics else ""', 'if chosen.metrics else ""',
          ("training/tuning/test_choice.py::test_the_sentence_of_a_regression_names_no_temperature",)),
    Fault("sixth: tune makes its repository at the end", "training/tuning/tune.py",
          "    if args.push_to_hub:  # as Trainer", "    if args.push_to_hub is None:  # as Trainer",
          ("training/tuning/test_tune.py::test_a_refused_token_stops_before_the_first_run",)),
)
