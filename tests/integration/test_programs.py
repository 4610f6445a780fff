# SPDX-License-Identifier: Apache-2.0
"""`lmcache_ec.Cache`: the tiers for a program, with and without engines on the same stores."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import lmcache_ec
from benchmarks.testbed.core import NAMESPACE, WIDTH, Bench, length, names, payload, stored
from benchmarks.testbed.models import ROOT
from benchmarks.testbed.servers.redis import redis_server
from benchmarks.testbed.servers.seaweed import Seaweed
from benchmarks.testbed.waiting import wait_until
from lmcache_ec import Cache, ConfigError, Tensor
from lmcache_ec.dtypes import DTYPES
from lmcache_ec.standalone import cache as module
from tests.examples import examples

PICTURE = numpy.arange(6 * 8, dtype=numpy.float32).reshape(6, 8)
_NUMPY = [dtype.torch for dtype in DTYPES.values() if dtype.torch not in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]

_SHAPES = arrays.array_shapes(min_dims=0, min_side=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path) -> Iterator[Cache]:
    with Cache(namespace="programs", local_disk=str(folder)) as opened:
        yield opened


def opened(folder: Path, namespace: str = "programs", **keys: Any) -> Cache:
    return Cache(namespace=namespace, local_disk=str(folder), **keys)


def got(cache: Cache, identifier: str) -> Tensor:
    tensor = cache.get(identifier)
    assert tensor is not None
    return tensor


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.safetensors")}


# ---- what is put can be read


@settings(deadline=None, max_examples=examples(150))
@given(
    array=st.sampled_from(_NUMPY).flatmap(lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0)))
)
def test_an_array_of_any_shape_and_type_is_the_same_to_the_bit(array: numpy.ndarray[Any, Any]) -> None:
    tensor = Tensor.of(array)
    assert Tensor.read(tensor.spec, tensor.data) == tensor
    assert tensor.numpy().tobytes() == array.tobytes()
    assert (tensor.numpy().shape, tensor.numpy().dtype) == (array.shape, array.dtype)
    assert numpy.asarray(tensor).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [dtype.torch for dtype in DTYPES.values()])
def test_a_torch_tensor_comes_back_as_one(cache: Cache, dtype: str) -> None:
    tensor = torch.arange(-12, 12).reshape(2, 3, 4).to(getattr(torch, dtype))
    for name, value in {"whole": tensor, "view": tensor.mT, "scalar": tensor[0, 0, 0], "empty": tensor[:0]}.items():
        assert cache.put(name, value.requires_grad_(dtype == "float32")).result() == ("disk",)
        back = got(cache, name).torch()
        assert (back.shape, back.dtype) == (value.shape, value.dtype)
        assert (
            bytes(got(cache, name).data) == value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )


def test_buffers_and_arrays_in_any_order_of_memory_are_taken(cache: Cache) -> None:
    swapped = PICTURE.astype(">f4")
    for name, value in {"bytes": b"some bytes", "swapped": swapped, "columns": numpy.asfortranarray(PICTURE)}.items():
        assert cache.put(name, value).result() == ("disk",)
    assert bytes(got(cache, "bytes").data) == b"some bytes"
    assert (got(cache, "swapped").numpy() == PICTURE).all()
    assert (got(cache, "columns").numpy() == PICTURE).all()
    room = numpy.zeros_like(PICTURE)
    assert cache.get_into("columns", room)
    assert (room == PICTURE).all()
    with pytest.raises(ValueError, match="a buffer of 4 bytes for a tensor of 192"):
        cache.get_into("columns", bytearray(4))
    with pytest.raises(TypeError, match="target of type bytes: must be a buffer that can be written"):
        cache.get_into("columns", bytes(192))


def test_the_caller_may_change_its_tensor_as_soon_as_put_returns(cache: Cache) -> None:
    array = numpy.zeros((1024, 1024), numpy.uint8)
    puts = []
    for number in range(8):
        array[:] = number
        puts.append(cache.put(f"{number}", array))
    array[:] = 255
    assert [put.result() for put in puts] == [("disk",)] * 8
    assert all((got(cache, f"{number}").numpy() == number).all() for number in range(8))


def test_an_entry_is_found_as_soon_as_it_was_put(cache: Cache) -> None:
    for number in range(50):
        cache.put(f"{number}", PICTURE + number)
        assert (got(cache, f"{number}").numpy() == PICTURE + number).all()


def test_an_entry_is_written_once_until_it_is_deleted(cache: Cache) -> None:
    assert cache.put("cat", PICTURE).result() == ("disk",)
    assert cache.put("cat", PICTURE).result() == ("disk",)
    assert cache.put("cat", PICTURE + 1).result() == ("disk",)  # as in docs/python.md: contents are not compared
    assert cache.put("cat", PICTURE[:3]).result() == ()
    assert (got(cache, "cat").numpy() == PICTURE).all()
    assert "cat" in cache
    assert cache.delete("cat")
    assert not cache.delete("cat")
    assert "cat" not in cache
    assert cache.get("cat") is None
    assert cache.put("cat", PICTURE[:3]).result() == ("disk",)
    assert (got(cache, "cat").numpy() == PICTURE[:3]).all()


def test_a_put_beyond_the_limit_waits_and_nothing_is_dropped(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNDER_WAY_BYTES", 100_000)
    puts = [cache.put(f"{number}", PICTURE + number) for number in range(200)]
    assert cache.flush()
    assert all(put.done() and put.result() == ("disk",) for put in puts)
    tensors = cache.get_each(str(number) for number in range(200))
    assert all((tensor.numpy() == PICTURE + number).all() for number, tensor in enumerate(tensors) if tensor)
    assert None not in tensors


# ---- other processes, engines, tiers


def test_another_process_finds_the_entry_without_importing_torch(folder: Path) -> None:
    with opened(folder) as cache:
        cache.put("cat", PICTURE)
    program = f"""
import sys, lmcache_ec
assert [name for name in sys.modules if name.startswith("lmcache_ec.")] == ["lmcache_ec.version"]
with lmcache_ec.Cache(namespace="programs", local_disk={str(folder)!r}) as cache:
    print(cache.get("cat").numpy().tolist(), "torch" in sys.modules, cache.report()["tiers"][0]["entries"])
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout == f"{PICTURE.tolist()} False 1\n"


def test_an_engine_loads_what_a_program_stores_and_the_other_way_round(folder: Path) -> None:
    ours, theirs = names("ours", 3), names("theirs", 3)
    with Bench(folder) as engine, opened(folder, NAMESPACE) as cache:
        engine.encode(theirs)
        engine.settle()
        for identifier in ours:
            rows = numpy.frombuffer(payload(identifier), numpy.uint16).reshape(-1, WIDTH)
            cache.put(identifier, torch.from_numpy(rows.copy()).view(torch.bfloat16))
        assert cache.flush()
        engine.until("the engine has news of them", lambda: all(engine.serves(identifier) for identifier in ours))
        assert all(bytes(got(cache, identifier).data) == payload(identifier) for identifier in theirs)
        assert stored(folder) == {*ours, *theirs}
        engine.encode(["last"])
        engine.settle()
        [disk] = cast(list[dict[str, int]], cache.report()["tiers"])
        assert disk["bytes"] == engine.status()["tiers"][0]["bytes"] == 7 * length("last")


def test_every_tier_has_the_entry_and_a_host_that_lost_it_gets_it_back_from_the_remote(
    tmp_path: Path, s3: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path / "redis") as redis:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        remotes = [redis.url, f"s3://{s3.bucket}/programs?endpoint={s3.endpoint}"]
        with opened(tmp_path / "one", remotes=remotes) as cache:
            assert cache.put("cat", PICTURE).result() == ("disk", "redis", "s3")
        redis.client().flushall()
        with opened(tmp_path / "two", remotes=remotes) as cache:
            assert (got(cache, "cat").numpy() == PICTURE).all()
            counts = cache.report()["counts"]
            assert counts["s3_hits"] == 1  # type: ignore[index]
            wait_until("it is in the tiers before", lambda: files(tmp_path / "two") and redis.client().dbsize())
            assert files(tmp_path / "two") == files(tmp_path / "one")


def test_a_damaged_entry_is_a_miss_and_the_next_put_replaces_it(cache: Cache, folder: Path) -> None:
    cache.put("cat", PICTURE).result()
    [file] = folder.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert cache.get("cat") is None
    assert cache.put("cat", PICTURE).result() == ("disk",)
    assert (got(cache, "cat").numpy() == PICTURE).all()


def test_an_unreachable_remote_raises_no_exception(tmp_path: Path) -> None:
    with opened(tmp_path, remotes=["redis://127.0.0.1:1/0"]) as cache:
        assert cache.put("cat", PICTURE).result() == ("disk",)
        assert cache.get("dog") is None


def test_a_program_may_give_credentials_as_an_argument_and_no_error_shows_them(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--requirepass", "canary") as server:
        url = f"redis://:canary@127.0.0.1:{server.port}"
        with Cache(namespace="programs", remotes=[url]) as cache:
            assert cache.put("cat", PICTURE).result() == ("redis",)
        with pytest.raises(ConfigError, match="authentication failed") as caught:
            Cache(namespace="programs", remotes=[url.replace("canary", "canary-2")])
        assert "canary" not in str(caught.value)


def test_close_writes_what_was_put(folder: Path) -> None:
    with opened(folder) as cache:
        for number in range(50):
            cache.put(f"{number}", PICTURE)
    assert len(files(folder)) == 50
    for call in (lambda: cache.get("1"), lambda: cache.put("1", PICTURE), cache.flush, cache.report):
        with pytest.raises(ValueError, match="this cache is closed"):
            call()
    cache.close()
    wait_until("its threads have ended", lambda: not _threads("entry-"))


def _threads(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


# ---- errors


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"namespace": "x"}, "no tier: neither local_disk nor remotes is set"),
        ({"local_disk": "/tmp/x"}, "no namespace: give a name"),
        ({"local_disk": "/tmp/x", "namespace": "Not/This"}, "namespace 'Not/This': must be 1 to 80 characters"),
        ({"local_disk": "/proc/x", "namespace": "x"}, "local_disk: /proc/x"),
        ({"locl_disk": "/tmp/x", "namespace": "x"}, "locl_disk"),
        ({"local_disk": "/tmp/x", "namespace": "x", "enabled": False}, "ec.enabled is false"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(
    keys: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Cache(**keys)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1.0, 2.0], "list: must be a NumPy array, a torch tensor or an object with a buffer"),
        (numpy.zeros(3, complex), "ndarray of complex128: the element type must be one of bfloat16, float16"),
        (numpy.array(["text"]), "ndarray of str"),
        (torch.zeros(3, dtype=torch.complex64), "Tensor of complex64"),
        (torch.eye(3).to_sparse(), "a sparse_coo tensor: must be dense, with its elements in memory"),
        (torch.zeros(3, device="meta"), "a meta tensor: must be dense, with its elements in memory"),
    ],
)
def test_a_value_that_is_not_a_tensor_is_refused_and_nothing_is_stored(
    cache: Cache, folder: Path, value: object, problem: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(problem)):
        cache.put("cat", value)
    for identifier in ("x" * 5000, ""):
        with pytest.raises(ValueError, match=f"identifier of {len(identifier)} bytes: must be 1 to 4096"):
            cache.put(identifier, PICTURE)
    with pytest.raises(ValueError, match="must be text that UTF-8 can express"):
        cache.put("\ud800", PICTURE)
    assert cache.flush()
    assert not list(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("timeout", [float("nan"), -1, float("-inf")])
def test_a_flush_refuses_a_number_that_is_not_a_duration(cache: Cache, timeout: float) -> None:
    with pytest.raises(ValueError, match=f"^timeout {timeout}: must be a number of seconds, at least 0, or None$"):
        cache.flush(timeout)


@pytest.mark.parametrize("timeout", ["5", b"5", True, [5]])
def test_a_flush_refuses_a_timeout_that_is_not_a_number(cache: Cache, timeout: Any) -> None:
    with pytest.raises(TypeError, match=f"^timeout of type {type(timeout).__name__}: must be a number of seconds"):
        cache.flush(timeout)


@pytest.mark.parametrize("timeout", [None, 60, numpy.float32(60), float("inf"), 1e30])
def test_a_flush_accepts_any_duration_and_waits_for_the_writes(cache: Cache, timeout: float | None) -> None:
    cache.put("cat", PICTURE)
    assert cache.flush(timeout)
    assert cache.flush(0)


def test_a_type_that_numpy_lacks_is_an_error_that_names_the_remedy(cache: Cache) -> None:
    cache.put("cat", torch.zeros(2, 2, dtype=torch.bfloat16)).result()
    with pytest.raises(TypeError, match="import ml_dtypes first"):
        got(cache, "cat").numpy()


def test_the_public_names_are_those_that_are_listed() -> None:
    assert lmcache_ec.__all__ == ["Cache", "ConfigError", "Tensor", "__version__"]
    assert all(getattr(lmcache_ec, name) for name in lmcache_ec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Cach'"):
        _ = lmcache_ec.Cach


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_programs_in_the_documentation_run(page: str, tmp_path: Path) -> None:
    """Each block in its own folder, with the configuration from the page, if there is one."""
    text = (ROOT / page).read_text()
    programs = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "lmcache_ec" in block]
    assert programs
    (tmp_path / "lmcache.yaml").write_text(f"ec:\n  local_disk: {tmp_path / 'disk'}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    for program in programs:
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
