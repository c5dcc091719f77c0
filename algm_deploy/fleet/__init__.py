"""Many pictures on many machines, by Ray Data: each worker opens a bundle once, pictures come to it in blocks."""
