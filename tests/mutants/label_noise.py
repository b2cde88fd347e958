"""Planted faults: the noise of a regression that is learnt from held-out rows."""

from __future__ import annotations

from tests.mutants.fault import Fault

NOISE = "training/test_label_noise.py::"

# fmt: off
LABEL_NOISE = (
    Fault("noise: the fit ends beside the best value", "metrics/noise_fit.py",
          "return float(found.x)", "return float(bounds[0])",
          ("metrics/test_noise_fit.py::test_one_mean_gives_the_root_mean_square",)),
    Fault("noise: rows judge the value that was fitted to them", "metrics/noise_fit.py",
          "_best(sums.sum(0) - one) for one in sums", "_best(sums.sum(0)) for one in sums",
          ("metrics/test_noise_fit.py::test_rows_do_not_judge_a_noise_that_was_fitted_to_them",)),
    Fault("noise: a prediction keeps its own noise", "models/predictives/built_in.py",
          "MemberNumbers(self.member_logits, Normal(noise_std), self.group)",
          "MemberNumbers(self.member_logits, Normal(self.noise_std), self.group)",
          ("models/predictives/test_noise.py::test_every_noise_gives_the_nll_of_a_prediction_with_it",)),
    Fault("noise: members that differ are no part of the residuals", "training/label_noise.py",
          'residuals.square() + found.parts["epistemic_std"].square()', "residuals.square()",
          (NOISE + "test_a_warm_start_ends_with_a_measurement",)),
    Fault("noise: a warm start does not end with a measurement", "training/active_run.py",
          "0 < self.run.num_updates == self.method.num_warm_start_steps", "0 > self.run.num_updates",
          (NOISE + "test_a_warm_start_ends_with_a_measurement",)),
    Fault("noise: a method without a warm start has the spread of the labels", "training/label_noise.py",
          "return method.temperature > 0 and not method.num_warm_start_steps and not needs.final_pass", "return False",
          (NOISE + "test_a_short_map_estimate_shows_the_noise",)),
    Fault("noise: a Gaussian is fitted with the spread of the labels", "training/active_run.py",
          "needs.final_pass and not needs.fits_noise", "not needs.final_pass and not needs.fits_noise",
          (NOISE + "test_a_gaussian_is_fitted_with_the_noise_at_its_mode",)),
    Fault("noise: held-out rows replace the noise of the evidence", "training/outcome.py",
          "active.noise is None or active.method.requirements.fits_noise", "active.noise is None",
          (NOISE + "test_the_noise_of_the_evidence_stands",)),
    Fault("noise: predictions of the trainer keep the noise of the run", "training/outcome.py",
          "    active.noise.use(found.noise_std)\n", "",
          (NOISE + "test_predictions_use_the_noise_that_fits_them",)),
    Fault("noise: the posterior is saved with the noise of the run", "training/outcome.py",
          'head={**config.head, "noise_std": found.noise_std}', "head=config.head",
          (NOISE + "test_predictions_use_the_noise_that_fits_them",)),
    Fault("noise: a MAP estimate is compared at the noise of the posterior", "training/heldout_metrics.py",
          "stack.enter_context(noise.fitted(most_rows(active)))", "pass",
          (NOISE + "test_an_estimate_to_compare_with_has_a_noise_of_its_own",)),
    Fault("noise: after the comparison the posterior has the noise of the MAP estimate", "training/label_noise.py",
          "            self.use(before)\n", "            pass\n",
          (NOISE + "test_an_estimate_to_compare_with_has_a_noise_of_its_own",)),
    Fault("noise: a resumed run measures anew", "training/session.py",
          '"noise_std": saved.noise_std', '"noise_std": None',
          (NOISE + "test_a_run_resumes_bitwise_around_the_measurement",)),
    Fault("noise: few held-out rows are enough", "training/label_noise.py",
          "< MIN_LABELS", "< 2",
          (NOISE + "test_rows_that_cannot_show_the_noise_are_refused",)),
    Fault("noise: classes with decimal points become a regression", "cli/labels.py",
          "not several and not all(", "not several or not all(",
          ("cli/test_labels.py::test_one_class_or_whole_fractions_are_refused",)),
)
# fmt: on
