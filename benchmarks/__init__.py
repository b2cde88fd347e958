"""The costs of hf_bayes, measured against one model without Bayes: ``make benchmark``."""
