"""Planted faults: what was mended after the fourth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
FOURTH_REVIEW = (
    # -- models, their places and their folders
    Fault("fourth: the end of a block takes the model's own temperature", "models/current_members.py",
          "self.replacement = before", "self.replacement, self.own_temperature = before, 1.0",
          ("models/test_current_members.py::test_the_end_of_a_block_undoes_what_show_did_alone",)),
    Fault("fourth: attach does not say what statistics in theta are", "models/refusals.py",
          "== layout.dim + statistics.dim > layout.dim", "== layout.dim + statistics.dim < layout.dim",
          ("models/test_statistics.py::test_members_with_statistics_are_shown_and_not_attached",)),
    Fault("fourth: each process has its own level of logits", "models/language/logit_level.py",
          "self.trace.group.mean(torch.cat(levels, 1))", "torch.cat(levels, 1).mean(0)",
          ("models/language/test_logit_level.py::test_a_penalty_acts_alike_with_members_on_two_processes",)),
    Fault("fourth: rows are judged with weights that they lack", "models/base.py",
          "self.likelihood = without_weights(self.likelihood)", "without_weights(self.likelihood)",
          ("models/test_classification.py::test_rows_without_weights_are_judged_as_those_of_weight_one",)),
    Fault("fourth: a misspelt setting of a place is ignored", "posteriors/hub.py",
          "if name not in LOCATION]", "if name not in location]",
          ("posteriors/test_hub.py::test_a_misspelt_setting_of_the_place_is_named",)),
    Fault("fourth: a posterior is replaced by one of its own member", "posteriors/storage/ownership.py",
          "any((root / name).is_relative_to(read) for name in saved)", "False",
          ("posteriors/storage/test_ownership.py::test_a_save_replaces_the_folders_of_its_own_files",
           "cli/commands/test_bayesianise.py::test_the_posterior_that_is_read_is_not_overwritten")),
    Fault("fourth: a save among the members of another posterior", "posteriors/storage/ownership.py",
          "parts[0] in own_folders(manifest.files)", "parts[0] in manifest.files",
          ("posteriors/storage/test_ownership.py::test_a_folder_within_a_saved_directory_is_refused",)),
    # -- fits and runs
    Fault("fourth: every student has the same held-out rows", "fit/distil.py",
          "generator=torch.Generator().manual_seed(seed))", "generator=torch.Generator().manual_seed(0))",
          ("fit/test_distil.py::test_the_seed_chooses_the_held_out_rows_and_the_training",)),
    Fault("fourth: every student has the same first weights and order", "fit/distil.py",
          "width=width, seed=seed, progress", "width=width, seed=0, progress",
          ("fit/test_distil.py::test_the_seed_chooses_the_held_out_rows_and_the_training",)),
    Fault("fourth: the tokens of every student are the same", "fit/distil_targets.py",
          "self.generator = torch.Generator().manual_seed(seed)", "self.generator = torch.Generator().manual_seed(0)",
          ("fit/test_distil_targets.py::test_positions_of_a_text_are_drawn_without_padding",)),
    Fault("fourth: a push forgets the author's fields of the card", "training/pushing.py",
          "        **saved.card,\n", "",
          ("training/test_pushing.py::test_a_setting_of_a_push_comes_before_the_arguments",)),
)
# fmt: on
