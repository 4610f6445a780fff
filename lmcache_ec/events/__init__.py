# SPDX-License-Identifier: Apache-2.0
"""What LocalCPU holds, as events for a router: who owns what, and what happens when something is lost.

1. The book, on the scheduler's thread, is the truth. What it admits and evicts it notes in `changes.py`, a dictionary
   with the last word on each identifier, and nothing more: no number, no socket, no wait.
2. Once a pass what has been noted goes to the store process through the link that is there anyway. What finds the link
   full stays noted. Too much of it, another store process, or a changed namespace ends in *anew*: all that was sent is
   void, and what is live is sent from the start.
3. In the store process a thread of its own (`publisher.py`) keeps a copy (`source.py`), numbers each change and sends
   it. It never waits for a subscriber: what one does not take in time is dropped for that one. Snapshots are made from
   the copy, so no subscriber can ask the engine anything.
4. A subscriber (`mirror.py`) accepts batch n + 1 after batch n of one session, and nothing else. Anything else is a
   gap, and a snapshot closes it. A batch without events goes out every second, so the last batch is missed for a second
   at most, and a replica that says nothing is known to be silent.
5. So a lost event costs a snapshot; a lost snapshot is asked for again; a lost store process or publisher is a new
   session, which is a gap; a lost engine is reported by its store process, which outlives it; a lost host is silence.
   None of these is noticed by whoever is served.
6. What can be held at most: in the engine twice what is live; in the store process one copy and, for each subscriber
   that does not read, a thousand batches; in a subscriber what its limit allows for each replica.

`batch.py` is what goes over the wire, in the manner of vLLM's KV events; `endpoints.py` where; `warm_index.py` follows
many replicas and answers who holds what.
"""
