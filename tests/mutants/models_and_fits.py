"""Planted faults in members of image networks, likelihoods, curvature of functions, exports and single passes."""

from __future__ import annotations

from tests.mutants.fault import Fault

NORM = "members/test_batch_norm.py::"
HESSIAN = "chains/test_energy_hessian.py::"

# fmt: off
MODELS_AND_FITS = (
    Fault("batch norm: the rows of members mix", "members/batch_norm.py",
          "others = [1, *range(3, rows.ndim)]", "others = [0, 1, *range(3, rows.ndim)]",
          (f"{NORM}test_batch_statistics_are_those_of_a_members_own_rows",)),
    Fault("likelihoods: the root of the Fisher information is not a root", "uncertainty/custom/adapted.py",
          "(found.log_probs[:, column] / 2).exp()", "found.log_probs[:, column].exp()",
          ("uncertainty/custom/test_adapted.py::test_the_root_is_that_of_the_score_covariance[ordinal]",)),
    Fault("rewards: the constants of members count", "decide/rewards.py",
          "centred = rewards - rewards.mean(1, keepdim=True)", "centred = rewards",
          ("decide/test_rewards.py::test_a_constant_of_a_member_does_not_change_the_best",)),
    Fault("training-free: the std of a row of A grows with its singular value",
          "methods/variational/lora_coordinates.py", "torch.where(used, 1 / s, 0.0)", "torch.where(used, s, 0.0)",
          ("methods/variational/test_lora_coordinates.py::"
           "test_the_noise_of_the_product_is_isotropic_in_the_columns_of_b",)),
    Fault("energies: the Hessian is a sum over batches", "chains/energy_hessian.py",
          "        return total / len(self._batches)\n\n    def _first", "        return total\n\n    def _first",
          (f"{HESSIAN}test_logistic_regression_has_its_analytic_hessian",)),
    Fault("energies: the rest of the trace is counted twice", "methods/laplace/low_rank_hessian.py",
          "vectors * (values - rest).clamp_min(0).sqrt()", "vectors * values.clamp_min(0).sqrt()",
          (f"{HESSIAN}test_lanczos_gives_the_covariance_of_few_stiff_directions",)),
    Fault("single pass: the widest directions count twice", "models/single_pass/drawn.py",
          "    scale[chosen] = 1.0\n", "",
          ("models/single_pass/test_drawn.py::test_leading_columns_and_the_remainder_are_the_covariance",)),
    Fault("linearised: a calibration factor of variances is applied to deviations", "models/linearised.py",
          "directions.factor(read.layer) ** 0.5 * read.g", "directions.factor(read.layer) * read.g",
          ("models/single_pass/test_backward.py::test_calibration_factors_scale_the_variance_of_their_layer",)),
    Fault("harness: the first token of an answer is not scored", "pipelines/continuations.py",
          "valid[row, len(context) - 1 : read] = 1, 1", "valid[row, len(context) : read] = 1, 1",
          ("pipelines/test_continuations.py::test_a_continuation_has_the_numbers_of_score[1]",)),
    Fault("export: members' log-probabilities are averaged", "posteriors/templates/generate.py.jinja",
          "mixture = log_probs.logsumexp(0) - math.log(self.count)", "mixture = log_probs.mean(0)",
          ("posteriors/test_custom_generate.py::test_a_fitted_temperature_of_the_mixture_is_applied",)),
    Fault("verdict: the allowed heating counts as too hot", "diagnostics/temperature_checks.py",
          "allowed = (1 + run.heating) * law", "allowed = law",
          ("diagnostics/test_temperature_checks.py::test_heat_where_the_data_rule_counts_beyond_what_was_allowed",)),
    Fault("laplace: a fit of the prior is refused with every prior", "methods/laplace/fit_checks.py",
          "if fit_prior is not None and isinstance(problem.prior, FlatPrior):", "if fit_prior is not None:",
          ("methods/laplace/test_fit_checks.py::test_a_fit_that_the_problem_allows_passes",)),
    Fault("mirrored chains: the noise has the same sign", "core/rng.py",
          "return -drawn if isinstance(rng, MirroredGenerator) else drawn", "return drawn",
          ("core/test_rng.py::test_every_second_mirrored_chain_has_the_opposite_normals",)),
    Fault("metropolis: learnt scales are not used", "methods/mcmc/metropolis.py",
          "return state._replace(scale=scale, log_std=state.log_std + factor)", "return state",
          ("methods/mcmc/test_metropolis.py::test_scales_are_learnt_without_a_learning_rate",)),
    Fault("preferences: no reference", "models/preferences.py",
          "(sums.unflatten(1, (-1, self.texts_per_row)) - reference)", "sums.unflatten(1, (-1, self.texts_per_row))",
          ("models/test_preferences.py::test_loss_and_gradient_are_those_of_separate_models",)),
    Fault("single pass: a norm of a wide input takes the scale of its mean", "models/single_pass/wide_norms.py",
          "(mean.square().sum(-1) + columns.square().sum((0, -1))) / width + eps",
          "mean.square().sum(-1) / width + eps",
          ("models/single_pass/test_wide_norms.py::test_variances_of_wide_inputs_are_those_of_draws",)),
    Fault("hub: results on benchmarks stay behind", "posteriors/hub.py",
          '    beside += [f"{BENCHMARKS}/{file.name}" for file in sorted((root / BENCHMARKS).glob("*.yaml"))]\n', "",
          ("posteriors/test_hub.py::test_results_on_benchmarks_are_pushed",)),
    Fault("variational: the gradients of draws are summed", "methods/variational/gaussian_vi.py",
          "values.mean(1)", "values.sum(1)",
          ("methods/variational/test_gaussian_vi.py::test_four_draws_give_the_mean_of_their_gradients",)),
)
# fmt: on
