"""Planted faults in ladders, in the method of a run without one, and in averages of iterates."""

from __future__ import annotations

from tests.mutants.fault import Fault

LADDER = "methods/test_ladder.py::"
REVIEWS = "methods/test_ladder_reviews.py::"
CHOICE = f"{LADDER}test_the_choice_is_the_lowest_nll_of_a_rungs_mixture"
FALLS = f"{REVIEWS}test_a_temperature_falls_when_a_lower_one_becomes_better"

# fmt: off
RECOMMENDED = (
    Fault("ladder: the worst rung is chosen", "methods/ladder.py",
          "int(nll.argmin())", "int(nll.argmax())", (CHOICE,)),
    Fault("ladder: only the first chain of a rung is looked at", "methods/ladder.py",
          "state.ladder_looks[rows].flatten(0, 1)", "state.ladder_looks[rows[:1]].flatten(0, 1)", (CHOICE,)),
    Fault("ladder: a chain that changes its temperature is not scaled", "methods/ladder.py",
          "part if ratio == 1 else own.rule.rescale(part, ratio)", "part",
          (f"{LADDER}test_the_choice_scales_the_chains_of_other_temperatures",)),
    Fault("ladder: a chain that is lost stays where it is", "methods/ladder.py",
          "(rows, rung.rule.restart(part, lost[rows]))", "(rows, part)",
          (f"{LADDER}test_a_lost_chain_goes_back_to_its_warm_start[one is lost]",)),
    Fault("ladder: every chain counts as lost", "methods/ladder.py",
          "lost = ~(nll - nll.nanmedian() <= LOST * nll.nanmedian().abs())", "lost = torch.ones_like(nll) > 0",
          (f"{LADDER}test_a_lost_chain_goes_back_to_its_warm_start[none is lost]",)),
    Fault("whitening: a chain that restarts keeps its step size", "methods/sgmcmc/whitening.py",
          "torch.where(chains, (self._allowed / variance).sqrt().clamp_max(MAX_STEP), state.step_size)",
          "state.step_size", (f"{LADDER}test_a_chain_that_restarts_has_the_step_of_its_start",)),
    Fault("ladder: a temperature is judged by its own chains only", "methods/ladder.py",
          "if self.scales:", "if False:",
          (f"{LADDER}test_a_temperature_is_judged_by_all_chains_scaled_to_it",)),
    Fault("ladder: a choice is not reviewed after the last draw", "methods/ladder.py",
          "if self.scales and draws.shape[1] == len(self.draws):", "if not self.draws:", (f"{FALLS}[4]",)),
    Fault("ladder: no draw after a fall is kept", "methods/ladder.py",
          "if bool(on.any()) else", "if False else", (f"{FALLS}[1]",)),
    Fault("ladder: a chain whose temperature falls stays where it went", "methods/ladder.py",
          "home, now = state._replace(theta=state.ladder_looks[:, -1]), None", "home, now = state, None",
          (f"{FALLS}[1]",)),
    Fault("ladder: a review has no margin for chance", "methods/ladder.py",
          "return difference < -(difference_std_error(other, now) or 0.0)", "return difference < 0.0",
          (f"{REVIEWS}test_chance_alone_makes_no_temperature_fall[1.2-False]",)),
    Fault("ladder: the record keeps the temperature of before", "methods/ladder.py",
          '{"ladder": None, "temperature": self.rungs[index].temperature, **self.config.rungs[index]}',
          '{"ladder": None}',
          (f"{LADDER}test_the_rest_of_the_run_has_the_chosen_settings",)),
    Fault("heat is averaged over all directions", "methods/sgmcmc/whitening.py",
          "torch.where(informed, along.square(), 0.0).sum(1) / informed.sum(1)", "along.square().mean(1)",
          ("methods/sgmcmc/test_whitening.py::test_heat_is_measured_where_the_data_outweigh_the_prior[1.5]",)),
    Fault("a method is chosen by too few held-out rows", "methods/recommended.py",
          "elif held < least:", "elif not held:",
          ("methods/test_recommended.py::test_without_a_choice_it_is_an_ensemble",)),
    Fault("swa: AdamW's iterates are SGD's", "methods/averaging/swa.py",
          'if self.optimizer == "sgd":\n            return super().build',
          "if self.optimizer:\n            return super().build",
          ("methods/averaging/test_swa.py::test_the_iterates_are_by_default_those_of_adamw",)),
    Fault("swa: a found rate falls", "methods/averaging/swa.py",
          'learning_rate="range_test", rate_falls=False', 'learning_rate="range_test"',
          ("objectives/test_own_settings.py::test_an_average_of_iterates_keeps_the_rate_that_was_found",)),
    Fault("cross-fitting: a run sees the rows that it is judged on", "training/cross_fitting.py",
          'sorted(set(order.tolist()) - set(folds[fold]))', "sorted(order.tolist())",
          ("training/test_cross_fitting.py::test_it_sees_that_labels_were_learnt_by_heart",)),
    Fault("mirrored chains: the spread counts both of a pair", "objectives/spread.py",
          "kept = found.chain % 2 == 0", "kept = found.chain >= 0",
          ("objectives/test_spread.py::test_of_a_mirrored_pair_one_draw_counts",)),
    Fault("mirrored chains count one by one", "diagnostics/measurements.py",
          "return (num_chains + 1) // 2 if mirrored else num_chains", "return num_chains",
          ("diagnostics/test_measurements.py::test_mirrored_chains_count_in_pairs",)),
    Fault("drift: trajectories with the opposite force", "objectives/drift.py",
          "velocity = state[1] - STEP * force", "velocity = state[1] + STEP * force",
          ("objectives/test_drift.py::test_a_gaussian_twice_as_wide_drifts_to_about_half",)),
    Fault("windows: the model's context is not looked at", "cli/token_windows.py",
          "return default if longest is None else min(default, longest)", "return default",
          ("cli/test_token_windows.py::test_a_window_is_no_longer_than_the_context",)),
)
# fmt: on
