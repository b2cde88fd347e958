"""Planted faults: names of transformers 5.24, and what was mended after the fifth review."""

from __future__ import annotations

from tests.mutants.fault import Fault

CACHES = "models/test_token_uncertainty_caches.py::"

# fmt: off
FIFTH_REVIEW = (
    Fault("fifth: forward knows one name of a cache", "models/causal_lm.py",
          'with_cache_named({**kwargs, "cache": cache})', '{**kwargs, CACHE: cache}',
          (CACHES + "test_a_cache_of_the_callers_own_is_used_and_grown",)),
    Fault("fifth: generate knows one name of a cache", "models/decoding.py",
          "kwargs = with_cache_named(kwargs)", "kwargs = dict(kwargs)",
          (CACHES + "test_generate_goes_on_with_a_cache_of_the_callers_own",)),
    Fault("fifth: two caches, and one of them is dropped", "members/compat/transformers.py",
          "if len(given) > 1:", "if len(given) > 2:",
          ("members/compat/test_transformers.py::test_a_cache_is_taken_under_the_name_of_any_version",)),
    Fault("fifth: a large Gaussian has as many components as the posterior has draws, none", "posteriors/directory.py",
          "num_components = len(next(iter(tensors.values())))", "num_components = config.num_members",
          ("posteriors/test_directory.py::test_a_large_covariance_is_read",)),
)
