"""Variational inference: rules that end in a Gaussian. Each file is one method."""
