# SPDX-License-Identifier: Apache-2.0
"""The soak with engines: one server after another over the same stores, with clients, events and faults throughout.

The next server starts while the previous one serves, on the same folder and the same remotes, as in a rolling update.
Once it is up, the clients switch to it and the old one dies, in one way or another. Set-up, the servers' lives and the
final checks together take the given time, or longer on a slow machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.soak import client, events, leftovers, truth
from benchmarks.soak.breaker import Breaker
from benchmarks.soak.faults import Targets
from benchmarks.soak.judge import Answer, Ask, Judge, Judgement, Life, Ticket, Verdict
from benchmarks.soak.leftovers import Footprint, Traces
from benchmarks.soak.parts import descendants, model_path
from benchmarks.soak.population import Population
from benchmarks.soak.reference import ARGUMENTS
from benchmarks.soak.server import FLAVOURS, Flavour, Server, ServerFailed
from benchmarks.soak.stores import Room, Stores, stores
from benchmarks.soak.tally import Tally
from benchmarks.soak.truth import Truth
from lmcache_ec.cli.status import engines

MODEL = "qwen2vl"
_CHECKPOINTS = 3
_CLIENTS = 8
_THINKS_S = 0.1
"""Average time between an answer and the client's next request."""

_FAULT_EVERY_S = 0.6
_EVENT_EVERY_S = 4.0
_STARTING_S = 45.0
"""How long a server takes to start while another one serves, on two cores."""

_SERVES_S = 40.0
"""Time a server serves before the next one is started."""

_TRIES = 3

_TAIL_S = 12.0
"""Part of the given time for the final checks."""

_PATIENCE_S = 45.0
"""Limit until nothing is held any more and the folder's account is right: the disk is surveyed every 30 s."""


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    seconds: float
    honest: bool
    steady: bool
    servers: Sequence[str]
    """Names of `FLAVOURS` for the first servers, in order; after that, or if empty, all of them in turn."""

    folder: Path


async def soak(options: Options, tally: Tally) -> dict[str, int]:
    """Run the soak. Returns the faults by kind; the rest is in `tally`."""
    chance = Random(f"{options.seed} plan")
    pictures = 90 if options.seconds < 300 else 240
    folder = options.folder
    checkpoints = [folder / "checkpoints" / str(number) for number in range(_CHECKPOINTS)]
    model = folder / "model"
    shutil.copytree(model_path(MODEL), model)
    shutil.copytree(model_path(MODEL), checkpoints[0])
    plan = truth.plan(pictures, checkpoints, chance)
    room = Room.below(truth.bytes_of(plan), ttl_s=15 if options.seconds < 300 else 60)
    with stores(folder, room) as running:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            run = _Soak(options, tally, running, model, checkpoints, session)
            try:
                await run.all(asyncio.to_thread(truth.find, checkpoints[0], plan, folder / "reference"))
            except* ServerFailed as group:
                tally.has_failed("server", str(group.exceptions[0]))
            finally:
                run.close()
            tally.recoveries_s = run.breaker.recoveries_s
            return dict(run.breaker.counts)


class _Soak:
    """Runs on the event loop's thread. Implements `events.Stage`."""

    def __init__(
        self,
        options: Options,
        tally: Tally,
        running: Stores,
        model: Path,
        checkpoints: Sequence[Path],
        session: aiohttp.ClientSession,
    ) -> None:
        self.checkpoints = checkpoints
        self._options = options
        self._tally = tally
        self._stores = running
        self._model = model
        self._session = session
        self._ends_at = time.monotonic() + options.seconds
        self._chance = Random(f"{options.seed} lives")
        self._flavours = self._all_flavours()
        self._servers: list[Server] = []
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._under_way = 0
        self._one_at_a_time = asyncio.Lock()
        self._deaths: list[asyncio.Task[None]] = []
        self._calm = False
        self._clients_are_over = False
        self.breaker = Breaker(
            Targets(running.disk, running.redis, running.s3, self._store_processes),
            Random(f"{options.seed} faults"),
            lambda fault: fault.weight,
            self._serves,
        )

    def _serves(self, what: str) -> bool:
        """Whether the store process answers and uses every tier of this name. Called on the breaker's threads."""
        ours = self._store_processes()
        found = [engine for engine in engines() if engine["pid"] in ours]
        tiers = [tier for engine in found for tier in engine["tiers"] if tier["name"] == what]
        return bool(found) and not any(tier["rests"] or tier["read_only"] for tier in tiers)

    # ---- the stage

    @property
    def life(self) -> Life:
        return self._life

    async def post(self, path: str, body: object = None) -> Any:
        return await self._server.post(self._session, path, body)

    @contextlib.asynccontextmanager
    async def closed(self, *, drained: bool) -> AsyncIterator[None]:
        self._open.clear()
        try:
            if drained:
                await self._idle.wait()
            yield
        finally:
            self._open.set()

    # ---- the whole

    async def all(self, finding: Awaitable[Truth]) -> None:
        first = self._start(0)
        found = asyncio.ensure_future(finding)
        await first.ready(self._session)
        self._tally.report("the first server is up")
        self._truth = await found
        self._tally.report(
            f"{len(self._truth.right)} right answers; {len(self._truth.pictures)} pictures can be told apart"
        )
        self.judge = Judge(self._truth.right, self._truth.rows)
        self._population = Population(self._truth, Random(f"{self._options.seed} asks"), honest=self._options.honest)
        self._server, self._life = first, self._begin(first, 0)
        self._open.set()
        self._idle.set()
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._client(number)) for number in range(_CLIENTS)]
            beside = [group.create_task(each) for each in (self._faults(), self._events(), self._looks())]
            await self._lives()
            self._calm = True
            await asyncio.wait(beside)
            await asyncio.to_thread(self.breaker.calm)
            self._tally.report("no more faults")
            await asyncio.sleep(2)
            self._clients_are_over = True
            await asyncio.wait(clients)
        await asyncio.gather(*self._deaths)
        await self._rest()

    def close(self) -> None:
        """End everything that still runs, whatever happened."""
        self.breaker.close()
        for server in self._servers:
            server.kill(store_process=True)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the engine that computes the right answers

    # ---- servers

    def _all_flavours(self) -> list[Flavour]:
        first, second, *others = FLAVOURS
        self._chance.shuffle(others)
        asked_for = [flavour for name in self._options.servers for flavour in FLAVOURS if flavour.name == name]
        return [*asked_for, first, second, *others]

    def _start(self, weights: int) -> Server:
        """Start a server, on a checkpoint that may have been overwritten since the last start."""
        for file in self.checkpoints[weights].glob("*.safetensors"):
            fresh = self._model / "fresh"
            shutil.copyfile(file, fresh)
            fresh.replace(self._model / file.name)
        number = len(self._servers)
        server = Server(
            number,
            self._flavours[number % len(self._flavours)],
            self._model,
            self._stores.keys(),
            self._stores.s3.environment,
            self._options.folder / f"server-{number}",
        )
        self._servers.append(server)
        return server

    def _begin(self, server: Server, weights: int) -> Life:
        now, serves_s = time.monotonic(), min(_STARTING_S + _SERVES_S, self._ends_at - time.monotonic())
        self._weights_rest_until = now + (0.0 if server.number % 3 == 2 else serves_s * self._chance.uniform(0.3, 0.6))
        self._population.begin(fixed=server.flavour.prefix_caching)
        self._tally.report(f"server {server.number} ({server.flavour.name}, weights {weights}) serves")
        return self.judge.begin(weights, server.flavour.vouched)

    async def _lives(self) -> None:
        while (left := self._ends_at - time.monotonic()) > _STARTING_S + _TAIL_S or len(self._servers) == 1:
            await asyncio.sleep(max(0.0, min(_SERVES_S, left - _STARTING_S - _TAIL_S - 5)))
            weights = 0 if self._options.steady else self._chance.choice([0, 0, *range(_CHECKPOINTS)])
            last = self._ends_at - time.monotonic() < 2 * (_STARTING_S + _TAIL_S)
            following = self._start(weights)
            if last:
                self._spare_the_disk_once_up(following)
            await following.ready(self._session)
            async with self._one_at_a_time:
                ended, life = self._server, self._life
                self._server, self._life = following, self._begin(following, weights)
                self._deaths.append(asyncio.create_task(self._death(ended, life)))
        self._baseline = asyncio.create_task(self._take_footprints())
        await asyncio.sleep(max(5.0, self._ends_at - _TAIL_S - time.monotonic()))

    def _spare_the_disk_once_up(self, server: Server) -> None:
        """Once its cache has started, no fault hits the disk: the survey at that start may be the folder's last one."""

        async def wait() -> None:
            while not (core := await asyncio.to_thread(server.core)) or not leftovers.arenas(core):
                await asyncio.sleep(0.2)
            self.breaker.without.add("disk")

        self._deaths.append(asyncio.create_task(wait()))

    async def _death(self, server: Server, life: Life) -> None:
        """End it in one of these ways; nothing of it may remain once its store process has finished its writes."""
        traces = await asyncio.to_thread(server.traces)
        await asyncio.to_thread(server.look)
        ways: dict[str, Callable[[], None]] = {
            "SIGKILL of everything": lambda: server.kill(store_process=True),
            "SIGKILL of everything but the store process": lambda: server.kill(store_process=False),
            "SIGKILL of EngineCore": lambda: server.signal(server.core(), signal.SIGKILL, 20),
            "SIGKILL of the worker": lambda: server.signal(server.worker(), signal.SIGKILL, 20),
            "SIGTERM": lambda: server.signal(server.process.pid, signal.SIGTERM, 30),
        }
        way = self._chance.choices(list(ways), [4, 3, 1, 1, 1])[0]
        self._tally.report(f"server {server.number}: {way}")
        self.judge.killed(life)
        await asyncio.to_thread(ways[way])
        self._tally.restarts[way] += 1
        self._count(server)
        await self._nothing_left(server, traces)

    async def _nothing_left(self, server: Server, traces: Traces) -> None:
        left = await asyncio.to_thread(traces.wait, _PATIENCE_S)
        self._tally.is_left(left, f"server {server.number}")
        for pid in (int(each.split()[1]) for each in left if each.startswith("process ")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _count(self, server: Server) -> None:
        if server.asked_again > (explained := server.lost_pictures()):
            text = f"{server.asked_again} answers 500, vLLM lost {explained} pictures: server {server.number}"
            self._tally.has_failed("500", text)
        self._tally.verdicts["asked again"] += server.asked_again
        self._tally.encodes += server.encoded()
        for name, number in server.status.get("book", {}).items():
            if name.startswith("loads_") and name != "loads_failed":
                self._tally.loads[name.removeprefix("loads_")] += number

    def _store_processes(self) -> list[int]:
        return self._server.store_processes()

    # ---- clients

    async def _client(self, number: int) -> None:
        chance = Random(f"{self._options.seed} client {number}")
        while not self._clients_are_over:
            await asyncio.sleep(chance.expovariate(1 / _THINKS_S))
            await self._open.wait()
            await self._one_request(self._population.draw(), chance)

    async def _one_request(self, ask: Ask, chance: Random) -> None:
        server, ticket = self._server, self.judge.asked(self._life, ask)
        self._tally.requests[ask.kind] += 1
        self._under_way += 1
        self._idle.clear()
        leaves_after_s = chance.uniform(0.001, 0.05) if chance.random() < 0.02 else None
        try:
            async with asyncio.timeout(leaves_after_s):
                reply = await self._sent(server, ticket)
        except TimeoutError:
            self.judge.forgotten(ticket)
            self._tally.verdicts["client left"] += 1
            return
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
        self._judge(server, ticket, reply)
        if server is self._server and server.process.poll() is not None:
            raise ServerFailed(f"server {server.number} ended by itself:\n{server.log_end()}")

    async def _sent(self, server: Server, ticket: Ticket) -> client.Reply:
        """vLLM answers 500 if its front end assumed that a picture had reached the engine, but an abort or a
        disconnected client prevented that; then the request is sent again. vLLM's log shows how often this happened.
        """
        for _ in range(_TRIES):
            reply = await client.send(self._session, server.url, str(self._model), ticket.ask, self._truth)
            again = isinstance(reply, client.Refused) and reply.status == 500 and not ticket.life.killed
            if not again or self.judge.may_be_refused(ticket):
                break
            server.asked_again += 1
        return reply

    def _judge(self, server: Server, ticket: Ticket, reply: client.Reply) -> None:
        judgement = self._judgement(ticket, reply)
        self._tally.verdicts[judgement.verdict] += 1
        ask = ticket.ask
        if judgement.verdict in (Verdict.WRONG, Verdict.FAILED):
            text = (
                f"{_described(ask)} (weights {sorted(ticket.weights)}, server {server.number}, {server.flavour.name})"
            )
            if judgement.verdict is Verdict.WRONG:
                self._tally.is_wrong(f"{ask.kind}: {judgement.how}", f"{text}: answered {judgement.why}")
            else:
                self._tally.has_failed(ask.kind, f"{text}: {judgement.why}")

    def _judgement(self, ticket: Ticket, reply: client.Reply) -> Judgement:
        match reply:
            case Answer():
                return self.judge.answered(ticket, reply)
            case client.Refused(text=text):
                return self.judge.refused(ticket, text)
            case client.Lost(text):
                return self.judge.lost(ticket, text)
            case client.Aborted():
                return self.judge.aborted(ticket)

    # ---- faults and events meanwhile

    async def _faults(self) -> None:
        while not self._calm:
            await asyncio.to_thread(self.breaker.step)
            await asyncio.sleep(_FAULT_EVERY_S)

    async def _events(self) -> None:
        """In most lives the weights change late: once they have changed, the tiers are unused or start out empty."""
        chance = Random(f"{self._options.seed} events")
        kinds = [kind for kind in events.EVENTS if not (self._options.steady and kind.changes_weights)]
        while not self._calm:
            await asyncio.sleep(min(10.0, chance.expovariate(1 / _EVENT_EVERY_S)))
            async with self._one_at_a_time:
                [kind] = chance.choices(kinds, [kind.weight for kind in kinds])
                if not kind.changes_weights or time.monotonic() > self._weights_rest_until:
                    await self._event(kind, chance)

    async def _event(self, kind: events.Kind, chance: Random) -> None:
        try:
            await kind.do(self, chance)
            self._tally.events[kind.name] += 1
        except ServerFailed as error:
            self._tally.has_failed(kind.name, str(error))

    async def _looks(self) -> None:
        while not self._calm:
            await asyncio.to_thread(self._server.look)
            await asyncio.sleep(2)

    # ---- the end

    async def _take_footprints(self) -> dict[str, Footprint]:
        """Footprints of the processes that run the cache, once they have served for a while."""
        await asyncio.sleep(4)
        return await asyncio.to_thread(self._footprints)

    def _footprints(self) -> dict[str, Footprint]:
        pids = {"EngineCore": self._server.core(), "the worker": self._server.worker()}
        return {name: Footprint.of(pid) for name, pid in pids.items() if pid}

    async def _rest(self) -> None:
        """No requests arrive any more: nothing may be held, and all bytes have to be accounted for."""
        server = self._server
        deadline = time.monotonic() + _PATIENCE_S
        while (wrong := await self._not_at_rest(server)) and time.monotonic() < deadline:
            await asyncio.sleep(0.3)
        self._tally.is_left(wrong, "at rest")
        before = await self._baseline
        for name, now in (await asyncio.to_thread(self._footprints)).items():
            self._tally.is_left(now.beyond(before[name]), name)
        traces = await asyncio.to_thread(server.traces)
        self.judge.killed(self._life)
        await asyncio.to_thread(server.signal, server.process.pid, signal.SIGTERM, 30)
        self._count(server)
        await self._nothing_left(server, traces)

    async def _not_at_rest(self, server: Server) -> list[str]:
        """Ask once more: the cache processes arrivals in its next pass, and its status dates from the end of a pass."""
        reply = await client.send(self._session, server.url, str(self._model), Ask("text"), self._truth)
        if not isinstance(reply, Answer):
            return [f"no answer at the end: {reply}"]
        await asyncio.to_thread(server.look)
        if not server.status:
            return leftovers.on_disk(self._stores.disk)
        jobs = [f"{server.status['jobs']} jobs"] if server.status["jobs"] else []
        return [*leftovers.held(server.status["book"]), *jobs, *leftovers.on_disk(self._stores.disk)]


def _described(ask: Ask) -> str:
    pictures = ", ".join(map(str, ask.pictures)) or "none"
    parts = [f"{ask.kind}: picture {pictures}"]
    parts += [f"arguments {ARGUMENTS[ask.arguments]}"] if ask.arguments else []
    parts += [f"name {ask.name}"] if ask.name is not None else []
    parts += [f"salt {ask.salt}"] if ask.salt else []
    parts += [f"as {ask.way}"] if ask.name is not None else []
    return ", ".join(parts)
