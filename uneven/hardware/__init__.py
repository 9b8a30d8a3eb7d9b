"""What this machine is and what it can train on.

Everything here works with no torch, no GPU, no NVML and no psutil: what cannot be known is None, and the
reason is said. Only functions that ask torch itself import it, inside. Imports uneven.errors and itself only.
"""
