"""The NumPy definitions of the operators under one name: what every other implementation is compared with."""

from algm_deploy.ops.attention import reference as attention
from algm_deploy.ops.bias_skip import reference as bias_skip
from algm_deploy.ops.bias_skip_norm import reference as bias_skip_norm
from algm_deploy.ops.clap import reference as clap
from algm_deploy.ops.clap import reference_decisions as clap_decisions
from algm_deploy.ops.clap import reference_rows as clap_rows
from algm_deploy.ops.clap import reference_similarity as window_similarity
from algm_deploy.ops.cls_attention import reference as cls_attention
from algm_deploy.ops.cts import reference as cts
from algm_deploy.ops.deformable_attention import reference as deformable_attention
from algm_deploy.ops.dtop import reference as dtop
from algm_deploy.ops.dtop import reference_rows as dtop_rows
from algm_deploy.ops.dtop import reference_stays as dtop_stays
from algm_deploy.ops.elvit import reference as elvit
from algm_deploy.ops.elvit import reference_centroids as elvit_centroids
from algm_deploy.ops.elvit import reference_distances as squared_distances
from algm_deploy.ops.elvit import reference_nearest as nearest
from algm_deploy.ops.elvit import reference_restore as elvit_restore
from algm_deploy.ops.evit import reference as evit
from algm_deploy.ops.evit import reference_sources as evit_sources
from algm_deploy.ops.g2tm import reference as g2tm
from algm_deploy.ops.g2tm import reference_groups as neighbour_groups
from algm_deploy.ops.g2tm import reference_rows as g2tm_rows
from algm_deploy.ops.g2tm import reference_similarity as neighbour_similarity
from algm_deploy.ops.gbm import reference as gbm
from algm_deploy.ops.gbm import reference_decisions as gbm_decisions
from algm_deploy.ops.gbm import reference_most_similar as most_similar
from algm_deploy.ops.gbm import reference_rows as gbm_rows
from algm_deploy.ops.gbm import reference_similarity as gbm_similarity
from algm_deploy.ops.gbm import reference_split as gbm_split
from algm_deploy.ops.gelu import reference as gelu
from algm_deploy.ops.label_map import reference as label_map
from algm_deploy.ops.layer_norm import reference as layer_norm
from algm_deploy.ops.mask_labels import reference as mask_labels
from algm_deploy.ops.mpm import reference as mpm
from algm_deploy.ops.mpm import reference_pairs as mpm_pairs
from algm_deploy.ops.mpm import reference_rows as mpm_rows
from algm_deploy.ops.mpm import reference_similarity as mpm_similarity
from algm_deploy.ops.packed_attention import reference as packed_attention
from algm_deploy.ops.patches import reference as patches
from algm_deploy.ops.proportional_attention import reference as proportional_attention
from algm_deploy.ops.remerge import reference as remerge
from algm_deploy.ops.tome import reference as tome
from algm_deploy.ops.tome import reference_order as tome_order
from algm_deploy.ops.unmerge import reference as unmerge

__all__ = [
    "attention",
    "bias_skip",
    "bias_skip_norm",
    "clap",
    "clap_decisions",
    "clap_rows",
    "cls_attention",
    "cts",
    "deformable_attention",
    "dtop",
    "dtop_rows",
    "dtop_stays",
    "elvit",
    "elvit_centroids",
    "elvit_restore",
    "evit",
    "evit_sources",
    "g2tm",
    "g2tm_rows",
    "gbm",
    "gbm_decisions",
    "gbm_rows",
    "gbm_similarity",
    "gbm_split",
    "gelu",
    "label_map",
    "layer_norm",
    "mask_labels",
    "most_similar",
    "mpm",
    "mpm_pairs",
    "mpm_rows",
    "mpm_similarity",
    "nearest",
    "neighbour_groups",
    "neighbour_similarity",
    "packed_attention",
    "patches",
    "proportional_attention",
    "remerge",
    "squared_distances",
    "tome",
    "tome_order",
    "unmerge",
    "window_similarity",
]
