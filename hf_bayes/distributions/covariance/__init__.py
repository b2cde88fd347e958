"""Covariance matrices of a Gaussian over theta: diagonal, Kronecker, low rank plus diagonal, and full.

Sigma [d, d] itself is never formed. Every structure offers the same six operations: a root for sampling, products with
Sigma and with its inverse, the diagonals of both, and log det Sigma. ``tensors`` and ``from_tensors`` are its form on
disk.
"""

from hf_bayes.distributions.covariance.base import Covariance, check_shapes, dense, log_normal, moved, require_density
from hf_bayes.distributions.covariance.diagonal import Diagonal
from hf_bayes.distributions.covariance.full import Full
from hf_bayes.distributions.covariance.kronecker import DiagonalBlock, Kronecker, KroneckerBlock, marginal
from hf_bayes.distributions.covariance.low_rank import LowRank

COVARIANCES: dict[str, type[Covariance]] = {kind.kind: kind for kind in (Diagonal, Kronecker, LowRank, Full)}
"""The covariance structures, by their names in a posterior's file."""

__all__ = [
    "COVARIANCES", "Covariance", "Diagonal", "DiagonalBlock", "Full", "Kronecker", "KroneckerBlock",
    "LowRank", "check_shapes", "dense", "log_normal", "marginal", "moved", "require_density",
]  # fmt: skip
