"""A client that knows nothing of the server."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from algm_deploy.predictor import Predictor


@dataclass
class Client:
    """Talks to a server; every request has a connection of its own."""

    port: int
    predictor: Predictor | None = None  # what it serves, where that is in this process
    headers: dict[str, str] = field(default_factory=dict)  # of the last answer

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            self.headers = dict(answer.getheaders())
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        status, content = self.ask("GET", path)
        return status, json.loads(content)

    def infer(self, one: dict[str, Any], **rest: Any) -> tuple[int, dict[str, Any]]:
        """An inference request in JSON: the status, and the data of each output, or the error."""
        status, content = self.ask("POST", "/v2/models/net/infer", json.dumps({"inputs": [one], **rest}).encode())
        table = json.loads(content)
        if status != 200:
            return status, table
        return status, {one["name"]: np.reshape(one["data"], one["shape"]) for one in table["outputs"]}
