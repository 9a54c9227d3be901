"""The optimizer, the train state, and the train and eval steps."""
