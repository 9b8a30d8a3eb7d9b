"""The data of a run: the known sets (`datasets`), and how their samples reach the ranks.

Importing this package imports neither torch nor numpy; the modules inside do what they need.
"""
