"""Between a request and the network: pictures are decoded and resized, predictions become the outputs asked for."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import cv2
import numpy as np
from numpy.typing import NDArray

from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import ImageError, RequestError
from algm_deploy.pictures.preprocessing import decoded_photo
from algm_deploy.pictures.sliding import Pending, Prediction
from algm_deploy.predictor import Predictor
from algm_deploy.report.colors import classes_of
from algm_deploy.report.pictures import labels_picture, tokens_picture
from algm_deploy.serving.protocol import LABELS, LABELS_PNG, PATCHES, TOKEN_COUNTS, TOKENS_PNG, Asked, Value


class Answers:
    """What a network can be asked for, and how that is made. It may be used from several threads.

    Args:
        predictor: opened.
        most_pixels: of one picture; larger ones are refused before anything is decoded.
    """

    def __init__(self, predictor: Predictor, most_pixels: int) -> None:
        self._predictor, self._most_pixels = predictor, most_pixels
        self.classes = classes_of(predictor.bundle.recipe)
        grid = predictor.bundle.recipe.network.grid
        self._patches = grid[0] * grid[1]
        self.merges = predictor.signature.merges
        self.labels_dtype = "uint8" if predictor.bundle.recipe.network.classes <= 255 else "int32"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that this network has."""
        return output_names(self._predictor.bundle)

    def prepared(self, asked: Asked) -> list[Pending]:
        """The pictures of a request, decoded and resized.

        Raises:
            ImageError: a picture cannot be read, is too large, or does not fit the network.
            RequestError: label maps of different sizes do not fit into one output.
        """
        found = []
        for number, given in enumerate(asked.pictures, 1):
            name = f"picture {number}"
            if isinstance(given, bytes):
                photo = decoded_photo(given, name, self._most_pixels)
            else:
                photo = given
                self._check_pixels(photo, name)
            try:
                found.append(self._predictor.prepared(photo))
            except ImageError as error:
                raise ImageError(f"{name}: {error}") from error
        if LABELS in asked.outputs and len({one.size for one in found}) > 1:
            raise RequestError(
                f"expected pictures of one size for the output {LABELS}: ask for {LABELS_PNG}, or send them one by one"
            )
        return found

    def values(self, asked: Asked, pictures: Sequence[Pending]) -> dict[str, Value]:
        """Outputs of pictures that are done, by name: those that were asked for, and the counts."""
        predictions = [picture.prediction() for picture in pictures]
        values: dict[str, Value] = {
            PATCHES: np.array([len(one.anchors) * self._patches for one in predictions], np.int64)
        }
        if self.merges:
            values[TOKEN_COUNTS] = np.stack([one.token_counts.sum(0) for one in predictions])
        if LABELS in asked.outputs:
            values[LABELS] = np.stack([one.labels for one in predictions])
        if LABELS_PNG in asked.outputs:
            values[LABELS_PNG] = [self._labels_png(one) for one in predictions]
        if TOKENS_PNG in asked.outputs:
            drawn = zip(pictures, predictions, strict=True)
            values[TOKENS_PNG] = [
                _png(tokens_picture(self._predictor, picture.canvas, one)[..., ::-1]) for picture, one in drawn
            ]
        return values

    def _check_pixels(self, photo: NDArray[np.uint8], name: str) -> None:
        height, width = photo.shape[:2]
        if height * width > self._most_pixels:
            raise ImageError(f"{name}: expected at most {self._most_pixels} pixels, got {width}x{height}")

    def _labels_png(self, prediction: Prediction) -> bytes:
        stream = BytesIO()
        labels_picture(prediction.labels, self.classes).save(stream, "PNG", compress_level=1)
        return stream.getvalue()


def output_names(bundle: Bundle) -> tuple[str, ...]:
    """Names of the outputs that a network has. Tokens are drawn where each stands for patches of its own."""
    merges = bundle.signature.merges
    pictured = (TOKENS_PNG,) if merges and bundle.recipe.merging.row.standing else ()
    return LABELS, LABELS_PNG, *pictured, *((TOKEN_COUNTS,) if merges else ()), PATCHES


def token_rows(values: dict[str, Value]) -> list[tuple[int, list[int]]]:
    """For each picture its patches and the tokens left after each merge, for metrics."""
    patches = np.asarray(values[PATCHES]).tolist()
    return list(zip(patches, np.asarray(values.get(TOKEN_COUNTS, [[]] * len(patches))).tolist(), strict=True))


def _png(picture: NDArray[np.uint8]) -> bytes:
    """A BGR picture as PNG."""
    return cv2.imencode(".png", picture)[1].tobytes()
