"""The vocabulary that every method shares: types, configs, random generators, schedules and the layout of theta.

This package imports no other package of the project.
"""
