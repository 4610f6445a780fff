# SPDX-License-Identifier: Apache-2.0
"""Makes torchvision importable when its compiled operators cannot be loaded: a CUDA build with a CPU build of torch.

`make env` copies this file into the environment's site-packages, with a .pth file that imports it at start-up, but only
if `import torchvision` fails with "operator torchvision::nms does not exist". torchvision registers shapes for two
operators by name, whether or not it could load them; image processors call neither. So the two names are declared,
without an implementation, right after torchvision has found that its library does not load. If it does load, nothing
happens.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

LOADS_THE_LIBRARY = "torchvision.extension"


def declare_missing(extension: ModuleType) -> None:
    if extension._has_ops():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    extension._declared_operators = library  # type: ignore[attr-defined]  # they last as long as the library object


class AfterImport(MetaPathFinder):
    """Defers to the real finder, and calls `declare_missing` once the module has executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != LOADS_THE_LIBRARY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_declare(module: ModuleType) -> None:
            run(module)
            declare_missing(module)

        spec.loader.exec_module = run_and_declare  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterImport())
