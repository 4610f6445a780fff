# SPDX-License-Identifier: Apache-2.0
"""A soak: a real OpenAI server over all tiers, too small for all pictures, under faults, and every answer judged.

`judge.py` decides what is right and does no I/O. `population.py` draws what clients ask, `faults.py` breaks things from
outside, `events.py` uses the engine's own interface, `leftovers.py` finds what must not remain at the end. `server.py`
and `stores.py` start the real parts; all imports from the testbed are in `parts.py`. `engines.py` runs all of this
against a server, `core.py` against the store process and the tiers, without an engine.
"""
