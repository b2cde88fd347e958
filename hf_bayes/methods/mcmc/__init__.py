"""Markov chain Monte Carlo with an accept-reject step: kernels that take several energies per move.

Each file is one method. All but ``penalty`` evaluate the whole data set in every move and are exact.
"""
