"""Data of a run: the data sets that ship or download (`datasets`), and the feed that gives each rank its batches.

Importing this package imports neither torch nor numpy; modules import them where they need them.
"""
