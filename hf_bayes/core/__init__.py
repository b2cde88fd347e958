"""The vocabulary that every method shares: types, configs, random generators, schedules and the layout of theta.

Nothing here imports another package of the project.
"""
