"""Estimates memory, communication and time of a run on devices that are not attached."""
