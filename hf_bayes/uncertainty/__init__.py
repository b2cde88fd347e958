"""Pure functions of logits: mixtures, entropy decomposition, likelihoods and Gaussian links.

They turn the logits of several members into one prediction with total, aleatoric and epistemic uncertainty in nats.
They need torch only; no model is involved.
"""
