# SPDX-License-Identifier: Apache-2.0
"""Look-ups begin when a request arrives, while the scheduler's thread still runs another step.

vLLM receives requests on a separate input thread, whose last call for each is `EngineCore.preprocess_add_request`
(vllm/v1/engine/core.py, 0.30 to 0.33). A request's first pass comes when the step under way is over. Ownership:

1. The scheduler side and all below it (book, fetches, links) belong to the thread that has its *turn*, a lock.
2. The scheduler's thread has the turn for a whole pass, from the first hook called in it to the end of
   `build_connector_meta`; and for each call between two passes (`request_finished`, `set_weight_version`, `snapshot`,
   `measures`).
3. The input thread never waits for the turn: if it is taken, look-ups are left to the request's first pass.
4. The scheduler's thread waits for the turn no longer than one request's early look-up takes: tens of microseconds of
   Python and non-blocking sends, no I/O, no copy.
5. An early look-up only starts fetches. No memo, lease, promise or count of the request exists before its first pass;
   so a request that is refused or aborted before that leaves nothing behind.
6. A fetched entry belongs to the index once it has arrived; it is not pinned and may be evicted at any time.
7. It takes free space only, like every fetch of an entry that may not exist.
8. An item that prefill passed recently may be in vLLM's KV cache, which only a pass knows: it is not looked up early.
9. An error in it is raised in the next pass, on the scheduler's thread, and the cache is given up.
10. `shutdown` takes the turn and keeps it.
"""

from __future__ import annotations

import functools
from typing import Any


def follow() -> None:
    """Notify the scheduler side of every engine in this process of requests as they arrive. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    from .connector import ECLMCacheConnector

    preprocess = EngineCore.preprocess_add_request
    if hasattr(preprocess, "_lmcache_ec"):
        return

    @functools.wraps(preprocess)
    def preprocess_and_expect(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = preprocess(self, *args, **kwargs)
        connector = getattr(getattr(self, "scheduler", None), "ec_connector", None)
        if isinstance(connector, ECLMCacheConnector):
            connector.expect(taken[0])
        return taken

    preprocess_and_expect._lmcache_ec = True  # type: ignore[attr-defined]
    EngineCore.preprocess_add_request = preprocess_and_expect
