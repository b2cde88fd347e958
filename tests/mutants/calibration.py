"""Planted faults in the temperature of a mixture, and in the choice between methods."""

from __future__ import annotations

from tests.mutants.fault import Fault

MIXTURE = "uncertainty/test_mixture_temperature.py::"
FITTED = "metrics/test_calibration.py::"
MODELS = "models/test_calibrating.py::"
POSTERIOR = "fit/test_calibration.py::"
CHOICE = "training/tuning/test_choice.py::"

# fmt: off
CALIBRATION = (
    Fault("calibration: the temperature multiplies", "uncertainty/mixture_temperature.py",
          "(log_probs / temperature).log_softmax(-1)", "(log_probs * temperature).log_softmax(-1)",
          (f"{MIXTURE}test_the_mixture_is_tempered_and_not_its_members",)),
    Fault("calibration: disagreement is scaled away", "uncertainty/mixture_temperature.py",
          'found["epistemic"] = share * tempered', 'found["epistemic"] = share * tempered * tempered / total',
          (f"{MIXTURE}test_disagreement_keeps_its_share_in_the_total",)),
    Fault("calibration: the curvature of the NLL is a second moment", "uncertainty/mixture_temperature.py",
          "(finite - mean[:, None]).square()", "finite.square()",
          (f"{MIXTURE}test_derivatives_of_the_nll_are_those_of_autograd",)),
    Fault("calibration: a group of rows is judged by its own fit", "metrics/calibration.py",
          "_best(curves.sum(0) - curves[group])", "_best(curves[group])",
          (f"{FITTED}test_the_gain_is_judged_on_rows_that_did_not_fit_it",)),
    Fault("calibration: no prior of the temperature", "metrics/calibration.py",
          "+ 0.5 * (log_t / PRIOR_STD) ** 2", "", (f"{FITTED}test_rows_that_are_all_right_do_not_make_certainty",)),
    Fault("calibration: a wide posterior counts as a short run", "training/calibrating.py",
          "method.temperature <= NEAR_MODES and", "method.temperature >= 0 and",
          ("training/test_calibrating.py::test_networks_that_are_not_sure_enough_need_a_longer_run[method7-0.5-0.02-None]",)),
    Fault("calibration: any gain counts", "metrics/calibration.py",
          "if gain > std_error else 1.0", "if gain > 0 else 1.0",
          (f"{FITTED}test_calibrated_predictions_stay_as_they_are",)),
    Fault("calibration: each token is in a group of its own", "models/calibrating.py",
          "groups.repeat_interleave(terms)", "torch.arange(int(terms.sum())) % NUM_GROUPS",
          (f"{MODELS}test_the_tokens_of_a_row_are_in_one_group",)),
    Fault("calibration: fewer members get the temperature of all", "models/base.py",
          "num_averaged(predictor, len(self.theta))",
          'stored.get("num_members")', (f"{POSTERIOR}test_a_temperature_belongs_to_all_members",)),
    Fault("calibration: other members get the temperature", "models/current_members.py",
          "self.own_temperature if self.replacement is None else self.replacement.temperature", "self.own_temperature",
          (f"{POSTERIOR}test_a_temperature_belongs_to_all_members",)),
    Fault("calibration: other predictions get the temperature", "models/current_members.py",
          "if way == (prediction, num_members) or temperature == 1:", "if True:",
          ("models/test_current_members.py::test_a_temperature_of_other_predictions_is_left_out",)),
    Fault("calibration: every second row, where nearly all can be paid", "training/data/heldout_rows.py",
          "[number * count // min(count, most) for number in range(min(count, most))]",
          "list(range(0, count, max(1, -(-count // most))))",
          ("training/test_calibrating.py::test_the_fit_takes_all_rows_that_a_tenth_of_the_run_pays",)),
    Fault("calibration: score reads the mixture without its temperature", "models/predictives/built_in.py",
          "prediction = temper(group.predict(logits), temperature)", "prediction = group.predict(logits)",
          (f"{POSTERIOR}test_generation_draws_from_the_tempered_mixture",)),
    Fault("tuning: the lowest NLL is chosen whatever it costs", "training/tuning/choice.py",
          "return difference <= error", "return difference <= 0",
          (f"{CHOICE}test_the_cheapest_within_a_standard_error_is_chosen",)),
    Fault("tuning: no single set of weights in the second round", "training/tuning/tune.py",
          "best = [*best[: NUM_FINALISTS - 1], single[0]]", "best = list(best)",
          ("training/tuning/test_tune.py::test_the_best_single_set_of_weights_always_runs_again",)),
    Fault("tuning: only the longest runs are candidates", "training/tuning/tune.py",
          "kept = (*(trial for trial in first if trial.name in finalists), *second)", "kept = second",
          ("training/tuning/test_tune.py::test_the_shorter_run_is_kept_if_the_longer_one_is_worse",)),
    Fault("held-out scores: a member predicts all labels of a row together", "models/predictives/built_in.py",
          "**_member_scores(parts, self.group)", "**_member_scores(parts.sum(-1, keepdim=True), self.group)",
          ("objectives/test_heldout.py::test_each_of_several_labels_has_a_mixture_of_its_own",)),
    Fault("members: a live model is saved and merged without them", "members/engine.py",
          "self.last_feed_forward, self.blocked, self.weight_methods]", "self.last_feed_forward, self.blocked]",
          ("members/test_weight_methods.py::test_a_peft_model_with_members_is_neither_saved_nor_merged",)),
    Fault("tuning: a second call runs everything again", "training/tuning/trials.py",
          "found = self._record.find(candidate.name, gradients)", "found = None",
          ("training/tuning/test_tune.py::test_a_second_call_repeats_no_run",)),
    Fault("tuning: runs that start elsewhere are taken", "training/tuning/identity.py",
          'fingerprint_tensors([("start", setup.start)])', '""',
          ("training/tuning/test_identity.py::test_another_tuning_is_refused_by_what_differs",)),
    Fault("tuning: the settings of runs are not compared", "training/tuning/identity.py",
          "**settings_of_run(host, setup, rows),", "",
          ("training/tuning/test_identity.py::test_another_tuning_is_refused_by_what_differs",)),
    Fault("tuning: a failure is final", "training/tuning/trials.py",
          "if found is not None and found.failure:", "if False:",
          ("training/tuning/test_trials.py::test_a_failed_run_is_tried_again_by_a_later_call",)),
)
# fmt: on
