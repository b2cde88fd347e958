"""The private names of ``evaluate.Metric`` that our metrics override or call.

``evaluate`` documents the first two as the methods that a metric must define. ``tests/metrics/test_compat.py`` compares
the list with the installed version.
"""

from __future__ import annotations

HOOKS = {
    "_info": ("self",),
    "_compute": ("self", "predictions", "references", "kwargs"),
    "_feature_names": ("self",),
}
"""Methods of ``evaluate.Metric`` -> their parameters."""
