"""Planted faults: padded rows of classifiers and taggers, and recordings, mended after the sixth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

ROWS = "members/test_padded_rows.py::"
AUDIO = "models/test_audio_classification.py::"

# fmt: off
SIXTH_REVIEW_ROWS = (
    Fault("sixth: rows keep their padding on the left", "members/padded_rows.py",
          "return first if bool(first.any()) else None", "return None",
          (ROWS + "test_a_row_padded_on_the_left_is_the_row_alone[bert-None]",
           ROWS + "test_training_reads_such_rows_as_they_are_alone[gpt2-True]")),
    Fault("sixth: logits of tokens are not moved back", "members/engine.py",
          "torch.unflatten(moved.back(output.logits), 0,", "torch.unflatten(output.logits, 0,",
          (ROWS + "test_a_row_padded_on_the_left_is_the_row_alone[tagger-None]",)),
    Fault("sixth: every model's padding is moved, also of one that reads the last position", "members/padded_rows.py",
          'getattr(self.config, "summary_type", None) != "last"', "True",
          (ROWS + "test_a_row_padded_on_the_left_is_the_row_alone[xlnet-None]",)),
    Fault("sixth: a curvature pass counts the padding of moved rows", "members/module_hooks.py",
          'self._padded_rows.tokens_moved(inputs, inputs.get("attention_mask"))', 'inputs.get("attention_mask")',
          (ROWS + "test_curvature_counts_the_tokens_of_such_rows[bert-kronecker]",)),
    Fault("sixth: a curvature pass takes the head's terms at their old places", "members/module_hooks.py",
          "self._padded_rows.tokens_moved(inputs, terms)", "terms",
          (ROWS + "test_curvature_counts_the_tokens_of_such_rows[tagger-kronecker]",)),
    Fault("sixth: linearised outputs of tokens are not moved back", "models/linearised/outputs.py",
          "[moved.back(means), moved.back(spreads, num_behind=2)]", "[means, spreads]",
          (ROWS + "test_gaussian_outputs_are_those_of_rows_alone[tagger-linearised]",)),
    Fault("sixth: a single pass reads rows with their padding on the left", "models/single_pass/predictors.py",
          "        inputs = moved.inputs\n", "",
          (ROWS + "test_gaussian_outputs_are_those_of_rows_alone[bert-single pass]",)),
    Fault("sixth: positions of the caller stay where they were", "members/padded_rows.py",
          'if name == "position_ids" and', 'if name == "position_ids":\n        return value\n    if',
          (ROWS + "test_positions_of_the_caller_go_with_their_tokens",)),
    Fault("sixth: the tokenizer's own padding stays in moved rows", "members/padded_rows.py",
          'inputs["input_ids"].masked_fill(mask == 0, pad_token)', 'inputs["input_ids"]',
          (ROWS + "test_the_padding_may_be_another_token_than_the_models",)),
    Fault("sixth: moved padding has no positions", "models/input_check.py",
          "(self._moves or bool(kept[:, 0].all()))", "bool(kept[:, 0].all())",
          (ROWS + "test_padding_that_is_moved_needs_positions_too",)),
    Fault("sixth: a head without its padding token meets transformers' error", "members/padded_rows.py",
          "if num_copies * num_rows > 1 or is_padded:", "if False:",
          (ROWS + "test_a_head_that_needs_a_padding_token_says_so",)),
    Fault("sixth: recordings of other lengths share a pass", "pipelines/classification.py",
          "rows = (lengths == length).nonzero()[:, 0]", "rows = (lengths == lengths).nonzero()[:, 0]",
          (AUDIO + "test_recordings_of_any_length_are_read_as_they_are_alone",)),
    Fault("sixth: recordings answer in the order of their lengths", "pipelines/classification.py",
          "for each in outputs])[back] for", "for each in outputs]) for",
          (AUDIO + "test_recordings_of_any_length_are_read_as_they_are_alone",)),
    Fault("sixth: recordings are cut at the wrong end", "pipelines/classification.py",
          'getattr(self.feature_extractor, "padding_side", "right") == "left"', "False",
          (AUDIO + "test_recordings_of_any_length_are_read_as_they_are_alone",)),
)
