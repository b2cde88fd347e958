"""Code behind the command line: the ``hf-bayes-diagnose`` command, and the parts that the training scripts share.

``diagnose`` is the command. The scripts use ``arguments``, ``data``, ``token_windows``, ``labels`` and ``scripts``.
"""
