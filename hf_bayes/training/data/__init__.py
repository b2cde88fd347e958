"""The rows of a run: which chain sees which of them, the held-out ones, and a fingerprint of all."""
