"""The optimizer and the step."""
