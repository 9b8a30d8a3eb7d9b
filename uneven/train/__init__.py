"""Ranks that train together: the loop of each, how it stays in step with the others, and what follows when one is lost.

Together, from top to bottom: worker.py is the loop; settler.py and settle.py let it go on when ranks come or go;
run_events.py is what all ranks do where they meet; gradient_sync.py (sync and balanced) and local_sgd.py (cadence and
async, with local_state.py) keep ranks in step, with policies.py and by the contract in synchronizer.py; saves.py writes
checkpoints, saved_state.py goes on from them. One rank by itself: prepare.py, callbacks.py, engine.py, rank_info.py and
state.py, with requests.py from outside. A module imports only those below it (tests/test_shape.py). segment.py is what
benchmarks use.
"""
