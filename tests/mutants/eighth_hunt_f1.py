"""Planted faults: what was mended in a trainer after the eighth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
EIGHTH_HUNT_F1 = (
    Fault("eighth: SIGTERM saves in the middle of an update", "training/trainer.py",
          "save_at_the_end_of_updates(self, setup.mesh)", "pass",
          ("training/test_termination.py::test_a_run_that_sigterm_ended_resumes_bitwise[on_pre_optimizer_step]",)),
)
# fmt: on
