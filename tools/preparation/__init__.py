"""Implementation of tools.prepare_data: from text files to the shards of a store."""
