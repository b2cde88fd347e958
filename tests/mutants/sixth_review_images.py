"""Planted faults: images whose rows are counted, and caches behind them, mended after the sixth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

COUNTS = "models/test_image_counts.py::"
PICTURES = "members/test_pictures.py::"
VISION = "models/test_random_vision.py::"

# fmt: off
SIXTH_REVIEW_IMAGES = (
    Fault("sixth: uncertain keys that a cache holds are written over", "members/cache.py",
          "for states in (key_states, value_states, *self._held())", "for states in (key_states, value_states)",
          ("members/test_cache.py::test_states_of_a_subclass_take_plain_ones_behind_them",
           VISION + "test_a_single_pass_goes_on_behind_uncertain_keys")),
    Fault("sixth: an own cache without a join asks for what does not help", "models/language/causal_members.py",
          "    if not model.reads_rows_apart(inputs):", "    if False:",
          (VISION + "test_an_own_cache_that_has_no_join_is_refused",)),
    Fault("sixth: chains read images that are not counted", "training/data/rows.py",
          "return dataset, counting_images(self.model, collate)", "return dataset, collate",
          (COUNTS + "test_chains_with_rows_of_their_own_are_trained",)),
    Fault("sixth: passes over finished models read images that are not counted", "fit/finished_models.py",
          'counting_images(model, in_words(collate, "the data"))', 'in_words(collate, "the data")',
          (COUNTS + "test_a_laplace_fit_does_not_depend_on_batches",
           COUNTS + "test_row_gradients_do_not_depend_on_batches")),
    Fault("sixth: the numbers of images are not those of the rows", "members/pictures.py",
          "_num_images(pictures_of(self.collate([row]))) for row in rows",
          "_num_images(pictures) // len(rows) for _ in rows",
          (PICTURES + "test_images_are_counted_where_placeholders_do_not_tell",
           COUNTS + "test_each_chain_reads_the_images_of_its_own_rows")),
    Fault("sixth: numbers that do not fit a batch are kept", "members/pictures.py",
          "if sum(counts) == _num_images(pictures):", "if counts:",
          (PICTURES + "test_images_that_change_with_each_reading_are_not_counted",)),
    Fault("sixth: numbers that do not fit a batch are taken", "members/pictures.py",
          "if counts.shape != (num_rows,) or int(counts.sum()) != num_images:", "if counts.shape != (num_rows,):",
          (PICTURES + "test_counts_that_are_not_those_of_the_batch_are_refused",)),
    Fault("sixth: the wrapped model gets the numbers of images in training", "models/image_text.py",
          "        inputs = _as_read(inputs)\n", "",
          (COUNTS + "test_a_wrapped_model_does_not_get_the_counts",)),
    Fault("sixth: the wrapped model gets the numbers of images in a prediction", "models/image_text.py",
          "_answer(_as_read(inputs), cache", "_answer(inputs, cache",
          (COUNTS + "test_a_wrapped_model_does_not_get_the_counts",)),
    Fault("sixth: pieces of a batch have the images of all rows", "objectives/curvature_pass.py",
          "if ids is None or not pictures_of(batch):", "if True:",
          (VISION + "test_pieces_of_a_batch_take_their_images_along",)),
    Fault("sixth: a row without images must read the weights of images", "objectives/curvature_pass.py",
          "if one.num_terms and reads_all:", "if one.num_terms:",
          (COUNTS + "test_row_gradients_do_not_depend_on_batches",)),
)
