# SPDX-License-Identifier: Apache-2.0
"""What the adapter uses of vLLM is there, in the version that is installed and in the sources of the newest one that is
supported, which has no CPU build. Nothing of vLLM's is imported or run: this is no proof that an engine serves."""

from __future__ import annotations

import ast
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.testbed.models import ROOT
from benchmarks.testbed.vllm_sources import NotFetched, source_archive
from lmcache_ec.adapters.vllm.front_end import differs_in

NEWEST = "0.33.0"
ADAPTER = sorted((ROOT / "adapters" / "vllm").glob("*.py"))
BASE = "vllm.distributed.ec_transfer.ec_connector.base"
OPTIONAL = {
    ("vllm.distributed.ec_transfer.ec_connector.utils", "PlaceholderMetadataResolver"),  # see `versions.item_metadata`
    ("vllm.distributed.ec_transfer.ec_connector.utils", "collect_ec_item_metadata"),
}
INHERITED = {
    *("role", "is_producer", "is_consumer", "clear_connector_metadata", "_get_connector_metadata", "register_caches"),
    *("build_connector_worker_meta", "update_state_after_free", "update_connector_output", "has_pending_push_work"),
}
"""Methods of vLLM's base class that are left as they are."""
OF_OURS = {
    *("expect", "watch_weights", "weights_may_change", "follows_weight_versions", "set_weight_version", "snapshot"),
    *("_only_encodable", "_guarded", "_give_up"),
}
WRAPPED = {
    ("vllm.v1.engine.core", "EngineCore"): {
        "preprocess_add_request": ["self", "request"],
        "set_weight_version": ["self", "weight_version"],
    },
    ("vllm.v1.executor.abstract", "Executor"): {
        "collective_rpc": ["self", "method", "timeout", "args", "kwargs", "non_block"]
    },
}


@pytest.fixture(
    scope="module", params=["installed", pytest.param(NEWEST, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "installed":
        spec = find_spec("vllm")
        assert spec is not None
        assert spec.submodule_search_locations
        return Path(spec.submodule_search_locations[0])
    try:
        archive = source_archive(NEWEST)
    except NotFetched as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(archive) as members:
        members.extractall(
            folder,
            [each for each in members if each.name.startswith(f"vllm-{NEWEST}/vllm/") and each.name.endswith(".py")],
            filter="data",
        )
    return folder / f"vllm-{NEWEST}" / "vllm"


def body_of(sources: Path, module: str) -> list[ast.stmt]:
    path = sources.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_bytes()).body


def methods(sources: Path, module: str, owner: str) -> dict[str, list[str]]:
    [found] = [node for node in body_of(sources, module) if isinstance(node, ast.ClassDef) and node.name == owner]
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


def test_every_name_that_the_adapter_imports_is_there(sources: Path) -> None:
    wanted = set(imported()) - OPTIONAL
    assert len(wanted) > 20
    missing = []
    for module, name in wanted:
        beside = sources.joinpath(*module.split(".")[1:], name)
        if beside.is_dir() or beside.with_suffix(".py").exists():
            continue
        try:
            text = "\n".join(map(ast.unparse, body_of(sources, module)))
        except OSError:
            text = ""
        if name not in {word for node in ast.walk(ast.parse(text)) for word in names(node)}:
            missing.append(f"{module}.{name}")
    assert not missing


def names(node: ast.AST) -> Iterator[str]:
    """What a statement makes known, or looks up by its name (as `__getattr__` of vllm.envs does)."""
    match node:
        case ast.ClassDef() | ast.FunctionDef():
            yield node.name
        case ast.alias():
            yield node.asname or node.name
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Constant(value=str()):
            yield str(node.value)


def test_every_hook_is_ours_or_known_and_takes_what_vllm_passes(sources: Path) -> None:
    """A hook that a new version brings is looked at before the version is called supported."""
    theirs = methods(sources, BASE, "ECConnectorBase")
    ours = methods(ROOT, "lmcache_ec.adapters.vllm.connector", "ECLMCacheConnector")
    assert theirs.keys() <= ours.keys() | INHERITED
    assert ours.keys() - OF_OURS <= theirs.keys()
    for name in ours.keys() - OF_OURS:
        assert ours[name] == theirs[name], name


def test_what_is_wrapped_takes_what_it_took(sources: Path) -> None:
    for (module, owner), wanted in WRAPPED.items():
        found = methods(sources, module, owner)
        assert {name: found.get(name) for name in wanted} == wanted
    assert "create_engine_config" in methods(sources, "vllm.engine.arg_utils", "EngineArgs")


def test_the_front_end_is_one_that_is_supported(sources: Path) -> None:
    assert differs_in(sources) == ""
