"""The bodies of the operators in standard ONNX, by operator name."""

from algm_deploy.ops._onnx import OPSET, Body, BodyBuilder
from algm_deploy.ops.attention import onnx_body as attention
from algm_deploy.ops.clap import onnx_body as clap
from algm_deploy.ops.gbm import onnx_body as gbm
from algm_deploy.ops.label_map import onnx_body as label_map
from algm_deploy.ops.proportional_attention import onnx_body as proportional_attention
from algm_deploy.ops.tome import onnx_body as tome
from algm_deploy.ops.unmerge import onnx_body as unmerge

BODIES: dict[str, BodyBuilder] = {
    "attention": attention,
    "clap": clap,
    "gbm": gbm,
    "label_map": label_map,
    "proportional_attention": proportional_attention,
    "tome": tome,
    "unmerge": unmerge,
}

__all__ = ["BODIES", "OPSET", "Body", "BodyBuilder"]
