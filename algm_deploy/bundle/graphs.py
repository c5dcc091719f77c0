"""Names inside the graphs of a bundle, for whoever writes them and for whoever builds from them without PyTorch."""

DOMAIN = "algm"
"""The operators' ONNX domain, and their namespace in PyTorch."""
VERSION = 1

PLUGIN_NAMESPACE = "algm_deploy"
PLUGIN_VERSION = "2"
MERGES = ("clap", "gbm")
PLUGINS = (*MERGES, "unmerge", "label_map", "deformable_attention")
"""The operators that TensorRT has from our library of plugins."""

# Entries of a model's metadata, for whoever builds it: how many products are fp32 in every precision, as similarities
# and means of merges are, and how many attentions are written in standard operators.
FLOAT32_PRODUCTS, PLAIN_ATTENTIONS = "float32_products", "plain_attentions"
