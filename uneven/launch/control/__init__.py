"""A run as other terminals see and steer it: `uneven status`, `stop`, `logs` and `leave`."""
