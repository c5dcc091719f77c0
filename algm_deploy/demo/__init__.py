"""The embedded example: a small network trained on drawn street scenes, and labelled scenes that it never saw."""
