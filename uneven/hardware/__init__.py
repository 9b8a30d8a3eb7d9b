"""Facts about this machine: devices, limits, drivers, the torch build, and what can be trained on.

Everything works without torch, a GPU, NVML or psutil: an unknown value is None, and a report gives the reason. torch is
imported only inside the functions that query it. Imports no other package than uneven.config and uneven.errors.
"""
