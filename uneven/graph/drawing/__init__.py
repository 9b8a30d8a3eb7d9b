"""Graphs as pictures: draw.py decides what is shown, layout.py where, svg.py and dot.py how.

Nothing else in graph/ imports this folder but graph.py, for `Graph.draw`.
"""
