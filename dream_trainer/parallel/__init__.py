"""Models on several ranks: sharded, replicated, and tensor, context, expert and pipeline parallel."""
