"""What hf_bayes costs, measured against one model without Bayes: ``make benchmark``."""
