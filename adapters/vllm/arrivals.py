# SPDX-License-Identifier: Apache-2.0
"""Look-ups begin when a request arrives, while the scheduler's thread still runs another step.

vLLM takes requests in on a thread of its own, which hands each to `EngineCore.preprocess_add_request` last
(vllm/v1/engine/core.py, 0.30 to 0.33). A request's first pass comes when the step under way is over. Who owns what:

1. The scheduler side and all below it (book, fetches, links) belong to whoever has its *turn*, a lock of its own.
2. The scheduler's thread has it for a whole pass, from the first hook that is called in it to the end of
   `build_connector_meta`; and for each call between two passes (`request_finished`, `set_weight_version`, `snapshot`,
   `measures`).
3. The thread that takes requests in never waits for the turn: where it is taken, the request's first pass looks up.
4. The scheduler's thread waits for the turn no longer than one request's early look-up takes: tens of microseconds of
   Python and sends that do not block, no I/O, no copy.
5. An early look-up starts fetches and does nothing else. No memo, lease, promise or count of the request exists before
   its first pass; so a request that is refused or aborted before that leaves nothing behind.
6. What it fetches belongs to the index once it has come, is pinned by nobody, and may be evicted at any time.
7. It takes free space only, as every fetch of what may not exist.
8. An item that prefill has passed lately may be in vLLM's KV cache, which only a pass knows: it is not looked up early.
9. An error in it is raised in the next pass, on the scheduler's thread, which gives the cache up.
10. `shutdown` takes the turn and keeps it.
"""

from __future__ import annotations

import functools
from typing import Any


def follow() -> None:
    """Have the scheduler side of every engine in this process hear of requests as they arrive. Idempotent."""
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
