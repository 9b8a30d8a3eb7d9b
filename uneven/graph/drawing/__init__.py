"""Drawings of graphs: draw.py chooses the items, layout.py places them, svg.py and dot.py write them.

Only graph.py imports this folder, for `Graph.draw` (tests/test_shape.py).
"""
