"""Messages of the Open Inference Protocol: what is read, what is refused, what is written."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest

from algm_deploy.errors import RequestError
from algm_deploy.serving.protocol import Asked, merging_of, read_request, write_response

KNOWN = ("labels", "labels_png", "token_counts", "patches")
PIXELS = {"name": "image", "datatype": "UINT8", "shape": [1, 2, 3], "data": [1, 2, 3, 4, 5, 6]}
FILE = {"name": "encoded_image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(b"JPEG").decode()]}


def read(one: dict[str, Any], tail: bytes = b"", **rest: Any) -> Asked:
    head = json.dumps({"inputs": [one], **rest}).encode()
    return read_request(head + tail, str(len(head)) if tail else None, KNOWN, 4)


def test_pixels_are_read_flat_in_rows_and_in_binary() -> None:
    rows = {**PIXELS, "data": [[[1, 2, 3], [4, 5, 6]]]}
    binary = {**PIXELS, "parameters": {"binary_data_size": 6}}
    del binary["data"]
    for asked in (read(PIXELS), read(rows), read(binary, bytes(range(1, 7)))):
        (picture,) = asked.pictures
        assert np.array_equal(picture, np.arange(1, 7, dtype=np.uint8).reshape(1, 2, 3))
        assert asked.outputs == dict.fromkeys(("labels", "token_counts", "patches"), False)
    several = read({**PIXELS, "shape": [2, 1, 1, 3]})
    assert [one.tolist() for one in several.pictures] == [[[[1, 2, 3]]], [[[4, 5, 6]]]]


def test_files_are_read_from_base64_and_in_binary() -> None:
    tail = b"".join(struct.pack("<I", len(one)) + one for one in (b"first", b""))
    binary = {"name": "encoded_image", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(tail)}}
    assert read(FILE).pictures == [b"JPEG"]
    assert read(binary, tail).pictures == [b"first", b""]


def test_outputs_and_parameters() -> None:
    outputs = [{"name": "labels", "parameters": {"binary_data": True}}, {"name": "patches"}]
    asked = read(FILE, outputs=outputs, parameters={"tau": 0.5, "gbm": 1}, id="7")
    assert (asked.outputs, asked.tau, asked.gbm, asked.dense, asked.id) == (
        {"labels": True, "patches": False},
        0.5,
        1,
        False,
        "7",
    )
    assert read(FILE, parameters={"binary_data_output": True, "dense": True}).outputs["labels"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"datatype": "FP32"}, "as UINT8"),
        ({"shape": [2, 3]}, "as UINT8"),
        ({"shape": [1, 2, 4]}, "as UINT8"),
        ({"shape": [-1, -2, 3]}, "as UINT8"),
        ({"shape": [1, 2, "3"]}, "Open Inference Protocol"),
        ({"shape": [9, 9, 3]}, "expected 243 values"),
        ({"shape": [10**18, 10**18, 3]}, "values for image"),
        ({"data": [1, 2, 3, 4, 5, 256]}, "0 to 255"),
        ({"data": [1, 2, 3, 4, 5, -1]}, "0 to 255"),
        ({"data": [1, 2, 3, 4, 5, 0.5]}, "0 to 255"),
        ({"data": [1, 2, 3, 4, 5, "6"]}, "0 to 255"),
        ({"data": [True] * 6}, "0 to 255"),
        ({"data": [[1, 2], [3, 4, 5, 6]]}, "same length"),
        ({"data": {"a": 1}}, "0 to 255"),
        ({"name": "picture"}, "expected the input image"),
        ({"data": None}, "0 to 255"),
        ({"shape": [5, 1, 1, 3], "data": [0] * 15}, "1 to 4 pictures"),
        ({"parameters": {"binary_data_size": 6}}, "binary_data_size"),
    ],
)
def test_pixels_that_are_none_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        read({**PIXELS, **change})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data": ["not base64!"]}, "base64"),
        ({"data": [1]}, "base64"),
        ({"shape": [2]}, "expected 2 pictures"),
        ({"shape": []}, "as BYTES"),
        ({"datatype": "UINT8"}, "as BYTES"),
        ({"shape": [0], "data": []}, "1 to 4 pictures"),
    ],
)
def test_files_that_are_none_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        read({**FILE, **change})


@pytest.mark.parametrize("tail", [b"\x01", b"\x05\x00\x00\x00four", b"\xff\xff\xff\xff"])
def test_lengths_before_files_are_checked(tail: bytes) -> None:
    binary = {
        "name": "encoded_image",
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {"binary_data_size": len(tail)},
    }
    with pytest.raises(RequestError, match="length of each picture"):
        read(binary, tail)
    with pytest.raises(RequestError, match="bytes after the JSON"):
        read({**binary, "parameters": {"binary_data_size": len(tail) + 1}}, tail)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"inputs": []}', b"[" * 100_000, b'{"inputs": 1}'])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        read_request(body, None, KNOWN, 4)


@pytest.mark.parametrize("length", ["-1", "1e3", "99999", "", "9" * 30, "\u0663"])
def test_the_length_of_the_json_is_checked(length: str) -> None:
    with pytest.raises(RequestError, match="length of the JSON"):
        read_request(b"{}", length, KNOWN, 4)


@pytest.mark.parametrize(
    "given",
    [
        {"tau": float("nan")},
        {"tau": float("inf")},
        {"tau": "0.9"},
        {"tau": True},
        {"gbm": None},
        {"gbm": 10**400},
        {"dense": 1},
        {"budget": 3},
    ],
)
def test_parameters_that_are_none_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        merging_of(given)


def test_an_unknown_output_names_the_known() -> None:
    with pytest.raises(RequestError, match="choose from labels, labels_png"):
        read(FILE, outputs=[{"name": "scores"}])


def test_answers_in_json_and_in_binary() -> None:
    values = {"labels": np.array([[[1, 2]]], np.uint8), "labels_png": [b"PNG"], "patches": np.array([64])}
    content, headers = write_response("net", "1", Asked([], dict.fromkeys(values, False), id="7"), values)
    table = json.loads(content)
    assert headers == {"content-type": "application/json"}
    assert (table["model_name"], table["model_version"], table["id"]) == ("net", "1", "7")
    assert table["outputs"][0] == {"name": "labels", "datatype": "UINT8", "shape": [1, 1, 2], "data": [1, 2]}
    assert base64.b64decode(table["outputs"][1]["data"][0]) == b"PNG"

    content, headers = write_response("net", "1", Asked([], dict.fromkeys(values, True)), values)
    length = int(headers["inference-header-content-length"])
    sizes = [one["parameters"]["binary_data_size"] for one in json.loads(content[:length])["outputs"]]
    assert sizes == [2, 7, 8]
    assert content[length:] == b"\x01\x02" + b"\x03\x00\x00\x00PNG" + struct.pack("<q", 64)
