"""A bundle behind HTTP: requests of the Open Inference Protocol become batches, label maps go back."""
