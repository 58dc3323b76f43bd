"""Weights from elsewhere, and exports: how they get into models and out of them, without training state."""
