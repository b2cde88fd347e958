"""The private names of lm-evaluation-harness (``lm_eval``) that ``pipelines.lm_harness`` overrides.

``lm_eval`` is no dependency, and it is not imported here.
"""

from __future__ import annotations

from hf_bayes.core.compat import PrivateName

NAMES = (
    PrivateName(
        "lm_eval.models.huggingface.HFLM",
        "_loglikelihood_tokens",
        ("requests", "disable_tqdm", "override_bs"),
        "overridden",
    ),
)
"""The private names of lm_eval."""
