"""Before the first step: what cannot work is refused, `auto` is resolved, ranks compare what they have."""
