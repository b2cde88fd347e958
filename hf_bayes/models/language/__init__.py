"""The parts of a language model with members: hidden states and logits, packed rows, and the record of each token."""
