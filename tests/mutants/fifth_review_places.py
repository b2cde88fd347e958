"""Planted faults: adapters, cards and labels that were mended after the fifth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
FIFTH_REVIEW_PLACES = (
    # -- adapters that a posterior would not record
    Fault("fifth: an adapter outside a PeftModel is lost in silence", "models/loading/base_model.py",
          "    refuse_bare_adapter(model)\n", "    core_of(model)\n",
          ("models/loading/test_base_location.py::test_an_adapter_outside_a_peft_model_is_refused",)),
    Fault("fifth: the adapter of a base model's folder is taken for its layers", "models/loading/posterior.py",
          "        refuse_adapted(found.model)\n", "",
          ("models/loading/test_base_location.py::test_no_base_is_loaded_from_a_folder_with_an_adapter",
           "models/loading/test_base_location.py::test_what_is_no_base_model_is_refused_in_words")),
    # -- cards
    Fault("fifth: the card of a push names no owner", "posteriors/hub.py",
          "if with_repository is not None:", "if with_repository is None:",
          ("posteriors/test_hub.py::test_the_card_of_a_push_names_the_owner_of_the_repository",
           "posteriors/test_hub.py::test_the_card_of_a_trainer_s_push_names_the_owner")),
    Fault("fifth: the card of a push forgets its author's fields", "posteriors/posterior.py",
          "write_card(directory, repo_id=name, **card)", "write_card(directory, repo_id=name)",
          ("posteriors/test_hub.py::test_the_card_of_a_push_names_the_owner_of_the_repository",)),
    # -- labels of a file
    Fault("fifth: labels of several kinds are sorted", "cli/labels.py",
          "for value in values}) > 1:", "for value in values}) > 9:",
          ("cli/test_labels.py::test_labels_of_several_kinds_are_refused",)),
    Fault("fifth: an evaluation predicts labels from themselves", "cli/evaluation/texts.py",
          "    check_columns(text_column, args.pair_column, args.label_column)\n", "",
          ("cli/evaluation/test_texts.py::test_a_column_has_one_use",)),
    Fault("fifth: a tagger reads its tags as words", "cli/evaluation/words.py",
          "    check_columns(target.text_column, None, args.label_column)\n", "",
          ("cli/evaluation/test_words.py::test_rows_that_do_not_fit_end_in_one_sentence",)),
    Fault("fifth: a filled cell of a table is called empty", "cli/row_places.py",
          "    if kind is None:", "    if kind is not None:",
          ("cli/test_labels.py::test_a_class_that_a_csv_file_cannot_hold_is_explained",
           "cli/test_data.py::test_a_row_that_is_no_text_is_refused")),
)
