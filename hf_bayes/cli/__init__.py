"""The ``hf-bayes`` command, its parts, and the functions that it shares with the scripts of the repository.

``main`` finds the command in ``commands``, which has a module for each. ``arguments`` parses flags and files, ``help``
writes the help, and ``quiet`` keeps messages of other libraries off the terminal.

Training uses ``language_model`` or ``classifier``, which load a model and its data (``data``, ``token_windows``,
``labels``, ``padding``), and ``scripts``. The package ``evaluation`` has the parts of ``hf-bayes evaluate``.
"""
