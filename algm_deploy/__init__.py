"""Deploys plain-ViT segmenters with adaptive token merging (ALGM, CVPR 2024).

Importing this package loads no tensor library and no runtime.
"""

__version__ = "0.1.0"
