"""Kernels: exact Markov chains that take several energies a move. Each file is one method."""
