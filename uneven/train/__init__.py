"""One rank of a run: its training loop, and how it stays in step with the others.

worker.py is the loop, engine.py the rank by itself. gradient_sync.py (policies sync and balanced) and local_sgd.py
(cadence and async) keep ranks in step, both by the contract in synchronizer.py. saves.py writes checkpoints, and
resume.py reads them. elastic/ is what happens when ranks are lost, join or leave.
"""
