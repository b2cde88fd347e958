"""Planted faults in what a run without a learning rate chooses by itself."""

from __future__ import annotations

from tests.mutants.fault import Fault

WHITENED = "methods/sgmcmc/test_whitening.py::"
ALONG = "methods/sgmcmc/test_steps_along_the_way.py::"
DIRECTIONS = f"{WHITENED}test_all_directions_have_the_posteriors_variance[1.0-sghmc]"
STEP_SIZE = f"{WHITENED}test_the_step_size_is_that_of_the_allowed_heating"
HOT = f"{ALONG}test_a_chain_that_heats_takes_smaller_steps[heat]"
ROOTS = "methods/sgmcmc/test_covariance_roots.py::"

# fmt: off
OWN_CHOICES = (
    # -- whitening
    Fault("whitening: the gradient is multiplied by the root twice", "methods/sgmcmc/whitening.py",
          "self.roots.transposed(state.root, ", "self.roots.transposed(state.root.square(), ", (DIRECTIONS,)),
    Fault("whitening: the gradient of the prior is left out", "methods/sgmcmc/whitening.py",
          "self.config.prior_weight * self.problem.prior.grad(theta)", "torch.zeros_like(theta)", (DIRECTIONS,)),
    Fault("whitening: the precision of the prior is left out of the root", "methods/sgmcmc/whitening.py",
          "temper(curvature, precision, ", "temper(curvature, 0 * precision, ", (DIRECTIONS,)),
    Fault("whitening: the heating is no share of T", "methods/sgmcmc/whitening.py",
          "config.allowed_heating * config.temperature", "config.allowed_heating", (STEP_SIZE,)),
    Fault("whitening: a chain that cools keeps its heating", "methods/sgmcmc/whitening.py",
          "math.sqrt(_allowed_of(there) / self._allowed)", "factor",
          ("methods/test_ladder.py::test_a_chain_that_changes_its_temperature_is_scaled_around_its_mode[None-1.0]",)),
    Fault("whitening: pairs of minibatches count twice", "methods/sgmcmc/laplace_trial.py",
          "change[:, 1] - change[:, 0]], 1).square() / 2", "change[:, 1] - change[:, 0]], 1).square()", (STEP_SIZE,)),
    Fault("whitening: a control variate without the gradient of all rows", "methods/sgmcmc/whitening.py",
          "gradient - beside + state.all_rows", "gradient - beside",
          (f"{WHITENED}test_an_anchor_off_the_mode_moves_no_chain[True]",)),
    Fault("whitening: a trial that takes the draw for the start", "methods/sgmcmc/laplace_trial.py",
          "at_draw <= MAX_NOISE * at_start", "at_start <= MAX_NOISE * at_draw",
          ("methods/sgmcmc/test_laplace_trial.py::test_the_choice_follows_from_slope_and_variances",)),
    Fault("whitening: directions that the prior rules count in V", "methods/sgmcmc/covariance_roots.py",
          "roots.of_prior(variance) / 2", "roots.of_prior(variance) * 2", (STEP_SIZE,)),
    Fault("whitening: no guard against heat", "methods/sgmcmc/step_control.py",
          "MAX_HEAT = 1.5", "MAX_HEAT = math.inf", (HOT,)),
    Fault("whitening: a chain that is too hot keeps its step size", "methods/sgmcmc/step_control.py",
          "SHRINKAGE = 0.8", "SHRINKAGE = 1.0", (HOT,)),
    Fault("whitening: noise that grows along the way leaves the step as it was", "methods/sgmcmc/step_control.py",
          "MAX_GROWTH = 2.0", "MAX_GROWTH = math.inf",
          (f"{ALONG}test_noise_that_grows_along_the_way_shrinks_the_step[True]",)),
    Fault("whitening: a chain that was moved keeps the gradient of its old place", "methods/sgmcmc/step_control.py",
          "noise._replace(num_seen=torch.zeros_like(noise.num_seen))", "noise",
          ("methods/sgmcmc/test_step_control.py::test_a_chain_that_was_moved_begins_a_new_pair",)),
    Fault("whitening: the rows of a micro-batch measure the curvature pass", "methods/sgmcmc/whitening.py",
          "problem.num_steps * problem.update_fraction", "problem.num_steps * problem.batch_fraction",
          ("training/test_own_choices.py::test_chains_do_not_depend_on_how_an_update_is_cut[0]",)),
    Fault("whitening: a Kronecker root with the transposed eigenvectors", "methods/sgmcmc/covariance_roots.py",
          "left @ matrices @ right.mT if back else left.mT @ matrices @ right",
          "left.mT @ matrices @ right if back else left @ matrices @ right.mT",
          (f"{ROOTS}TestRoots::test_the_root_times_its_transpose_is_the_covariance[kronecker]",)),
    Fault("whitening: a Kronecker root in the coordinates of the eigenvectors", "methods/sgmcmc/covariance_roots.py",
          "_rotated(stds * _rotated(piece, shape, bases, back=False), shape, bases, back=True)",
          "_rotated(stds * piece, shape, bases, back=True)",
          (f"{ROOTS}test_the_root_does_not_depend_on_the_choice_of_eigenvectors",)),
    Fault("whitening: a full root that is not rotated back", "methods/sgmcmc/covariance_roots.py",
          "return _times(basis, stds * _times(basis.mT, vectors))", "return stds * _times(basis.mT, vectors)",
          (f"{ROOTS}TestRoots::test_the_root_times_its_transpose_is_the_covariance[full]",)),
    Fault("whitening: the Hessian of an energy keeps negative eigenvalues", "chains/energy_hessian.py",
          "magnitudes = values.abs()", "magnitudes = values",
          ("chains/test_energy_settings.py::test_a_start_on_a_saddle_has_a_scale[full]",
           "chains/test_energy_settings.py::test_a_start_on_a_saddle_has_a_scale[diagonal]")),
    # -- the trial of learning rates
    Fault("range test: all members at one rate", "objectives/range_test.py",
          "rates=start.new_tensor(rates)", "rates=start.new_tensor(rates[:1] * len(rates))",
          ("objectives/test_range_test.py::test_the_best_rate_is_the_one_that_arrives",
           "objectives/test_range_test.py::test_members_with_their_own_rates_are_separate_runs")),
    Fault("range test: the rate of a short trial for a long run", "objectives/range_test.py",
          "best * math.sqrt(num_updates / num_steps)", "best",
          ("objectives/test_range_test.py::test_the_best_rate_is_the_one_that_arrives",)),
    Fault("range test: a short trial follows its noise", "objectives/range_test.py",
          "return best if losses[best] < needed else usual", "return best",
          ("objectives/test_range_test.py::test_a_smaller_rate_needs_a_margin_in_a_short_trial[nearly equal]",
           "objectives/test_range_test.py::test_a_smaller_rate_needs_a_margin_in_a_short_trial[negative and equal]")),
    Fault("a resumed run tries learning rates again", "objectives/own_settings.py",
          "if found is None:", "if True:",
          ("objectives/test_own_settings.py::test_a_resumed_run_takes_the_rate_that_was_found",
           "training/test_own_choices.py::test_a_resumed_run_keeps_the_rate_and_tries_nothing[map]")),
    Fault("linear: the rate is 0 in the last update", "core/schedules.py",
          "max(1, draws[-1] - step) / draws[-1]", "max(0, draws[-1] - 1 - step) / draws[-1]",
          ("core/test_schedules.py::test_linear_falls_from_the_peak_to_its_nth_part_in_n_updates",)),
    Fault("verdict: a T chosen by predictions excuses chains that are lost", "diagnostics/verdict.py",
          "self.chosen_temperature is not None and not (self._check_finite() or self._check_plausible())",
          "self.chosen_temperature is not None",
          ("diagnostics/test_verdict.py::test_a_temperature_chosen_by_predictions_asks_for_no_draws",)),
    Fault("verdict: T = 1 chosen by a ladder asks for no draws", "training/diagnosis.py",
          "temperature if chosen and temperature < 1 else None", "temperature if chosen else None",
          ("training/test_own_choices.py::test_a_tempered_ladder_is_not_warned_of_its_draws[2.0-30]",)),
    Fault("verdict: the allowed heating of all momenta counts as too hot", "diagnostics/temperature_checks.py",
          "high if run.chosen_temperature is None else max(high, (1 + run.heating) * law)", "high",
          ("diagnostics/test_temperature_checks.py::test_allowed_heat_is_no_fault_if_predictions_chose_it",)),
)
# fmt: on
