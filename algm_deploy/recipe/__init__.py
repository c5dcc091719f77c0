"""What a person decides about a deployment."""
