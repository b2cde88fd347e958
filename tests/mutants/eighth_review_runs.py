"""Planted faults: what was mended in runs after the eighth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
EIGHTH_REVIEW_RUNS = (
    Fault("eighth: SIGTERM saves in the middle of an update", "training/trainer.py",
          "save_at_the_end_of_updates(self, setup.mesh)", "pass",
          ("training/test_termination.py::test_a_run_that_sigterm_ended_resumes_bitwise[on_pre_optimizer_step]",)),
    Fault("eighth: a process ends a run alone", "training/termination.py",
          "any(self._mesh.share(self.jit_manager.is_checkpoint_requested))", "self.jit_manager.is_checkpoint_requested",
          ("training/test_termination.py::test_processes_end_at_the_same_update",)),
    Fault("eighth: generators that a collator holds are not seeded", "training/data/generators.py",
          "                _seed(value, seed)\n", "                pass\n",
          ("training/data/test_generators.py::test_held_generators_are_seeded_and_go_on",)),
    Fault("eighth: NumPy's numbers are used up by the probe", "training/data/generators.py",
          "after.callback(np.random.set_state, numpy_)", "pass",
          ("training/data/test_generators.py::test_generators_go_on_after_seeded_draws",
           "training/test_private_hooks.py::test_a_collator_that_draws_resumes_with_a_probe")),
    Fault("eighth: the probe of a resumed run has other rows", "training/data/generators.py",
          "    with undisturbed(*holders):\n        seed_all(seed)\n", "    with undisturbed(*holders):\n",
          ("training/data/test_generators.py::test_seeded_draws_follow_from_the_seed_alone",)),
    Fault("eighth: held-out rows of a resumed run are other ones", "training/data/heldout_rows.py",
          "return seeded_batches(batches, self._host.args.seed, dataset, collate)", "return batches",
          ("training/data/test_heldout_rows.py::test_rows_by_number_are_the_same_at_any_time",)),
    Fault("eighth: metrics are those of whatever members the model shows", "training/outcome.py",
          "self.finished.restore()", "pass",
          ("training/test_outcome.py::test_metrics_are_those_of_the_posterior_that_is_saved[show]",
           "training/test_outcome.py::test_metrics_are_those_of_the_posterior_that_is_saved[train]")),
)
# fmt: on
