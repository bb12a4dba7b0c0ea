"""More than one machine: the shards of an output as tasks of a Ray cluster."""
