"""Predictions in a single forward pass: the mean and the covariance of hidden states go from layer to layer."""
