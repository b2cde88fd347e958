"""Planted faults: the weights of rows in curvatures, mended after the seventh review."""

from __future__ import annotations

from tests.mutants.fault import Fault


def copies(case: str) -> str:
    """The test that compares a weight with copies, for one estimator, structure and model."""
    return f"methods/laplace/test_estimators.py::test_a_row_of_weight_three_counts_as_three_copies[{case}]"


# fmt: off
SEVENTH_REVIEW_WEIGHTS = (
    Fault("weights: an outer product has the square of its row's weight", "methods/laplace/estimators.py",
          "    if weights is None:\n        return score\n", "    if True:\n        return score\n",
          (copies("ef_sequence-diagonal-expand-bert-block-classes"),
           copies("ef_token-full-expand-bert-block-classes"))),
    Fault("weights: a weight of 0 is divided by", "methods/laplace/estimators.py",
          "weights.masked_fill(weights == 0, 1).rsqrt()", "weights.rsqrt()",
          (copies("ef_sequence-full-expand-bert-block-classes"),)),
    Fault("weights: the gradient has the roots of weights", "methods/laplace/accumulators.py",
          "record = record._replace(g=self._rooted(record.g, record.rows))", "record = record._replace(g=record.g)",
          (copies("ef_sequence-full-expand-bert-block-classes"),)),
    Fault("weights: the inputs of a Kronecker factor have none", "methods/laplace/kronecker.py",
          "x = self._rooted(record.x.to(self.like.dtype), record.rows)", "x = record.x.to(self.like.dtype)",
          (copies("ef_sequence-kronecker-expand-bert-block-classes"),
           copies("ef_sequence-kronecker-reduce-bert-block-classes"))),
    Fault("weights: positions of a Kronecker factor count once", "methods/laplace/kronecker.py",
          "float(len(rows) if self.roots is None else counted.sum())", "float(len(rows))",
          (copies("ef_sequence-kronecker-expand-bert-block-classes"),)),
    Fault("weights: rows of a Kronecker factor count once", "methods/laplace/kronecker.py",
          "float(copies[:, :1][count > 0].sum())", "float((count > 0).sum())",
          (copies("ef_sequence-kronecker-reduce-bert-block-classes"),)),
    Fault("weights: a sum of weights below 1 counts as 1", "methods/laplace/kronecker.py",
          "self.counts[source] or 1.0 for name", "max(self.counts[source], 1.0) for name",
          ("methods/laplace/test_estimators.py::test_small_weights_scale_a_kronecker_curvature",)),
    Fault("weights: the gradients of rows have the roots of weights", "objectives/curvature_streams.py",
          "self._rooted(rows.clone(), slice(None))", "rows.clone()",
          ("methods/laplace/test_estimators.py::test_products_and_gradients_of_rows_have_their_weights",)),
)
# fmt: on
