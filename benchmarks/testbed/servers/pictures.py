# SPDX-License-Identifier: Apache-2.0
"""A web server with pictures that may be replaced behind their URLs."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Pictures:
    """Runs on its own thread. `files` maps paths, which begin with a slash, to contents."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        files = self.files

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = files.get(self.path)
                self.send_response(200 if found is not None else 404)
                self.send_header("Content-Type", "image/png")
                self.send_header("Content-Length", str(len(found or b"")))
                self.end_headers()
                self.wfile.write(found or b"")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def put(self, name: str, picture: bytes) -> str:
        """Returns the picture's URL."""
        self.files[f"/{name}"] = picture
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
