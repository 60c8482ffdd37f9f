"""What the pipeline is measured against: the machine's limits, and a plain program."""
