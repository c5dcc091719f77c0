"""Opened networks and other processes: what a fork, a pickle and foreign inputs meet is a sentence, never a wait."""

from __future__ import annotations

import copy
import os
import pickle  # noqa: TID251 - to see that it is refused
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import algm_deploy
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import BundleError, RuntimeUnavailableError
from algm_deploy.runners.contract import runner

RUNTIMES = ("torch", "onnxruntime-cpu")

# A server that loads before it forks its workers. The child uses, opens again and closes what its parent opened, loads
# for itself, and ends as programs do, which frees what they hold.
SERVER = """
import os, sys
import numpy as np, torch
import algm_deploy
from algm_deploy.bundle.store import Bundle
from algm_deploy.errors import RuntimeUnavailableError
from algm_deploy.runners.contract import runner
bundle, runtimes = Bundle.open(sys.argv[1]), sys.argv[2:]
torch.set_num_threads(2)  # threads that the child will not have
image = np.zeros((4, 3, 128, 128), np.uint8)
photo = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), dtype=np.uint8)  # OpenCV's threads resize it
networks = [runner(bundle, name).__enter__() for name in runtimes] + [algm_deploy.load(bundle, "torch")]
for network in networks[:-1]:
    network.infer({"image": image})
networks[-1].predict(photo)
child = os.fork()
if child == 0:
    uses = [lambda n=n: n.infer({"image": image}) for n in networks[:-1]]
    uses += [n.__enter__ for n in networks[:-1]] + [lambda: networks[-1].predict(photo)]
    for use in uses:
        try:
            use()
        except RuntimeUnavailableError as error:
            print("load it in the child process" in str(error), flush=True)
    for network in networks:
        network.__exit__(None, None, None)
    for name in runtimes:
        with algm_deploy.load(bundle, name) as own:
            print(own.predict(photo).shape, flush=True)
    del networks, uses, use, network
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
print(networks[0].infer({"image": image})["token_counts"].shape)
"""


def test_a_forked_child_is_told_and_ends(tiny_bundle: Bundle) -> None:
    """Without the checks it waits for ever: for threads of PyTorch when it runs, of ONNX Runtime when it ends."""
    command = [sys.executable, "-c", SERVER, str(tiny_bundle.path), *RUNTIMES]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["True"] * 5 + ["(1200, 1600)"] * 2 + ["0", "(4, 2)"]


BOUND = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from algm_deploy.bundle.store import Bundle
from algm_deploy.runners.contract import runner
bundle = Bundle.open(sys.argv[1])
with runner(bundle, "onnxruntime-cpu") as run:
    run.infer({"image": np.zeros((1, *bundle.signature.image.shape[1:]), np.uint8)})
    cores = {len(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
    print(run._session.get_session_options().intra_op_num_threads, *cores)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core to keep away from")
def test_a_process_bound_to_a_core_stays_there(tiny_bundle: Bundle) -> None:
    """Left to itself ONNX Runtime starts a thread for each core of the machine and binds it there."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", BOUND, str(tiny_bundle.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (done.returncode, done.stdout) == (0, "1 1\n"), done.stderr


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_opened_networks_are_neither_pickled_nor_copied(tiny_bundle: Bundle, runtime: str) -> None:
    with runner(tiny_bundle, runtime) as run, algm_deploy.load(tiny_bundle, runtime) as network:
        for opened in (run, network):
            for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(RuntimeUnavailableError, match="send the bundle's path and load it there"):
                    attempt(opened)  # type: ignore[operator]


def rows(image: np.ndarray) -> Any:
    return image.tolist()


def a_row_short(image: np.ndarray) -> Any:
    listed = image.tolist()
    listed[0][0].pop()
    return listed


TAKEN: dict[str, Callable[[np.ndarray], Any]] = {
    "tensor": torch.from_numpy,
    "list of arrays": list,
    "list of tensors": lambda image: [torch.from_numpy(one) for one in image],
    "view of memory": memoryview,
}
REFUSED: dict[str, Callable[[np.ndarray], Any]] = {
    "numbers": rows,
    "rows of different lengths": a_row_short,
    "bfloat16": lambda image: torch.from_numpy(image).bfloat16(),
    "meta": lambda image: torch.empty(image.shape, dtype=torch.uint8, device="meta"),
    "nothing": lambda _: None,
    "text": lambda _: "photo.png",
    "objects": lambda image: np.array([object()] * len(image)),
}


@pytest.fixture(scope="module")
def image(tiny_bundle: Bundle) -> np.ndarray:
    shape = tiny_bundle.signature.image.shape[1:]
    return np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)


@pytest.mark.parametrize("kind", TAKEN)
def test_what_numpy_takes_is_taken(tiny_bundle: Bundle, image: np.ndarray, kind: str) -> None:
    with runner(tiny_bundle, "torch") as run, algm_deploy.load(tiny_bundle, "torch") as network:
        expected = run.infer({"image": image})
        for found in (run.infer({"image": TAKEN[kind](image)}), network.infer(TAKEN[kind](image))):
            np.testing.assert_array_equal(found["scores"], expected["scores"])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_picture_is_refused(tiny_bundle: Bundle, image: np.ndarray, kind: str) -> None:
    with runner(tiny_bundle, "torch") as run, algm_deploy.load(tiny_bundle, "torch") as network:
        with pytest.raises(BundleError, match="expected"):
            run.infer({"image": REFUSED[kind](image)})
        if kind not in ("numbers", "bfloat16"):  # a predictor rounds numbers of any kind
            with pytest.raises(BundleError, match="expected"):
                network.infer(REFUSED[kind](image))
        with pytest.raises(BundleError, match="expected"):
            run.infer_device({"image": REFUSED[kind](image)})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda image: (image,), "expected inputs by name"),
        (lambda image: ({"image": image}, "scores"), r"expected a list of outputs, such as \['token_counts'\]"),
        (lambda image: ({"image": image}, 5), "expected a list of outputs"),
        (lambda image: ({"image": image, "clap_threshold": "high"},), "clap_threshold is one number"),
        (lambda image: ({"image": image, "clap_threshold": None},), "clap_threshold is one number"),
        (lambda image: ({"image": image, "clap_threshold": [[1], [1, 2]]},), "clap_threshold is one number"),
    ],
)
def test_calls_of_another_form(tiny_bundle: Bundle, image: np.ndarray, call: Any, told: str) -> None:
    with runner(tiny_bundle, "torch") as run:
        for infer in (run.infer, run.infer_device):
            with pytest.raises(BundleError, match=told):
                infer(*call(image))
