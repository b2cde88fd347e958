"""Decisions by uncertainty: answer or abstain, a set of classes, which rows to label, and scores of whole answers.

``abstention`` stores a threshold with a posterior, and the pipelines use it. The other modules are functions of
probabilities, records and scores. The public names are in ``hf_bayes``: ``from hf_bayes import fit_abstention``.
"""
