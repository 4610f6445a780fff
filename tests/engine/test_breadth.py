# SPDX-License-Identifier: Apache-2.0
"""Every model and modality: encoded once, and loaded by a new process with equal outputs."""

from pathlib import Path

import pytest

from benchmarks.testbed.engine_env import Layout
from benchmarks.testbed.engine_runner import Call, EngineProcess
from benchmarks.testbed.media import WORDINGS, Prompt
from tests.engine.rig import Reference, Rig

CASES = [
    ("qwen2vl", "float32"),
    ("qwen25vl", "float32"),
    ("qwen3vl", "bfloat16"),
    ("gemma3", "bfloat16"),
    ("llava", "float32"),
    ("paligemma", "float32"),
    ("idefics3", "float32"),
    ("qwen2audio", "bfloat16"),
]


def prompts(model: str) -> tuple[tuple[Prompt, ...], int]:
    """Prompts with one item, two items, and one item of each kind; and the number of distinct items."""
    wording = WORDINGS[model]
    if wording.audio is not None:
        return (Prompt(audios=(1,)), Prompt(audios=(2, 1))), 2
    if wording.video is not None:
        return (Prompt(images=(1,)), Prompt(videos=(2,)), Prompt(images=(3, 1), videos=(4,), size=(84, 112))), 5
    if model == "paligemma":  # one image per prompt
        return (Prompt(images=(1,)), Prompt(images=(2,))), 2
    return (Prompt(images=(1,)), Prompt(images=(2, 3), size=(84, 112))), 3


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), CASES, ids=["-".join(case) for case in CASES])
def test_an_item_is_encoded_once_and_loaded_by_a_new_process(
    model: str, dtype: str, tmp_path: Path, reference: Reference
) -> None:
    """Asked one by one, so that bf16 arithmetic does not depend on when an entry arrives."""
    asked, items = prompts(model)
    with Rig(model, Layout.ONE_PROCESS, tmp_path, reference, dtype=dtype) as rig:
        assert rig.ask(*asked, one_by_one=True) == items
        rig.settle()
        assert len(rig.files()) == items
        assert rig.left_over() == {}
        rig.restart()
        assert rig.ask(*asked, one_by_one=True) == 0
        assert rig.left_over() == {}
    reference.forget(model, dtype)


@pytest.mark.slow
def test_embeddings_sent_by_the_client_pass_through_and_are_never_saved(tmp_path: Path, reference: Reference) -> None:
    """vLLM treats them as encoder outputs, without running an encoder."""
    chats = [Call("tests.engine.drive:chat_with_embeddings", {"seed": seed}) for seed in (1, 2, 1)]
    with EngineProcess(
        "llava", Layout.ONE_PROCESS, folder=tmp_path / "plain", dtype="float32", enable_prompt_embeds=True
    ) as plain:
        right = [plain.do(chat).value for chat in chats]
    with Rig("llava", Layout.ONE_PROCESS, tmp_path, reference, enable_prompt_embeds=True) as rig:
        reports = [rig.engine.do(chat) for chat in chats]
        assert [report.value["tokens"] for report in reports] == [output["tokens"] for output in right]
        assert len(set().union(*(report.encodes for report in reports))) == 4, "two pictures, two embeddings"
        rig.settle()
        assert len(rig.files()) == 2, "the pictures alone"
        assert rig.left_over() == {}
        rig.restart()
        reports = [rig.engine.do(chat) for chat in chats]
        assert [report.value["tokens"] for report in reports] == [output["tokens"] for output in right]
        assert len(set().union(*(report.encodes for report in reports))) == 2, "the embeddings alone"
        assert rig.counts()["loads_disk"] == 2
        assert rig.left_over() == {}


@pytest.mark.slow
def test_the_cache_works_beside_speculative_decoding(tmp_path: Path, reference: Reference) -> None:
    """Drafts come from n-grams, the only method that runs on a CPU. Drafting needs items one pass earlier."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    asked = (Prompt(images=(1,), text="la la la la la la"), Prompt(videos=(2,)), Prompt(images=(1, 3)))
    with Rig("qwen3vl", Layout.ONE_PROCESS, tmp_path, reference, speculative_config=speculative) as rig:
        assert rig.ask(*asked, max_tokens=24) == 3
        rig.settle()
        assert rig.left_over() == {}
        rig.restart()
        assert rig.ask(*asked, max_tokens=24) == 0
        assert rig.left_over() == {}
