"""From photos to the pixels a network takes, and from its windows back to label maps."""
