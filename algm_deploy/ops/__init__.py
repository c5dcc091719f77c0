"""The operators of token merging, registered with PyTorch as `algm::*` (torch.ops.algm).

One file an operator: schema, PyTorch operator with fake kernel and gradient, NumPy reference, ONNX body. They are
registered here once: a second registration of the same name would silently drop the fake kernels.
"""

from algm_deploy.ops.attention import attention
from algm_deploy.ops.bias_skip import bias_skip
from algm_deploy.ops.bias_skip_norm import bias_skip_norm
from algm_deploy.ops.clap import clap
from algm_deploy.ops.cls_attention import cls_attention
from algm_deploy.ops.cts import cts
from algm_deploy.ops.deformable_attention import deformable_attention
from algm_deploy.ops.dtop import dtop
from algm_deploy.ops.elvit import elvit, elvit_restore
from algm_deploy.ops.evit import evit
from algm_deploy.ops.g2tm import g2tm
from algm_deploy.ops.gbm import gbm
from algm_deploy.ops.gelu import gelu
from algm_deploy.ops.label_map import label_map
from algm_deploy.ops.layer_norm import layer_norm
from algm_deploy.ops.mask_labels import mask_labels
from algm_deploy.ops.mpm import mpm
from algm_deploy.ops.packed_attention import packed_attention
from algm_deploy.ops.patches import patches
from algm_deploy.ops.proportional_attention import proportional_attention
from algm_deploy.ops.remerge import remerge
from algm_deploy.ops.tome import tome
from algm_deploy.ops.unmerge import unmerge

__all__ = [
    "attention",
    "bias_skip",
    "bias_skip_norm",
    "clap",
    "cls_attention",
    "cts",
    "deformable_attention",
    "dtop",
    "elvit",
    "elvit_restore",
    "evit",
    "g2tm",
    "gbm",
    "gelu",
    "label_map",
    "layer_norm",
    "mask_labels",
    "mpm",
    "packed_attention",
    "patches",
    "proportional_attention",
    "remerge",
    "tome",
    "unmerge",
]
