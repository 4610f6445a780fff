# SPDX-License-Identifier: Apache-2.0
"""A front end for a real S3 server, which answers some requests itself, as other stores or policies would."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass(frozen=True)
class Request:
    """A request as a rule sees it; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD")


Rule = Callable[[Request], tuple[int, str] | None]
"""HTTP status and S3 error code of an answer given without asking the server; None: the server is asked."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A disconnected client is not a server error. Printing one parses source text in this thread, and meanwhile
        Python 3.11 cannot parse any in another."""


class S3Front:
    """Forwards requests to a port of 127.0.0.1, unless `rule` answers. Its clock is `ahead_s` ahead of this machine's
    (negative: behind it). Runs on its own threads."""

    def __init__(self, port: int) -> None:
        self.rule: Rule = lambda request: None
        self.ahead_s = 0.0
        self.seen: list[Request] = []
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers)
                front.seen.append(request)
                answer = front.rule(request)
                if answer is not None:
                    self._answer(*answer)
                else:
                    self._pass_on(body)

            def _answer(self, status: int, code: str) -> None:
                text = f"<Error><Code>{code}</Code></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            def _pass_on(self, body: bytes) -> None:
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    server.putheader(name, value)
                server.endheaders(body)
                answer = server.getresponse()
                data = _LISTED_TIME.sub(lambda found: _shifted(found, front.ahead_s), answer.read())
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() == "last-modified":
                        moment = parsedate_to_datetime(value) + timedelta(seconds=front.ahead_s)
                        self.send_header(name, format_datetime(moment, usegmt=True))
                    elif name.lower() == "content-length" and data:
                        self.send_header(name, str(len(data)))  # HEAD gives the length of the body not sent
                    elif name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                if "Content-Length" not in answer.headers:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                server.close()

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string((time.time() if timestamp is None else timestamp) + front.ahead_s)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_LISTED_TIME = re.compile(rb"(?<=<LastModified>)[^<]+(?=</LastModified>)")


def _shifted(found: re.Match[bytes], seconds: float) -> bytes:
    """A time in a listing, shifted by `seconds`."""
    if not seconds:
        return found[0]
    moment = datetime.fromisoformat(found[0].decode()) + timedelta(seconds=seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z").encode()


@contextmanager
def s3_front(port: int) -> Iterator[S3Front]:
    front = S3Front(port)
    try:
        yield front
    finally:
        front.close()
