"""What a pipeline has in every server, and its removal."""
