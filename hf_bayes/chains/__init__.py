"""Chains on an energy that the user wrote: ``hf_bayes.sample`` and the checks of its arguments."""
