"""The torch runtime."""
