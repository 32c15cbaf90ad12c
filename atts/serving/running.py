"""Run the server process of the endpoint until its requests have ended after a signal."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio
import anyio.lowlevel
import uvicorn

from atts.errors import UsageError
from atts.serving.app import build_app
from atts.serving.background import Responses
from atts.serving.service import Service

DRAIN_SECONDS = 30
"""The seconds that requests have to end after the server was asked to end."""


class _Server(uvicorn.Server):
    """A server that ends after SIGTERM or Ctrl-C without raising the signal again.

    The caller still has to close engines, and ending after all requests is not an error.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Let signals start the draining of the server, for the duration of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def asked(number: int, frame: object) -> None:
            self._service.is_draining = True
            self.should_exit = True

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, asked) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def run_server(
    service: Service, host: str, port: int, listening: Callable[[str], None]
) -> None:
    """Open the service and serve it until a signal; `listening` is passed the address.

    :raises UsageError: the address cannot be listened on.
    :raises ATTSError: the service cannot be opened.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror})"
        ) from error
    with listener:
        responses = Responses(service)
        async with responses.open():
            config = uvicorn.Config(
                build_app(service, responses),
                log_level="warning",
                access_log=False,
                http="h11",  # the other parser does not limit the size of headers
                lifespan="off",
                timeout_graceful_shutdown=DRAIN_SECONDS,
                h11_max_incomplete_event_size=1 << 16,
                server_header=False,
            )
            shown = f"[{host}]" if ":" in host else host
            listening(f"http://{shown}:{listener.getsockname()[1]}/v1")
            server = _Server(config, service)
            try:
                await server.serve(sockets=[listener])
            finally:
                # A cancelled server would leave the loop reading a descriptor that is closed here,
                # and connections that their clients keep open.
                for one in getattr(server, "servers", ()):
                    one.close()
                for connection in list(server.server_state.connections):
                    transport = getattr(connection, "transport", None)
                    if transport is not None:
                        transport.abort()
                with anyio.CancelScope(shield=True):
                    await anyio.lowlevel.checkpoint()  # transports close in the loop's next step
