"""Draws synthetic street scenes with labels: `scene(seed)` of `painter.scenes`."""
