"""The private names of host libraries that the package reads or overrides: one list for each host.

``transformers_names``, ``peft``, ``trl`` and ``lm_eval`` list the names of their host as ``NAMES``, for this package
and all higher ones. The small functions that read a private name stand beside the list, those of transformers in
``transformers``. ``hf_bayes.core.compat`` has the names of torch, ``hf_bayes.metrics.compat`` the names of evaluate,
and ``hf_bayes.posteriors.compat`` of huggingface_hub.
"""
