"""The folder that runtimes execute, and what its manifest holds."""
