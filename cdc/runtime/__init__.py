"""The only place that wires: pipeline file, local servers, destinations, streams."""
