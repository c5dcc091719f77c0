"""What strangers hand to the command line: one sentence, exit code 2, nothing half-written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from PIL import Image

from algm_deploy.bundle.files import ONNX, ONNX_DATA, WEIGHTS
from algm_deploy.bundle.manifest import MANIFEST
from algm_deploy.bundle.store import Bundle
from algm_deploy.cli import main

Edit = Callable[["Place"], None]


class Place:
    """A folder with a checkpoint, a bundle and a photo, each of which a case may spoil."""

    def __init__(self, folder: Path, checkpoint: Path, bundle: Bundle) -> None:
        self.folder = folder
        self.checkpoint = Path(shutil.copytree(checkpoint, folder / "checkpoint"))
        self.bundle = Path(shutil.copytree(bundle.path, folder / "bundle"))
        self.photo = folder / "photo.png"
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)).save(self.photo)

    def change_manifest(self, change: Callable[[dict[str, Any]], object]) -> None:
        manifest = json.loads((self.bundle / MANIFEST).read_text())
        change(manifest)
        (self.bundle / MANIFEST).write_text(json.dumps(manifest))

    def replace(self, name: str, content: bytes) -> None:
        """Another content whose hash the manifest lists: as an attacker, or another tool, would leave it."""
        (self.bundle / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()

        def list_it(manifest: dict[str, Any]) -> None:
            manifest["files"][name] |= {"sha256": sha256, "size_bytes": len(content)}
            for entry in manifest["files"].values():
                if name in entry.get("made_from", {}):
                    entry["made_from"][name] = sha256

        self.change_manifest(list_it)

    def change_graph(self, change: Callable[[onnx.ModelProto], object]) -> None:
        model = onnx.load(self.bundle / ONNX, load_external_data=False)
        change(model)
        self.replace(ONNX, model.SerializeToString())

    def change_variant(self, change: Callable[[str], str]) -> None:
        path = self.checkpoint / "variant.yml"
        path.write_text(change(path.read_text()))

    def change_weights(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        path = self.checkpoint / "checkpoint.pth"
        content = torch.load(path, weights_only=True)
        weights = content.get("model", content)
        change(weights)
        torch.save({"model": weights}, path)

    def snapshot(self) -> dict[str, str]:
        """Hash of every file; locks are empty files that stay."""
        return {
            path.relative_to(self.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.suffix != ".lock"
        }


@pytest.fixture
def place(tmp_path: Path, tiny_checkpoint: Path, tiny_bundle: Bundle) -> Place:
    return Place(tmp_path, tiny_checkpoint, tiny_bundle)


# --- edits -----------------------------------------------------------------------------------------------------------


def manifest(change: Callable[[dict[str, Any]], object]) -> Edit:
    return lambda place: place.change_manifest(change)


def graph(change: Callable[[onnx.ModelProto], object]) -> Edit:
    return lambda place: place.change_graph(change)


def content(name: str, change: Callable[[bytes], bytes]) -> Edit:
    return lambda place: place.replace(name, change((place.bundle / name).read_bytes()))


def variant(change: Callable[[str], str]) -> Edit:
    return lambda place: place.change_variant(change)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    return lambda place: place.change_weights(change)


def setting(section: str, key: str, value: object) -> Edit:
    return manifest(lambda m: m["recipe"][section].__setitem__(key, value))


def fact(key: str, value: object) -> Edit:
    return manifest(lambda m: m.__setitem__(key, value))


def signature(key: str, value: object) -> Edit:
    return manifest(lambda m: m["signature"].__setitem__(key, value))


def opset(version: int) -> Edit:
    return graph(lambda m: next(o for o in m.opset_import if not o.domain).__setattr__("version", version))


def outside(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[5].op_type = "Abacus"


def picture(mode: str, size: tuple[int, int] = (40, 40)) -> Edit:
    def write(place: Place) -> None:
        if mode == "animated":
            frames = [Image.new("RGB", size, colour) for colour in ("red", "blue")]
            frames[0].save(place.photo, format="GIF", save_all=True, append_images=frames[1:])
        elif mode == "cut":
            place.photo.write_bytes(place.photo.read_bytes()[:200])
        else:
            Image.new(mode, size).save(place.photo, format="TIFF" if mode == "LAB" else "PNG")

    return write


def rename(old: str, new: str) -> Edit:
    return lambda place: (place.bundle / old).rename(place.bundle / new) and None


def swap(one: str, other: str) -> Edit:
    def exchange(place: Place) -> None:
        a, b = place.bundle / one, place.bundle / other
        contents = a.read_bytes(), b.read_bytes()
        a.write_bytes(contents[1]), b.write_bytes(contents[0])

    return exchange


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12))
EXPORT = ("export", "{checkpoint}", "-o", "{folder}/new")
PREDICT = ("predict", "{bundle}", "{photo}", "-o", "{folder}/pictures")
ON_TORCH = (*PREDICT, "--runtime", "torch")
VERIFY = ("verify", "{bundle}", "--count", "1")
BUILD = ("build", "{bundle}")
REPORT = ("report", "{bundle}", "-o", "{folder}/report.html")


def nothing(place: Place) -> None:
    """The arguments alone are wrong."""


# name: (what is spoilt, command, part of the sentence). Kinds with a test of their own are not repeated here.
CASES: dict[str, tuple[Edit, tuple[str, ...], str]] = {
    # checkpoints and variant files
    "weights of another width": (weights(lambda w: w.update({"encoder.norm.bias": torch.ones(7)})), EXPORT, "(64,)"),
    "weights that are NaN": (weights(lambda w: w["encoder.norm.bias"].fill_(np.nan)), EXPORT, "finite"),
    "weights beyond fp16": (
        weights(lambda w: w["encoder.norm.bias"].fill_(7e4)),
        (*EXPORT, "--precision", "fp16"),
        "expected weights up to 65504 for float16, encoder.norm.bias holds 70000",
    ),
    "variant with aliases of aliases": (
        variant(lambda text: BOMB + text.replace("d_model: 64", "d_model: *a11")),
        EXPORT,
        "more than 10000 values",
    ),
    "variant with a merge of merges": (
        variant(lambda text: MERGES + text),
        EXPORT,
        "more than 10000 values",
    ),
    "variant that contains itself": (
        variant(lambda text: text.replace("net_kwargs:", "net_kwargs: &n\n  me: *n")),
        EXPORT,
        "more than 10000 values",
    ),
    "variant with a number of a mile": (
        variant(lambda text: text.replace("d_model: 64", "d_model: 0x" + "f" * 9000)),
        EXPORT,
        "expected a whole number as net_kwargs.d_model, got a number of thousands of digits",
    ),
    "variant of a megabyte": (variant(lambda text: text + "#" * 1_000_000), EXPORT, "a few kilobytes"),
    "setting of a mile": (
        nothing,
        (*EXPORT, "--set", "max_batch=0x" + "f" * 9000),
        "expected a whole number as max_batch, got a number of thousands of digits",
    ),
    # files of a bundle
    "a file is missing": (rename(ONNX_DATA, "elsewhere"), VERIFY, "expected model.onnx.data, found none"),
    "two files are swapped": (swap(ONNX_DATA, WEIGHTS), VERIFY, "bytes, got"),
    "no files are listed": (fact("files", {}), VERIFY, "expected a bundle with a file that a runtime executes"),
    "the weights are cut": (content(WEIGHTS, lambda b: b[:-100]), ON_TORCH, "expected weights as safetensors"),
    "the weights are text": (content(WEIGHTS, lambda b: b"weights" * 50), VERIFY, "expected weights as safetensors"),
    "the weights are of another network": (
        setting("network", "embed_dim", 128),
        ON_TORCH,
        "for the recipe's network, got",
    ),
    # graphs of a bundle whose hash is the listed one
    "the graph is cut": (content(ONNX, lambda b: b[: len(b) // 2]), PREDICT, "a graph that ONNX Runtime"),
    "the graph is cut before its build": (content(ONNX, lambda b: b[: len(b) // 2]), BUILD, "cannot be decoded"),
    "the graph is empty": (content(ONNX, lambda b: b""), PREDICT, "a graph that ONNX Runtime"),
    "the graph is empty before its build": (content(ONNX, lambda b: b""), BUILD, "in ONNX opset 18, got None"),
    "the graph is text": (content(ONNX, lambda b: b"graph" * 50), VERIFY, "a graph that ONNX Runtime"),
    "the graph's weights are cut": (content(ONNX_DATA, lambda b: b[:1000]), PREDICT, "a graph that ONNX Runtime"),
    "the graph is of an older opset": (opset(9), PREDICT, "a graph that ONNX Runtime"),
    "the graph is of a newer opset": (opset(99), VERIFY, "a graph that ONNX Runtime"),
    "the graph is of an older opset before its build": (opset(9), BUILD, "expected a network in ONNX opset 18, got 9"),
    "the graph has an unknown operator": (graph(unknown_operator), PREDICT, "a graph that ONNX Runtime"),
    "the graph has no outputs": (graph(lambda m: m.graph.ClearField("output")), PREDICT, "failed with"),
    "the graph's weights lie elsewhere": (graph(outside), PREDICT, "a graph that ONNX Runtime"),
    # facts of a bundle
    "the manifest is cut": (
        lambda p: (p.bundle / MANIFEST).write_bytes((p.bundle / MANIFEST).read_bytes()[:500]) and None,
        VERIFY,
        "expected JSON",
    ),
    "no signature": (
        manifest(lambda m: m.pop("signature")),
        PREDICT,
        "expected the signature of a network in its manifest",
    ),
    "a signature that is none": (fact("signature", 5), PREDICT, "expected a table or null as signature, got 5"),
    "a signature without outputs": (
        signature("outputs", []),
        VERIFY,
        "labels or scores, and token counts as signature",
    ),
    "a signature with words for numbers": (
        signature("max_batch", "many"),
        PREDICT,
        "expected a whole number as signature.max_batch, got 'many'",
    ),
    "a signature with other thresholds": (
        signature("defaults", {"clap_threshold": "x"}),
        PREDICT,
        "expected a finite number as signature.defaults.clap_threshold, got 'x'",
    ),
    "a signature of another type": (
        signature("inputs", [{"name": "image", "dtype": "complex64", "shape": [-1, 3, 128, 128]}]),
        PREDICT,
        "as signature.inputs.0.dtype, got 'complex64'",
    ),
    "no preprocessing": (
        manifest(lambda m: m.pop("preprocessing_sha256")),
        PREDICT,
        "made with other preprocessing rules (None instead of",
    ),
    "a preprocessing that is none": (
        fact("preprocessing_sha256", 5),
        PREDICT,
        "expected a text or null as preprocessing_sha256, got 5",
    ),
    "a section that is none": (fact("parity", 5), VERIFY, "expected a list of a table as parity, got 5"),
    "a section of the report": (fact("evaluations", {"a": 1}), REPORT, "expected a list of a table as evaluations"),
    "a section of the builder": (fact("optimized_graphs", {}), BUILD, "a list of a table as optimized_graphs, got {}"),
    "a section of another release": (fact("evaluation", {}), PREDICT, "that this release does not know, got 'evaluat"),
    "a figure that is none": (fact("position_embedding_resized_from", [float("nan"), 1]), PREDICT, "from.0, got nan"),
    "an engine without facts": (
        fact("engines", [{"runtime": "tensorrt", "batches": [1, 1, 1]}]),
        (*PREDICT, "--runtime", "tensorrt"),
        "expected a text as engines.0.version, found none",
    ),
    # pictures
    "an animation": (picture("animated"), PREDICT, "2 frames"),
    "a picture that is cut": (picture("cut"), PREDICT, "may be truncated"),
    "a picture in another colour space": (picture("LAB"), PREDICT, "mode LAB"),
    "a transparent picture": (picture("RGBA"), PREDICT, "transparent pixels"),
    "a picture a hundred times as long": (picture("RGB", (800, 8)), PREDICT, "8 times as long as wide"),
    # places
    "pictures into a file": (nothing, (*PREDICT[:-1], "{photo}"), "expected a folder for pictures"),
    "a bundle below a file": (nothing, (*EXPORT[:-1], "{photo}/new"), "expected to write"),
    "a report into nowhere": (nothing, (*REPORT[:-1], "{folder}/no/report.html"), "create it first"),
    "a name of five thousand letters": (nothing, ("verify", "x" * 5000), "File name too long: name another one"),
    "a new name of five thousand letters": (nothing, (*EXPORT[:-1], "x" * 5000), "File name too long"),
    # numbers
    "a threshold beyond cosines": (nothing, (*EXPORT, "--tau", "3"), "clap_threshold between -2 and 2"),
    "a batch of thousands": (nothing, (*EXPORT, "--max-batch", "5000"), "max_batch between 1 and 1024"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str, place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, words, expected = CASES[case]
    spoil(place)
    before = place.snapshot()
    code = main([word.format(**vars(place)) for word in words])
    errors = capfd.readouterr().err
    assert code == 2, errors
    assert errors.startswith(f"algm-deploy {words[0]}: ")
    assert errors.count("\n") == 1
    assert len(errors) < 1000 or "letters" in case
    assert expected in errors
    assert place.snapshot() == before


def test_a_sound_place_is_accepted(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """Otherwise the cases above would prove nothing."""
    for words in (PREDICT, ON_TORCH, BUILD, REPORT):
        assert main([word.format(**vars(place)) for word in words]) == 0, capfd.readouterr().err


def test_memory_that_ran_out_is_one_sentence(
    place: Place, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        np.empty(1 << 48)

    monkeypatch.setattr("algm_deploy.report.pictures.read_photo", exhausted)
    assert main([word.format(**vars(place)) for word in ON_TORCH]) == 2
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    assert "expected more free memory (Unable to allocate" in errors


def test_the_variant_of_the_published_code_still_reads(place: Place) -> None:
    """Its writer uses an alias where two settings are one object."""
    facts = yaml.safe_load((place.checkpoint / "variant.yml").read_text().replace("!!python/tuple", ""))  # noqa: TID251
    facts["net_kwargs"]["backbone_size"] = facts["net_kwargs"]["image_size"]
    text = yaml.dump(facts)
    assert "*id001" in text
    (place.checkpoint / "variant.yml").write_text(text)
    assert main([word.format(**vars(place)) for word in (*EXPORT, "--tau", "3")]) == 2
