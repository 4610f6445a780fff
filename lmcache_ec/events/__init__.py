# SPDX-License-Identifier: Apache-2.0
"""What LocalCPU holds, as events for a router: who owns what, and what happens when something is lost.

1. The book, on the scheduler's thread, is authoritative. It records admissions and evictions in `changes.py`, a
   dictionary with the latest state of each identifier, and nothing more: no number, no socket, no wait.
2. Once per pass, recorded changes go to the store process through the existing link. What does not fit into the link
   stays recorded. Too many changes, another store process, or a changed namespace set *anew*: all that was sent is
   void, and everything live is sent from the start.
3. In the store process a separate thread (`publisher.py`) keeps a copy (`source.py`), numbers each change and sends
   it. It never waits for a subscriber: what one does not take in time is dropped for that one. Snapshots are made from
   the copy, so no subscriber makes requests to the engine.
4. A subscriber (`mirror.py`) accepts batch n + 1 after batch n of one session, and nothing else. Anything else is a
   gap, and a snapshot closes it. A batch without events is sent every second, so the loss of the last batch is noticed
   within a second, and a replica that sends nothing is known to be silent.
5. So a lost event costs a snapshot; a lost snapshot is requested again; a lost store process or publisher means a new
   session, which is a gap; a lost engine is reported by its store process, which outlives it; a lost host is silent.
   Clients of the engines notice none of these.
6. The most that can be held: in the engine twice what is live; in the store process one copy and, for each subscriber
   that does not read, a thousand batches; in a subscriber what its limit allows for each replica.

`batch.py` is the wire format, similar to vLLM's KV events; `endpoints.py` has the addresses; `warm_index.py` follows
many replicas and answers which one holds what.
"""
