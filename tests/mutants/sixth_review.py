"""Planted faults: what was mended after the sixth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

ROW_GRADIENTS = "models/test_random_vision.py::test_row_gradients_are_those_of_the_images_of_a_row"
VALID = "models/test_random_vision.py::test_padding_of_a_text_hides_no_patch_of_an_image"

# fmt: off
SIXTH_REVIEW = (
    Fault("sixth: row gradients of a batch whose rows are not apart", "objectives/curvature_products.py",
          "and not self.model.reads_rows_apart(batch):", "and False:", (ROW_GRADIENTS,)),
    Fault("sixth: all images of a single row are rows of their own", "members/module_hooks.py",
          "one = expected == 1 and index in", "one = expected == 0 and index in", (ROW_GRADIENTS,)),
    Fault("sixth: a text's padding hides patches of an image", "members/module_hooks.py",
          "self._valid if known and index not in self._of_images else None", "self._valid if known else None",
          (VALID,)),
    Fault("sixth: a curvature pass does not know the layers of images", "objectives/curvature_pass.py",
          "model.layout.names, model.members.names_of_images)", "model.layout.names)", (ROW_GRADIENTS,)),
    Fault("sixth: an image of zeros in a row is a row", "members/pictures.py",
          "and bool(pixels.flatten(1).any(1).all())", "",
          ("members/test_pictures.py::test_a_row_has_one_image_that_a_model_reads_as_one_row",)),
    Fault("sixth: images of embedded rows are taken by rows", "models/image_text.py",
          'if inputs.get("input_ids") is None:\n            raise ValueError("images belong',
          'if False:\n            raise ValueError("images belong',
          ("models/test_random_vision.py::test_images_without_the_ids_of_their_rows_are_refused",)),
    Fault("sixth: settings of a schedule beside a constant rate", "training/checks/arguments.py",
          "    if args.lr_scheduler_kwargs:\n", "    if args.lr_scheduler_kwargs and not constant:\n",
          ("training/checks/test_arguments.py::test_settings_that_no_schedule_takes_are_refused",)),
    Fault("sixth: a regression's choice speaks of a temperature", "training/tuning/choice.py",
          'if "temperature" in chosen.metrics else ""', 'if chosen.metrics else ""',
          ("training/tuning/test_choice.py::test_the_sentence_of_a_regression_names_no_temperature",)),
    Fault("sixth: tune makes its repository at the end", "training/tuning/tune.py",
          "    if args.push_to_hub:  # as Trainer", "    if args.push_to_hub is None:  # as Trainer",
          ("training/tuning/test_tune.py::test_a_refused_token_stops_before_the_first_run",)),
    Fault("sixth: save_model pushes nothing", "training/trainer.py",
          "if self.args.push_to_hub:\n", "if False:\n",
          ("training/test_pushing.py::test_save_model_pushes_if_the_arguments_ask_for_it",)),
    Fault("sixth: a misspelt revision loads the main branch", "pipelines/construction.py",
          '"check_base", *LOCATION)', '"check_base")',
          ("pipelines/test_factory.py::test_misspelt_settings_for_loading_are_refused_at_once",
           "pipelines/test_construction.py::test_settings_for_loading_are_refused_by_every_pipeline")),
    Fault("sixth: swag copies the deviations of all chains at once", "methods/averaging/swag.py",
          "zip(std, self.deviations, strict=True)", "zip(std, self.deviations / 1, strict=True)",
          ("methods/averaging/test_swag.py::test_the_gaussian_copies_the_deviations_of_one_chain",)),
    Fault("sixth: what the left singular vectors came from is kept", "distributions/covariance/low_rank.py",
          "    del relative\n", "",
          ("methods/averaging/test_swag.py::test_the_gaussian_copies_the_deviations_of_one_chain",)),
    Fault("sixth: swag's weight of the deviations is left out", "distributions/covariance/low_rank.py",
          "1 + (weight**0.5 * singular).square()", "1 + singular.square()",
          ("methods/averaging/test_swag.py::test_moments_are_those_of_the_iterates_of_torch_sgd",)),
    Fault("sixth: a long basis is as orthonormal as float32 makes it", "distributions/covariance/low_rank.py",
          "upper = torch.linalg.cholesky(gram(basis)).mT", "upper = torch.eye(basis.shape[1]).double()",
          ("distributions/covariance/test_low_rank.py::test_a_basis_of_many_rows_is_orthonormal_and_loads",)),
)
