"""How tools.prepare_data works inside: from files of text to the shards of a store."""
