# SPDX-License-Identifier: Apache-2.0
"""An extension of the servers' workers: they take other weights in place, as for a trainer."""

from __future__ import annotations

from typing import Any


class InPlace:
    """vLLM mixes this into its worker class (`--worker-extension-cls`). Runs on the worker's main thread."""

    vllm_config: Any
    get_model: Any

    def soak_load(self, checkpoint: str) -> None:
        """Overwrite the model's weights with those of the checkpoint in this folder; since vLLM 0.32. Resets no cache.

        (Plain `load_weights` is refused on a CPU, where the weights of linear layers have been packed.)
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import inplace

        with set_current_vllm_config(self.vllm_config):
            inplace.reload_weights(self.vllm_config, self.get_model(), None, checkpoint, True)
