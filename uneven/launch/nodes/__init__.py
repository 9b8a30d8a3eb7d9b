"""One run over several machines: `uneven run --nodes`, which leads, and `uneven join`, which takes part."""
