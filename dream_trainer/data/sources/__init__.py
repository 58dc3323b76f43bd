"""Sources of samples: files read by number, token files and their writer, sequential sources in shards."""
