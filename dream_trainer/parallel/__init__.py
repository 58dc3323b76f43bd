"""What models are on several ranks: shards, replicas, and parts of layers, sequences, experts and pipelines."""
