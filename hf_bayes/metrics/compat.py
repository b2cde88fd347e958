"""The private names of ``evaluate.Metric`` that our metrics override or call.

``evaluate`` documents the first two as the methods that a metric must define.
"""

from __future__ import annotations

from hf_bayes.core.compat import PrivateName

_METRIC = "evaluate.Metric"

NAMES = (
    PrivateName(_METRIC, "_info", (), "overridden"),
    PrivateName(_METRIC, "_compute", ("predictions", "references", "kwargs"), "overridden"),
    PrivateName(_METRIC, "_feature_names", (), "called"),
)
"""The private names of evaluate."""
