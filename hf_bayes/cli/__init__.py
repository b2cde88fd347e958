"""Code behind the command line: the ``hf-bayes-diagnose`` command, and the parts that the scripts share.

``diagnose`` is the command. The training scripts use ``arguments``, ``data``, ``token_windows``, ``labels``,
``padding`` and ``scripts``. The evaluation script uses ``evaluation``; ``evaluation_cases``, which has a row for
each ``evaluate_...`` module; ``evaluation_table`` and ``evaluation_figure``.
"""
