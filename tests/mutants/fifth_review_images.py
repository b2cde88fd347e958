"""Planted faults: images and random weights that read them, mended after the fifth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

VISION = "models/test_random_vision.py::"
PICTURES = "members/test_pictures.py::"

# fmt: off
FIFTH_REVIEW_IMAGES = (
    Fault("fifth: as many images as rows are one image for each row", "members/pictures.py",
          "return alone and bool((placeholders > 0).all())", "return alone",
          (PICTURES + "test_a_row_has_one_image_that_a_model_reads_as_one_row",
           VISION + "test_each_chain_reads_the_images_of_its_own_rows")),
    Fault("fifth: patches of all images are taken for rows", "members/pictures.py",
          'if set(pictures) - {"pixel_values", "pixel_attention_mask"}:', "if set(pictures) - set(pictures):",
          (PICTURES + "test_a_row_has_one_image_that_a_model_reads_as_one_row",)),
    Fault("fifth: members always share a pass over images", "models/image_text.py",
          "if len(theta) == 1 or self.reads_rows_apart(inputs):", "if True:",
          (VISION + "test_each_chain_reads_the_images_of_its_own_rows",
           VISION + "test_chains_share_rows_with_any_number_of_images",
           VISION + "test_a_run_does_not_depend_on_the_members_of_a_pass[independent]")),
    Fault("fifth: members always share a prediction's pass over images", "models/image_text.py",
          "super().passes(inputs) if self.reads_rows_apart(inputs) else", "super().passes(inputs) if True else",
          (VISION + "test_generated_tokens_are_judged_as_by_separate_models",)),
    Fault("fifth: sizes of images that were read before split a step's pass", "models/image_text.py",
          'if "pixel_values" not in pictures or not', "if not pictures or not",
          (VISION + "test_generated_tokens_are_judged_as_by_separate_models[options0-qwen2_vl]",)),
    Fault("fifth: each member reads the rows of the first one", "models/image_text.py",
          "torch.arange(member * rows, (member + 1) * rows)", "torch.arange(rows)",
          (VISION + "test_each_chain_reads_the_images_of_its_own_rows",)),
    Fault("fifth: rows without an image get an empty tensor", "members/pictures.py",
          "if len(images) == 0:", "if len(images) < 0:",
          (PICTURES + "test_rows_without_an_image_have_no_pictures",)),
    Fault("fifth: rows of images in rows that have none get images of zeros", "members/pictures.py",
          'return own if bool((placeholders > 0)[index.to(placeholders.device)].any()) else {}', "return own",
          (PICTURES + "test_rows_without_an_image_have_no_pictures",
           VISION + "test_slices_of_rows_without_an_image_are_scored")),
    Fault("fifth: images in rows are unknown", "models/image_text.py",
          "by_row = self.config.model_type in _BY_ROW", "by_row = False",
          (VISION + "test_generated_tokens_are_judged_as_by_separate_models[options1-idefics3]",)),
    Fault("fifth: text alone must read the weights of images", "members/engine.py",
          "set(self.layout.names) - self.context.used - self._not_called)",
          "set(self.layout.names) - self.context.used)",
          (VISION + "test_a_first_batch_of_text_alone_reads_no_weights_of_images",)),
    Fault("fifth: images need not read the weights of images", "members/engine.py",
          'frozenset() if has_images else self.names_of_images', "self.names_of_images",
          (VISION + "test_weights_of_images_that_images_do_not_read_are_named",)),
    Fault("fifth: positions behind images are those of other rows", "models/image_text.py",
          "backbone.rope_deltas = offsets[:num_rows].repeat(num_members, 1)", "backbone.rope_deltas = offsets",
          (VISION + "test_an_own_loop_has_the_positions_behind_images[1]",)),
    Fault("fifth: a static cache of images asks for what does not help", "models/language/causal_members.py",
          "_require_one_pass(model, inputs, cache)\n", "model.passes(inputs)\n",
          (VISION + "test_a_cache_filled_by_all_members_at_once_is_refused",)),
    Fault("fifth: members in one pass have no remedy", "members/stacked_module.py",
          "model.members_per_pass = 1 for predictions", "fewer for predictions",
          ("members/test_stacked_module.py::test_a_batch_that_cannot_be_dealt_to_members_is_refused",)),
)
