# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: worker-seam checks that only a GPU can provide. Needs torch with CUDA and this clone, no vLLM."""

from pathlib import Path

import lmcache_ec

# An installation puts the adapters into lmcache_ec as a subpackage; in a bare clone they are next to it.
if (_root := str(Path(__file__).parents[2])) not in lmcache_ec.__path__:
    lmcache_ec.__path__.append(_root)
