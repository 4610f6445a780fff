# SPDX-License-Identifier: Apache-2.0
"""redis-py's client for each deployment of a store, with our own connections, and what its errors mean."""

import errno
import re
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from lmcache_ec.mask import without_secrets
from lmcache_ec.tiers import redis_credentials as credentials
from lmcache_ec.tiers.base import TierError, TierNotReady, TierUnreachable, WritesRefused
from lmcache_ec.tiers.redis_credentials import CredentialsUnavailable
from lmcache_ec.tiers.redis_pool import ReadyFirst, SentinelReadyFirst
from lmcache_ec.tiers.redis_url import Deployment, RedisAddress, RedisOptions, host_and_port
from lmcache_ec.tiers.resp import (
    CLOSED,
    PlainConnection,
    SentinelPlainConnection,
    SentinelTlsConnection,
    SocketFileConnection,
    TlsConnection,
)


def _any_answers(servers: Sequence[Any]) -> None:
    failure: Exception | None = None
    for server in servers:
        try:
            server.ping()
            return
        except Exception as error:
            failure = error
    if failure:
        raise failure


def connect(address: RedisAddress, options: RedisOptions) -> Any:
    """redis-py's client for the store. A Cluster's client requests the topology at once."""
    settings: dict[str, Any] = {
        "protocol": 2,
        "username": options.username,
        "password": options.password,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "max_connections": 2 * options.connections,  # a call may also request the topology from the same server
    }
    if provider := credentials.source(options):
        settings |= {"username": None, "password": None, "credential_provider": provider}
    if address.tls:
        settings |= {
            "ssl_ca_certs": options.ca_file,
            "ssl_certfile": options.certificate_file,
            "ssl_keyfile": options.key_file,
            "ssl_password": credentials.key_password(options),
            "ssl_check_hostname": options.check_hostname and options.verify,
            "ssl_cert_reqs": "required" if options.verify else "none",
        }
        _check_files(options)
    connection = TlsConnection if address.tls else PlainConnection
    once_more = Retry(NoBackoff(), 1, (RedisConnectionError,))
    if address.deployment is Deployment.CLUSTER:
        first, *others = address.servers
        return RedisCluster(
            url=f"redis://{host_and_port(first)}",  # only with a URL can we set the connection class
            startup_nodes=[ClusterNode(host, port) for host, port in others],
            require_full_coverage=False,  # a lost server's entries are misses, the rest continues
            retry=once_more,
            connection_class=connection,
            connection_pool_class=ReadyFirst,
            **settings,
        )
    settings |= {"retry": once_more, "db": options.database}
    if address.deployment is Deployment.SENTINEL:
        return _sentinels(address, options, settings, connection).master_for(
            options.service,
            connection_class=SentinelTlsConnection if address.tls else SentinelPlainConnection,
            connection_pool_class=SentinelReadyFirst,
            **settings,
        )
    if address.deployment is Deployment.SOCKET:
        return redis.Redis.from_pool(ReadyFirst(connection_class=SocketFileConnection, path=address.path, **settings))
    ((host, port),) = address.servers
    return redis.Redis.from_pool(ReadyFirst(connection_class=connection, host=host, port=port, **settings))


def _check_files(options: RedisOptions) -> None:
    """ValueError for unusable TLS files: redis-py loads them anew for each connection, and its errors tell less."""
    context = ssl.create_default_context()
    files = f"ssl_ca_certs {options.ca_file}"
    try:
        if options.ca_file:
            context.load_verify_locations(options.ca_file)
        if options.certificate_file:
            key = f" and ssl_keyfile {options.key_file}" if options.key_file else ""
            files = f"ssl_certfile {options.certificate_file}{key}"
            context.load_cert_chain(options.certificate_file, options.key_file, credentials.key_password(options))
    except OSError as error:
        reason = "no PEM, no key for it, or a wrong password" if isinstance(error, ssl.SSLError) else error.strerror
        raise ValueError(f"TLS: {files} cannot be used: {reason}") from None


def _sentinels(address: RedisAddress, options: RedisOptions, settings: dict[str, Any], connection: type) -> Sentinel:
    manager = Sentinel([])
    own = settings | {
        "db": 0,
        "credential_provider": (provider := credentials.sentinel_source(options)),
        "username": None if provider else options.sentinel_username,
        "password": None if provider else options.sentinel_password,
        "socket_timeout": min(options.connect_timeout_s, options.timeout_s),  # the next one may know
    }
    manager.sentinels = [
        redis.Redis.from_pool(redis.ConnectionPool(connection_class=connection, host=host, port=port, **own))
        for host, port in address.servers
    ]
    return manager


def disconnect(client: Any) -> None:
    if isinstance(client, RedisCluster):
        client.disconnect_connection_pools()
        return
    client.close()
    if isinstance(client.connection_pool, SentinelConnectionPool):
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            sentinel.close()


def probe(client: Any, address: RedisAddress, options: RedisOptions) -> None:
    if address.deployment is Deployment.SENTINEL:
        _any_answers(client.connection_pool.sentinel_manager.sentinels)
    client.execute_command("STRLEN", f"{options.prefix}is-anybody-there")
    if address.deployment is Deployment.SINGLE:
        try:
            clustered = client.info("cluster").get("cluster_enabled")
        except ResponseError:
            return  # a user without permission for INFO
        if clustered:
            raise AskError("0 another:1")


def give_up(pool: Any) -> None:
    """Make a pool reconnect: idle connections are closed now, others when they are released."""
    with pool._lock:
        for connection in pool._in_use_connections:
            connection.mark_for_reconnect()
    pool.disconnect(inuse_connections=False)


def fault_of(error: BaseException) -> type[TierError]:
    """What an error means for the store: an error reply usually means only that this command failed."""
    if isinstance(error, _NOT_READY) or str(error).startswith(_NOT_READY_WORDS):
        return TierNotReady
    if isinstance(error, _REFUSE_WRITES) or str(error).startswith(_REFUSING_WORDS):
        return WritesRefused
    # Some errors of a connection, and of authentication, are error replies.
    entry_only = isinstance(error, ResponseError) and not isinstance(error, _NO_ENTRY)
    return TierError if entry_only else TierUnreachable


_NOT_READY = (BusyLoadingError, MasterDownError, ClusterDownError, TryAgainError)
_NOT_READY_WORDS = ("BUSY ",)  # a script blocks the server
_REFUSE_WRITES = (ReadOnlyError, OutOfMemoryError, NoPermissionError)
_REFUSING_WORDS = ("MISCONF", "NOREPLICAS")  # it cannot save what it has, or has too few replicas
_NO_ENTRY = (AuthenticationError, AskError)


def explain(error: BaseException, address: RedisAddress, options: RedisOptions) -> tuple[int, str]:
    """What went wrong: an `errno` number, and a text that holds no credentials."""
    text = str(error) or type(error).__name__
    link: BaseException | None = error
    while link is not None:  # the outermost one that is known; further in is what was tried before
        if isinstance(link, ssl.SSLError) or "handshake" in str(link):
            return _explain_tls(link)
        if isinstance(link, ConnectionResetError | BrokenPipeError) or CLOSED in str(link):
            return _explain_end("a client certificate" if address.tls else "TLS, rediss://")
        if isinstance(link, CredentialsUnavailable):
            return link.errno, str(link)
        if isinstance(link, MasterNotFoundError):
            return errno.EHOSTDOWN, _explain_service(options.service)
        if isinstance(link, AuthenticationError) and credentials.none(options):
            return errno.EACCES, "authentication failed: it requires a password, but none is configured (password_file)"
        for kinds, number, reason in _EXPLANATIONS:
            if isinstance(link, kinds):
                return number, reason
        text = f"{text} {link}" if link is not error else text
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    if "unknown command" in text.lower() and "sentinel" in text.lower():
        return errno.EPROTO, "this is a Redis server, not a Sentinel: for a single server use redis://HOST:PORT"
    if "unknown command" in text.lower() and "strlen" in text.lower():
        return errno.EPROTO, "this is not a Redis server; for a Sentinel use redis-sentinel://HOST:PORT/SERVICE"
    if "Cluster mode is not enabled" in text:
        return errno.EPROTO, "this is not a Cluster: for a single server use redis://"
    if "DB index is out of range" in text:
        return errno.EINVAL, (
            f"the server has no database {options.database}: name a lower number in the URL, "
            "or raise `databases` in the server's configuration"
        )
    # A server that does not know AUTH may echo what it was sent.
    return errno.EIO, without_secrets(text, options.secrets)


_EXPLANATIONS: tuple[tuple[tuple[type[BaseException], ...], int, str], ...] = (
    ((AuthenticationError,), errno.EACCES, "authentication failed: wrong or missing user or password"),
    ((NoPermissionError,), errno.EACCES, "the user has no permission for this on keys with this prefix"),
    ((OutOfMemoryError,), errno.ENOSPC, "the server is full and evicts nothing"),
    ((ReadOnlyError,), errno.EROFS, "the server is a read-only replica"),
    ((BusyLoadingError,), errno.EAGAIN, "the server is loading its data"),
    ((MasterDownError,), errno.EAGAIN, "the server is a replica that has lost its master"),
    ((AskError,), errno.EPROTO, "this server belongs to a Cluster: use redis-cluster://, which follows its redirects"),
    (
        (socket.gaierror,),
        errno.EHOSTUNREACH,
        "the host name does not resolve: is it spelled correctly, and does DNS answer?",
    ),
    ((ConnectionRefusedError, FileNotFoundError), errno.ECONNREFUSED, "nothing listens there"),
    ((TimeoutError,), errno.ETIMEDOUT, "no answer in time"),
    ((InvalidResponse,), errno.EPROTO, "the answer is not in Redis's protocol; for a server with TLS, write rediss://"),
)


def _explain_service(service: str) -> str:
    default = " (the default where the URL has no /SERVICE)" if service == RedisOptions().service else ""
    return f"the Sentinels know no running master of this service: {service}{default}"


def _explain_end(missing: str) -> tuple[int, str]:
    return errno.ECONNRESET, f"the server closed the connection (does it require {missing}?)"


def _explain_tls(error: BaseException) -> tuple[int, str]:
    if isinstance(error, ssl.SSLCertVerificationError):
        return errno.EPROTO, f"TLS: the server's certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError):
        return _explain_end("a client certificate")
    reason = str(getattr(error, "reason", None) or "no answer")
    if "ALERT" in reason and re.search("CERT|CA$|HANDSHAKE|DENIED", reason):
        return errno.EPROTO, f"TLS: the server refuses the client's certificate, or requires one ({reason})"
    return errno.EPROTO, f"TLS handshake failed: does the server speak TLS at this port? ({reason})"
