"""Planted faults: scores of equal deviations, the noise of the evidence, and answers of one meaning."""

from __future__ import annotations

from tests.mutants.fault import Fault

# fmt: off
EIGHTH_REVIEW_FIGURES = (
    Fault("eighth: bins of equal deviations follow the order of rows", "metrics/regression.py",
          "[np.array_split(np.repeat(values, sizes), min(num_bins, len(error))) for values in squares]",
          "[np.array_split(np.square(one)[np.argsort(deviation, kind='stable')], min(num_bins, len(error))) "
          "for one in (deviation, error)]",
          ("metrics/test_regression.py::test_bins_of_equal_deviations_have_no_order",)),
    Fault("eighth: rows without a term count in a standard error", "metrics/standard_errors.py",
          "int((counts > 0).sum())", "len(values)",
          ("metrics/test_standard_errors.py::test_rows_without_a_term_do_not_count",)),
    Fault("eighth: no noise above gamma = n is searched", "methods/laplace/noise_std.py",
          "upwards = slope(near) > 0", "upwards = 0 < slope(near) < count",
          ("methods/laplace/test_noise_std.py::test_noise_of_more_parameters_than_rows_is_found",)),
    Fault("eighth: the noise where H + tau is singular is the best noise", "methods/laplace/noise_std.py",
          "if not abs(squares / sigma**2 + gamma - count) < 0.1 * count:", "if False:",
          ("methods/laplace/test_noise_std.py::test_noise_without_a_maximum_is_refused",)),
    Fault("eighth: rounding ends the search for a noise without a maximum", "methods/laplace/noise_std.py",
          "(value < -1e-9 * count) if upwards", "(value < 1e-9 * count) if upwards",
          ("methods/laplace/test_noise_std.py::test_noise_without_a_maximum_is_refused",)),
    Fault("eighth: the minus of an exponent is punctuation", "decide/equivalence.py",
          r"(?<=\de)-(?=\d)", r"(?<=\dz)-(?=\d)",
          ("decide/test_equivalence.py::test_signs_of_a_number_make_another_number",)),
    Fault("eighth: a minus before a currency is punctuation", "decide/equivalence.py",
          "|-(?={_AMOUNT})", "|-(?={_AMOUNT}x)",
          ("decide/test_equivalence.py::test_signs_of_a_number_make_another_number",)),
    Fault("eighth: 10 squared is 102", "decide/equivalence.py",
          '"^" + unicodedata', '"" + unicodedata',
          ("decide/test_equivalence.py::test_signs_of_a_number_make_another_number",)),
    Fault("eighth: curly quotation marks are letters", "decide/equivalence.py",
          ' or unicodedata.category(character).startswith("P")', "",
          ("decide/test_equivalence.py::test_forms_of_one_character_are_the_same",)),
)
# fmt: on
