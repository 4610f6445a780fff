# SPDX-License-Identifier: Apache-2.0
"""Where a Redis store is and how it is used: a URL, and options.

    redis://[user:password@]host[:6379][/database]              rediss:// with TLS; valkey://, valkeys://, resp:// alike
    redis-sentinel://[user:password@]host[:26379][,…][/service] rediss-sentinel:// with TLS
    redis-cluster://[user:password@]host[:6379][,…]             rediss-cluster:// with TLS
    unix://[user:password@]/path/of/the/socket

Parameters after `?` have redis-py's names, except `read_only` and the sources of credentials, which are described in
`redis_credentials.py`. `_PARAMETERS` has those that are supported.
"""

import difflib
import enum
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from lmcache_ec.sizes import MIB
from lmcache_ec.tiers.remote import MAX_ENTRY_BYTES, TIMEOUT_S


class Deployment(enum.Enum):
    """How the servers of one store are arranged."""

    SINGLE = "a single server"
    SENTINEL = "a master that Sentinels name"
    CLUSTER = "a Cluster"
    SOCKET = "a Unix socket"


_ONE_OF = (
    ("password", "password_file", "password_command"),
    ("username", "username_file"),
    ("sentinel_password", "sentinel_password_file"),
    ("key_password", "key_password_file"),
)


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How a store is used. Values in the URL take precedence. ValueError for invalid values."""

    prefix: str = "lmcache-ec/"
    """Prefix of each key."""
    ttl_s: float | None = None
    """How long an entry lives after its write; None: as long as the server keeps it."""
    max_entry_bytes: int = MAX_ENTRY_BYTES
    """Larger ones are not sent (a server's own limit, `proto-max-bulk-len`, is 512 MiB)."""
    timeout_s: float = TIMEOUT_S
    """The longest silence of a server. A whole call takes at most twice as long, including retries."""
    connect_timeout_s: float = 1.0
    """For one address. A Sentinel that is silent for this long is skipped."""
    connections: int = 16
    """Calls that may be in progress at once; more wait."""
    batch_bytes: int = 64 * MIB
    """Bytes of replies requested from one server at once."""
    database: int = 0
    service: str = "mymaster"
    """The service whose master the Sentinels name."""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    """Holds only the password; read for each new connection, so that it may be replaced at any time."""
    username_file: str | None = None
    password_command: str | None = None
    """Prints the password, or user and password: see `redis_credentials.py`. Split into arguments as by a shell."""
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    sentinel_password_file: str | None = None
    ca_file: str | None = None
    """Certificates (PEM) against which a server's is verified; None: the system's."""
    certificate_file: str | None = None
    """The client's certificate (PEM), if the server asks for one."""
    key_file: str | None = None
    key_password: str | None = field(default=None, repr=False)
    key_password_file: str | None = None
    check_hostname: bool = True
    verify: bool = True
    """Whether a server without a valid certificate is refused."""
    read_only: bool = False
    """Whether nothing is ever written."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s", "ttl_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (0 < seconds < math.inf):
                raise ValueError(f"{name} of a Redis tier: must be a positive number of seconds, not {seconds}")
        for name in ("max_entry_bytes", "connections", "batch_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} of a Redis tier: must be a positive number, not {getattr(self, name)}")
        for given in _ONE_OF:
            if sum(bool(getattr(self, name)) for name in given) > 1:
                raise ValueError(f"{given[0]} of a Redis tier: must be given once, as one of {', '.join(given)}")
        if self.password_command is not None:
            try:
                arguments = shlex.split(self.password_command)
            except ValueError:
                arguments = []
            if not arguments:
                raise ValueError("password_command of a Redis tier: must be a program and its arguments")
        if self.database < 0:
            raise ValueError(f"database of a Redis tier: must be 0 or more, not {self.database}")

    @property
    def secrets(self) -> dict[str, str]:
        """Name to value of secrets that no text may contain, as far as given here: those from files and commands are
        kept out of errors where they are used."""
        names = ("username", "password", "sentinel_username", "sentinel_password", "key_password")
        return {name: secret for name in names if (secret := getattr(self, name))}

    @property
    def credentials_from(self) -> str:
        """Where user and password come from, without showing either; empty if from the address."""
        if self.password_command:
            return f"password_command {shlex.split(self.password_command)[0]}"
        names = ("username_file", "password_file", "sentinel_password_file")
        return ", ".join(f"{name} {path}" for name in names if (path := getattr(self, name)))


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a store is: its servers (those contacted first), or the path of a socket."""

    deployment: Deployment
    servers: tuple[tuple[str, int], ...]
    path: str
    tls: bool

    def __str__(self) -> str:
        if self.deployment is Deployment.SOCKET:
            return self.path
        return ",".join(map(host_and_port, self.servers))


def host_and_port(server: tuple[str, int]) -> str:
    """As written in a URL."""
    host, port = server
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


SCHEMES = {
    scheme: (deployment, tls)
    for names, deployment, tls in (
        ("redis valkey resp", Deployment.SINGLE, False),
        ("rediss valkeys resps", Deployment.SINGLE, True),
        ("redis-sentinel valkey-sentinel", Deployment.SENTINEL, False),
        ("rediss-sentinel valkeys-sentinel", Deployment.SENTINEL, True),
        ("redis-cluster valkey-cluster", Deployment.CLUSTER, False),
        ("rediss-cluster valkeys-cluster", Deployment.CLUSTER, True),
        ("unix", Deployment.SOCKET, False),
    )
    for scheme in names.split()
}


def _flag(text: str) -> bool:
    try:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


def _verify(text: str) -> bool:
    try:
        return {"required": True, "none": False}[text.lower()]
    except KeyError:
        raise ValueError("must be required or none") from None


_PARAMETERS: dict[str, tuple[str, Callable[[str], object]]] = {
    "db": ("database", int),
    "username": ("username", str),
    "password": ("password", str),
    "password_file": ("password_file", str),
    "username_file": ("username_file", str),
    "password_command": ("password_command", str),
    "sentinel_username": ("sentinel_username", str),
    "sentinel_password": ("sentinel_password", str),
    "sentinel_password_file": ("sentinel_password_file", str),
    "service": ("service", str),
    "socket_timeout": ("timeout_s", float),
    "socket_connect_timeout": ("connect_timeout_s", float),
    "max_connections": ("connections", int),
    "ssl_ca_certs": ("ca_file", str),
    "ssl_certfile": ("certificate_file", str),
    "ssl_keyfile": ("key_file", str),
    "ssl_password": ("key_password", str),
    "ssl_password_file": ("key_password_file", str),
    "ssl_check_hostname": ("check_hostname", _flag),
    "ssl_cert_reqs": ("verify", _verify),
    "read_only": ("read_only", _flag),
}


def parse_redis_url(url: str, options: RedisOptions) -> tuple[RedisAddress, RedisOptions]:
    """Where the store is, and `options` updated from the URL. ValueError, which quotes nothing of the URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("URL of a Redis tier: it cannot be read") from None
    if parts.scheme not in SCHEMES:
        raise ValueError(f"URL of a Redis tier: must begin with one of {', '.join(SCHEMES)}")
    if "@" in parts.path + parts.query + parts.fragment or parts.fragment:
        raise ValueError(
            "URL of a Redis tier: in user and password write %23 for #, %2F for /, %3F for ?, %40 for @; or use "
            "${NAME}: the environment variable NAME holds them unescaped"
        )
    deployment, tls = SCHEMES[parts.scheme]
    credentials, _, hosts = parts.netloc.rpartition("@")
    found: dict[str, Any] = {}
    if credentials:
        username, _, password = (unquote(part) for part in credentials.partition(":"))
        found |= {"username": username or None, "password": password or None}
    path = unquote(parts.path)
    if deployment is Deployment.SENTINEL and path.strip("/"):
        found["service"] = path.strip("/")
    elif deployment in (Deployment.SINGLE, Deployment.CLUSTER) and path.strip("/"):
        found["database"] = _value("the path (number of a database)", int, path.strip("/"))
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _PARAMETERS:
            nearest = difflib.get_close_matches(name, _PARAMETERS, n=1)
            # A name that resembles none may be part of a password.
            advice = f" {name}: did you mean {nearest[0]}?" if nearest else f": must be among {', '.join(_PARAMETERS)}"
            raise ValueError(f"URL of a Redis tier: unknown parameter{advice}")
        option, reads = _PARAMETERS[name]
        found[option] = _value(f"parameter {name}", reads, text)
    port = 26379 if deployment is Deployment.SENTINEL else 6379
    servers = () if deployment is Deployment.SOCKET else tuple(_server(text, port) for text in hosts.split(","))
    if deployment is Deployment.SOCKET and (hosts or path in ("", "/")):
        raise ValueError("URL of a Redis tier: must be unix:///path/of/the/socket")
    if deployment is Deployment.SINGLE and len(servers) > 1:
        raise ValueError("URL of a Redis tier: for several servers use redis-cluster:// or redis-sentinel://")
    merged = replace(options, **found)
    if deployment is Deployment.CLUSTER and merged.database:
        raise ValueError(f"URL of a Redis tier: a Cluster has no database {merged.database}, only 0")
    return RedisAddress(deployment, servers, path, tls), merged


def _value(what: str, reads: Callable[[str], object], text: str) -> object:
    try:
        return reads(text)
    except ValueError as error:
        accepted = "must be a number" if reads in (int, float) else str(error)
        raise ValueError(f"URL of a Redis tier: {what}: {accepted}") from None


def _server(text: str, port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:]+))(?::(\d{1,5}))?", text)
    if match is None:
        raise ValueError("URL of a Redis tier: must name hosts as host, host:port or [address]:port, with commas")
    if int(match[3] or port) not in range(1, 65536):
        raise ValueError(f"URL of a Redis tier: the port must be from 1 to 65535, not {match[3]}")
    return unquote(match[1] or match[2]), int(match[3] or port)
