"""Where samples come from: files read by number, token files and how they are written, sequential sources in shards."""
