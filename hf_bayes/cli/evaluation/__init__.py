"""The evaluation of a posterior on data: what is scored for each task, the table and the figure.

``cases`` has a row for each task: how its rows are read, which columns and figures its table has. ``texts`` and the
modules that use it read labelled texts; ``windows`` reads the windows of a language model.
"""
