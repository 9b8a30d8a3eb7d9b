"""Which torch is installed here, and how it gets here: advice for a machine, environments, and the installation.

Works without torch: `uneven setup` runs before torch is there.
"""
