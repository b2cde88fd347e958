"""Pure functions of logits: mixtures, entropy decomposition, likelihoods and Gaussian links.

They need torch only, and no model.
"""
