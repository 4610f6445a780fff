# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check`: what only a GPU can prove of the worker seam. Needs torch with CUDA and this clone, no vLLM."""

from pathlib import Path

import lmcache_ec

# The adapters are a package of lmcache_ec's by installation; in a bare clone they lie beside it.
if (_root := str(Path(__file__).parents[2])) not in lmcache_ec.__path__:
    lmcache_ec.__path__.append(_root)
