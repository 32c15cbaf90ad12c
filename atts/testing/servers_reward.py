"""Reward server: a planted reward model over HTTP, in vLLM's dialect or SGLang's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

RewardRoute = Literal["/pooling", "/classify", ""]
Rewards = Callable[[str, Sequence[str]], float]
"""The chance that the last of some steps is correct, by problem and steps."""


class RewardServer:
    """A reward model whose rewards a function plants; a context manager that serves while it is open.

    vLLM's `/pooling` gives a row for each separator, and with `pools` "all" one for each word, as a
    model without step pooling does. vLLM's `/classify` and SGLang's give one for the whole text.
    SGLang is asked with ids, which `decode` turns into text; there the text is one step. Without a
    route the server serves a model that writes.

    >>> with RewardServer(lambda problem, steps: 0.9) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self,
        rewards: Rewards,
        dialect: Literal["vllm", "sglang"] = "vllm",
        *,
        model: str = "toy-prm",
        separator: str = "<extra_0>",
        route: RewardRoute = "/pooling",
        pools: Literal["step", "all"] = "step",
        numbers: int = 2,
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
    ) -> None:
        self.rewards = rewards
        self.dialect = dialect
        self.model = model
        self.separator = separator
        self.route = "/classify" if dialect == "sglang" and route else route
        self.pools = pools
        self.numbers = numbers  # in a row
        self.decode = decode
        self.bodies: list[dict[str, Any]] = []  # bodies of every call for rewards
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Return where it listens."""
        assert self._http is not None, "it listens while it is open"
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def address(self) -> str:
        """Return its address for `score.reward`."""
        return f"{self.dialect}:{self.url}/{self.model}"

    def __enter__(self) -> Self:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                found = self.path == "/v1/models"
                self._reply(
                    200 if found else 404, {"data": [{"id": server.model}]} if found else {}
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != server.route:
                    self._reply(404, {"detail": "Not Found"})
                    return
                server.bodies.append(body)
                self._reply(200, server.answer(body))

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

            def _reply(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def answer(self, body: dict[str, Any]) -> Any:
        """Return the reply to a call."""
        if self.dialect == "sglang":
            text = self.decode(body["input_ids"])
            return [{"embedding": self.row(self.rewards("", [text])), "meta_info": {}}]
        problem = body["messages"][0]["content"]
        text = body["messages"][-1]["content"]
        if self.route == "/classify":
            row = self.row(self.rewards(problem, [text]))
            return {"object": "list", "data": [{"index": 0, "probs": row, "num_classes": len(row)}]}
        steps = text.split(self.separator)[:-1] if self.pools == "step" else text.split()
        rows = [self.row(self.rewards(problem, steps[: n + 1])) for n in range(len(steps))]
        return {"object": "list", "data": [{"index": 0, "object": "pooling", "data": rows}]}

    def row(self, chance: float) -> list[float]:
        """Return a reward as the model's row of numbers."""
        return [1 - chance, chance] if self.numbers == 2 else [chance] * self.numbers
