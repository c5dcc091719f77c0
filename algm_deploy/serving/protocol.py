"""Messages of the Open Inference Protocol (KServe v2), JSON alone or with tensors in binary after it.

Source: the protocol's REST description (kserve/open-inference-protocol) and its extension for binary tensors
(triton-inference-server/server, docs/protocol/extension_binary_data.md).
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from algm_deploy.errors import BundleError, RequestError

IMAGE, ENCODED = "image", "encoded_image"
LABELS, LABELS_PNG, TOKENS_PNG, TOKEN_COUNTS, PATCHES = "labels", "labels_png", "tokens_png", "token_counts", "patches"
DEFAULT_OUTPUTS = (LABELS, TOKEN_COUNTS, PATCHES)
"""What a request gets that names no outputs: all that are numbers."""

HEADER_LENGTH = "inference-header-content-length"
"""Name of the HTTP header that tells how many bytes of a message are JSON; tensors follow them."""

Value = NDArray[Any] | list[bytes]
"""A tensor of a message: numbers, or one byte string an element."""

_DATATYPES = {"uint8": "UINT8", "int32": "INT32", "int64": "INT64"}


def check_name(name: str) -> None:
    """Refuses a name of a model that does not fit into addresses, or names a folder that is none of its own.

    Raises:
        BundleError: it is one.
    """
    if not re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) or not name.strip("."):
        raise BundleError(
            f"expected a name of letters, digits, dots, dashes and underscores for addresses, got {name!r:.120}: "
            "choose one with --name"
        )


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: msgspec.Raw = msgspec.Raw()  # empty where there is none
    parameters: dict[str, Any] = {}


class _Output(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct, frozen=True):
    inputs: tuple[_Tensor, ...]
    id: str = ""
    outputs: tuple[_Output, ...] = ()
    parameters: dict[str, Any] = {}


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    `pictures` are encoded files, or pixels (H, W, 3) uint8; `outputs` tells for each output, by name, whether it goes
    back in binary; `tau`, `gbm` and `dense` are as `Predictor` has them.
    """

    pictures: Sequence[bytes | NDArray[np.uint8]]
    outputs: Mapping[str, bool]
    tau: float | None = None
    gbm: float | None = None
    dense: bool = False
    id: str = ""


def read_request(body: bytes, header_length: str | None, known: Sequence[str], most_pictures: int) -> Asked:
    """The request in the body of an HTTP request.

    Args:
        body: all of it.
        header_length: value of the header `HEADER_LENGTH`, None where there is none.
        known: names of the outputs that this network has.
        most_pictures: more are refused.

    Raises:
        RequestError: anything that is not what the protocol or this network expects.
    """
    length = len(body) if header_length is None else _length(header_length, len(body))
    try:
        request = msgspec.json.decode(memoryview(body)[:length], type=_Request)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise RequestError(f"expected a request of the Open Inference Protocol as JSON, got {error!s:.200}") from error
    if len(request.inputs) != 1:
        raise RequestError(f"expected one input, {IMAGE} or {ENCODED}, got {len(request.inputs)}")
    (given,) = request.inputs
    content = _content(given, memoryview(body)[length:])
    pictures = _encoded(given, content) if given.name == ENCODED else _pixels(given, content)
    if not 1 <= len(pictures) <= most_pictures:
        raise RequestError(f"expected 1 to {most_pictures} pictures in a request, got {len(pictures)}: send several")
    return Asked(pictures, _outputs(request, known), **merging_of(request.parameters), id=request.id)


def merging_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments `tau`, `gbm` and `dense` among a request's parameters; those of the protocol are left out.

    Raises:
        RequestError: a parameter that nothing reads, or a value of another kind, such as a text or NaN.
    """
    given = {name: value for name, value in parameters.items() if name != "binary_data_output"}
    if unknown := sorted(set(given) - {"tau", "gbm", "dense"}):
        raise RequestError(f"expected the parameters tau, gbm and dense, got {unknown[0]!r:.50}: leave it out")
    for name in given.keys() & {"tau", "gbm"}:
        number = given[name]
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e30:  # NaN is not
            raise RequestError(
                f"expected a number as {name}, got {number!r:.50}: merge nothing with the parameter dense, true"
            )
    if not isinstance(given.get("dense", False), bool):
        raise RequestError(f"expected true or false as dense, got {given['dense']!r:.50}")
    return given


def write_response(model: str, version: str, asked: Asked, values: Mapping[str, Value]) -> tuple[bytes, dict[str, str]]:
    """The body of an answer, and its HTTP headers."""
    entries, tail = [], []
    for name, binary in asked.outputs.items():
        value = values[name]
        entry: dict[str, Any] = {"name": name, **_kind(value)}
        if binary:
            content = _in_binary(value)
            entry["parameters"] = {"binary_data_size": len(content)}
            tail.append(content)
        elif isinstance(value, list):
            entry["data"] = [base64.b64encode(one).decode() for one in value]
            entry["parameters"] = {"content_type": "base64"}
        else:
            entry["data"] = value.ravel().tolist()
        entries.append(entry)
    table = {"model_name": model, "model_version": version, "outputs": entries} | ({"id": asked.id} if asked.id else {})
    head = msgspec.json.encode(table)
    if not tail:
        return head, {"content-type": "application/json"}
    return b"".join((head, *tail)), {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}


# ------------------------------------------------------------------------------------------------------------- reading


def _length(text: str, size: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 12 or int(text) > size:
        raise RequestError(f"expected the length of the JSON in {HEADER_LENGTH}, up to {size}, got {text!r:.50}")
    return int(text)


def _content(given: _Tensor, tail: memoryview) -> memoryview | msgspec.Raw:
    """What an input holds: bytes after the JSON, or its JSON."""
    size = given.parameters.get("binary_data_size")
    has_data = bool(memoryview(given.data))
    if size is None:
        if not has_data or tail:
            raise RequestError(f"expected {given.name} as data in JSON, or in binary with its binary_data_size")
        return given.data
    if has_data or type(size) is not int or size != len(tail):
        raise RequestError(f"expected binary_data_size to be the {len(tail)} bytes after the JSON, got {size!r:.50}")
    return tail


def _pixels(given: _Tensor, content: memoryview | msgspec.Raw) -> Sequence[NDArray[np.uint8]]:
    """Pictures (H, W, 3) of an input of one or several."""
    if given.name != IMAGE:
        raise RequestError(f"expected the input {IMAGE} or {ENCODED}, got {given.name!r:.50}")
    shape = given.shape
    if given.datatype != "UINT8" or len(shape) not in (3, 4) or shape[-1] != 3 or min(shape) < 1:
        raise RequestError(
            f"expected {IMAGE} as UINT8 [height, width, 3] or [pictures, height, width, 3], got {given.datatype!r:.20} "
            f"{list(shape)!s:.50}"
        )
    values = _bytes_of(content) if isinstance(content, msgspec.Raw) else np.frombuffer(content, np.uint8)
    if values.size != prod(shape):
        raise RequestError(f"expected {prod(shape)} values for {IMAGE} {list(shape)!s:.50}, got {values.size}")
    pictures = values.reshape(shape)
    return [pictures] if len(shape) == 3 else list(pictures)


def _bytes_of(data: msgspec.Raw) -> NDArray[np.uint8]:
    """Whole numbers 0..255 of a JSON array, flat or in rows."""
    try:
        values = np.asarray(msgspec.json.decode(data))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # rows of different lengths
        raise RequestError(f"expected rows of the same length as data of {IMAGE}, got {error!s:.100}") from error
    if values.dtype.kind not in "iu" or (values.size and not 0 <= values.min() <= values.max() <= 255):
        raise RequestError(f"expected whole numbers from 0 to 255 as data of {IMAGE}, got others")
    return values.astype(np.uint8).ravel()


def _encoded(given: _Tensor, content: memoryview | msgspec.Raw) -> list[bytes]:
    """Encoded pictures of an input of byte strings."""
    if given.datatype != "BYTES" or len(given.shape) != 1:
        raise RequestError(
            f"expected {ENCODED} as BYTES [pictures], got {given.datatype!r:.20} {list(given.shape)!s:.50}"
        )
    found = _from_base64(content) if isinstance(content, msgspec.Raw) else list(_elements(content))
    if len(found) != given.shape[0]:
        raise RequestError(f"expected {given.shape[0]} pictures in {ENCODED}, got {len(found)}")
    return found


def _from_base64(data: msgspec.Raw) -> list[bytes]:
    try:
        return [base64.b64decode(text, validate=True) for text in msgspec.json.decode(data, type=list[str])]
    except (msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise RequestError(
            f"expected a list of texts in base64 as data of {ENCODED}, got {error!s:.100}: or send them in binary"
        ) from error


def _elements(content: memoryview) -> Iterator[bytes]:
    """Byte strings that each follow their length (4 bytes, little endian)."""
    while content:
        if len(content) < 4 or (end := 4 + struct.unpack_from("<I", content)[0]) > len(content):
            raise RequestError(f"expected in {ENCODED} the length of each picture (4 bytes, little endian) before it")
        yield bytes(content[4:end])
        content = content[end:]


def _outputs(request: _Request, known: Sequence[str]) -> dict[str, bool]:
    all_binary = request.parameters.get("binary_data_output", False) is True
    named = {one.name: one.parameters.get("binary_data", all_binary) is True for one in request.outputs}
    if unknown := [name for name in named if name not in known]:
        raise RequestError(f"this network has no output {unknown[0]!r:.50}: choose from {', '.join(known)}")
    return named or dict.fromkeys((name for name in DEFAULT_OUTPUTS if name in known), all_binary)


# ------------------------------------------------------------------------------------------------------------- writing


def _kind(value: Value) -> dict[str, Any]:
    if isinstance(value, list):
        return {"datatype": "BYTES", "shape": [len(value)]}
    return {"datatype": _DATATYPES[value.dtype.name], "shape": list(value.shape)}


def _in_binary(value: Value) -> bytes:
    if isinstance(value, list):
        return b"".join(part for one in value for part in (struct.pack("<I", len(one)), one))
    return np.ascontiguousarray(value).tobytes()
