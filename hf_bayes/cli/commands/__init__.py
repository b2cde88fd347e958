"""The commands of ``hf-bayes``, one module for each.

A module has the function that does the work, and ``COMMAND``, the record with which ``cli.main`` parses its arguments.
The scripts of the repository call the same functions.
"""
