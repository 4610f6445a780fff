# SPDX-License-Identifier: Apache-2.0
"""The parts of vLLM that the adapter uses exist, in the installed version and in the sources of the newest supported
one, which has no CPU build. No vLLM code is imported or run: this does not prove that an engine serves."""

from __future__ import annotations

import ast
import tarfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.testbed.engine_env import vllm_version
from benchmarks.testbed.models import ROOT
from benchmarks.testbed.vllm_sources import NotFetched, source_archive
from lmcache_ec.adapters.vllm.front_end import differs_in
from lmcache_ec.adapters.vllm.versions import minor

VERSIONS = ("0.30.0", "0.31.0", "0.33.0")
ADAPTER = sorted((ROOT / "adapters" / "vllm").glob("*.py"))
BASE = "vllm.distributed.ec_transfer.ec_connector.base"
METRICS = "vllm.distributed.ec_transfer.ec_connector.metrics"
LATER = {"0.31": {f"{METRICS}.ECConnectorStats", f"{METRICS}.ECConnectorPromMetrics"}}
"""Names that the adapter imports only if they exist, by the version that introduced them: see `versions`."""
LATER_HOOKS = {"0.31": {"get_ec_connector_stats", "build_ec_connector_stats", "build_prom_metrics"}}
INHERITED = {
    *("role", "is_producer", "is_consumer", "clear_connector_metadata", "_get_connector_metadata", "register_caches"),
    *("build_connector_worker_meta", "update_state_after_free", "update_connector_output", "has_pending_push_work"),
}
"""Methods of vLLM's base class that are not overridden."""
OF_OURS = {
    *("expect", "watch_weights", "weights_may_change", "follows_weight_versions", "set_weight_version", "snapshot"),
    *("forget_vllm_cache", "restore_s", "_without_cache", "_guarded", "_give_up"),
}
MANAGER = "vllm.v1.core.encoder_cache_manager"
LEFT = {
    *("get_cached_num_encoder_embeds", "get_cached_input_ids", "free_encoder_input", "free"),
    *("get_freed_mm_hashes", "get_manager_metadata"),
}
"""Methods of vLLM's encoder-cache manager that ours does not override: none uses an entry or evicts one."""
WRAPPED = {
    ("vllm.v1.engine.core", "EngineCore"): {
        "preprocess_add_request": ["self", "request"],
        "reset_encoder_cache": ["self"],
        "set_weight_version": ["self", "weight_version"],
    },
    ("vllm.v1.executor.abstract", "Executor"): {
        "collective_rpc": ["self", "method", "timeout", "args", "kwargs", "non_block"]
    },
}


class Sources(NamedTuple):
    """`folder` is that of the package."""

    version: str
    folder: Path


@pytest.fixture(
    scope="module",
    params=[
        "installed",
        *(pytest.param(version, marks=[pytest.mark.slow, pytest.mark.timeout(600)]) for version in VERSIONS),
    ],
)
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    if request.param == "installed":
        spec = find_spec("vllm")
        assert spec is not None
        assert spec.submodule_search_locations
        return Sources(vllm_version(), Path(spec.submodule_search_locations[0]))
    try:
        archive = source_archive(request.param)
    except NotFetched as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(archive) as members:
        members.extractall(
            folder,
            [
                each
                for each in members
                if each.name.startswith(f"vllm-{request.param}/vllm/") and each.name.endswith(".py")
            ],
            filter="data",
        )
    return Sources(request.param, folder / f"vllm-{request.param}" / "vllm")


def not_yet(later: Mapping[str, set[str]], sources: Sources) -> set[str]:
    """The names that the version with these sources lacks."""
    return {name for since, names in later.items() if minor(since) > minor(sources.version) for name in names}


def body_of(folder: Path, module: str) -> list[ast.stmt]:
    path = folder.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_bytes()).body


def methods(folder: Path, module: str, owner: str) -> dict[str, list[str]]:
    [found] = [node for node in body_of(folder, module) if isinstance(node, ast.ClassDef) and node.name == owner]
    return {
        node.name: [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        for node in found.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def imported() -> Iterator[tuple[str, str]]:
    for file in ADAPTER:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
                yield from ((node.module or "", each.name) for each in node.names)


def test_every_name_that_the_adapter_imports_exists(sources: Sources) -> None:
    wanted = set(imported())
    assert len(wanted) > 20
    missing = set()
    for module, name in wanted:
        beside = sources.folder.joinpath(*module.split(".")[1:], name)
        if beside.is_dir() or beside.with_suffix(".py").exists():
            continue
        try:
            text = "\n".join(map(ast.unparse, body_of(sources.folder, module)))
        except OSError:
            text = ""
        if name not in {word for node in ast.walk(ast.parse(text)) for word in names(node)}:
            missing.add(f"{module}.{name}")
    assert missing == not_yet(LATER, sources)


def names(node: ast.AST) -> Iterator[str]:
    """Names that a statement defines, or looks up as strings (like `__getattr__` of vllm.envs)."""
    match node:
        case ast.ClassDef() | ast.FunctionDef():
            yield node.name
        case ast.alias():
            yield node.asname or node.name
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Constant(value=str()):
            yield str(node.value)


def test_every_hook_is_ours_or_known_and_takes_what_vllm_passes(sources: Sources) -> None:
    """A hook that a new version introduces has to be reviewed before the version counts as supported."""
    theirs = methods(sources.folder, BASE, "ECConnectorBase")
    ours = methods(ROOT, "lmcache_ec.adapters.vllm.connector", "ECLMCacheConnector")
    assert theirs.keys() <= ours.keys() | INHERITED
    hooks = ours.keys() - OF_OURS
    assert hooks - theirs.keys() == not_yet(LATER_HOOKS, sources)
    for name in hooks & theirs.keys():
        assert ours[name] == theirs[name], name


def test_wrapped_functions_take_the_same_arguments_as_before(sources: Sources) -> None:
    for (module, owner), wanted in WRAPPED.items():
        found = methods(sources.folder, module, owner)
        assert {name: found.get(name) for name in wanted} == wanted
    assert "create_engine_config" in methods(sources.folder, "vllm.engine.arg_utils", "EngineArgs")


def test_our_encoder_cache_manager_takes_the_same_arguments_as_vllms(sources: Sources) -> None:
    """A method that a new version introduces has to be reviewed: it may use an entry or evict one."""
    theirs = methods(sources.folder, MANAGER, "EncoderCacheManager")
    ours = methods(ROOT, "lmcache_ec.adapters.vllm.encoder_cache_manager", "TierAwareEncoderCacheManager")
    public = {name for name in ours if not name.startswith("_")}
    assert {name: ours[name] for name in public} == {name: theirs.get(name) for name in public}
    assert {name for name in theirs if not name.startswith("_")} - public <= LEFT


def test_the_front_end_is_one_that_is_supported(sources: Sources) -> None:
    assert differs_in(sources.folder) == ""
