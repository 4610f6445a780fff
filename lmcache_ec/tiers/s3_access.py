# SPDX-License-Identifier: Apache-2.0
"""Access to an S3 remote: boto3 finds credentials and address, and obstore's clients are made from them."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lmcache_ec.tiers.s3_customer_key import customer_key
from lmcache_ec.tiers.s3_faults import summary
from lmcache_ec.tiers.s3_url import S3Options

if TYPE_CHECKING:
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import ClientConfig, S3Config, S3Store

_CONNECT_S = 1.0
_TOTAL_S = 30.0

# botocore renews credentials at the latest 10 minutes before they end, obstore asks 5 minutes before that.
_CREDENTIALS_S = 540.0


@dataclass(frozen=True, slots=True)
class S3Access:
    """A bucket's address as boto3 resolved it, and what makes clients for it. Any thread may use it."""

    options: S3Options
    region: str
    address: str  # http(s)://host, with the bucket in the host or as the last part of the path
    virtual_host: bool
    certificates: bytes | None = field(repr=False)
    customer_key: bytes | None = field(repr=False)
    credentials: Boto3CredentialProvider = field(repr=False)
    admin: Any = field(repr=False)  # boto3's S3 client

    @classmethod
    def of(cls, options: S3Options) -> S3Access:
        """Get credentials and address from boto3. ValueError if it has none, or its configuration cannot be used."""
        try:
            import boto3
            import botocore.session
            from botocore.exceptions import BotoCoreError, ClientError
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError as error:
            raise ValueError(f"S3 needs obstore and boto3, pip install 'lmcache-ec[s3]': {error}") from None

        own_key, remote = customer_key(options), f"s3://{options.bucket}/{options.prefix}".rstrip("/")
        core = botocore.session.Session(profile=options.profile)
        if options.access_key_id and options.secret_access_key:
            core.set_credentials(options.access_key_id, options.secret_access_key)
        try:
            core.register_component("data_loader", _loader(core.get_config_variable("data_path")))
            session = boto3.Session(botocore_session=core)
            found = session.get_credentials() is not None
            credentials = Boto3CredentialProvider(session, ttl=timedelta(seconds=_CREDENTIALS_S)) if found else None
            region = options.region or session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
            if credentials is not None:
                credentials()  # fails for a role that cannot be assumed, or an expired login
                admin = _admin(session, options, region)
                probe = admin.generate_presigned_url("get_object", Params={"Bucket": options.bucket, "Key": "x"})
            certificates = options.ca_bundle or core.get_config_variable("ca_bundle")
            trusted = Path(certificates).read_bytes() if certificates else None
        except (BotoCoreError, ClientError, AssertionError, OSError, ValueError) as error:
            raise ValueError(f"{remote}: credentials or configuration cannot be used: {summary(error)}") from None
        if credentials is None:
            raise ValueError(
                f"{remote}: no credentials found, neither in the environment (AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE) nor in ~/.aws nor as a role of this machine"
            )
        scheme, netloc, path = urlsplit(probe)[:3]
        if "@" in netloc:
            raise ValueError(f"{remote}: the endpoint in the environment or the profile holds credentials")
        return cls(
            options=options,
            region=region,
            address=f"{scheme}://{netloc}{path.removesuffix('/x')}",
            virtual_host=not path.endswith(f"/{options.bucket}/x"),
            certificates=trusted,
            customer_key=own_key,
            credentials=credentials,
            admin=admin,
        )

    @property
    def bucket(self) -> str:
        return self.options.bucket

    @property
    def prefix(self) -> str:
        return self.options.prefix

    @property
    def tls(self) -> bool:
        return self.address.startswith("https://")

    @property
    def where(self) -> str:
        return f"{self.address}/{self.prefix}".rstrip("/")

    def client(self, limit_s: float, *, silence: bool) -> S3Store:
        """A client that aborts a request after `limit_s` without a byte (`silence`), or in total."""
        from obstore.store import S3Store

        limit = timedelta(seconds=limit_s)
        client_options: ClientConfig = {
            "allow_http": not self.tls,
            "connect_timeout": min(limit, timedelta(seconds=_CONNECT_S)),
            "timeout": timedelta(seconds=_TOTAL_S) + limit if silence else limit,
        }
        if silence:
            client_options["read_timeout"] = limit
        options = self.options
        asked: S3Config = {}
        if options.sse:
            asked["server_side_encryption"] = options.sse
        if options.sse_kms_key_id:
            asked["sse_kms_key_id"] = options.sse_kms_key_id
        if self.customer_key is not None:
            asked["sse_customer_key_base64"] = base64.b64encode(self.customer_key).decode()
        if options.requester_pays:
            asked["request_payer"] = True
        if self.certificates is not None:
            client_options["root_certificate"] = self.certificates
        return S3Store(
            self.bucket,
            prefix=self.prefix or None,
            config={
                **asked,
                "region": self.region,
                "endpoint": self.address if self.virtual_host else self.address.removesuffix(f"/{self.bucket}"),
                "virtual_hosted_style_request": self.virtual_host,
                "checksum_algorithm": "SHA256",  # the signature needs it anyway; not every store verifies that one
                "unsigned_payload": False,
                "skip_signature": False,
                "disable_bulk_delete": silence,  # a single object is deleted by DELETE, which every store has
            },
            client_options=client_options,
            # For transient faults: a connection closed meanwhile, a 5xx. Never after a hang.
            retry_config={
                "max_retries": 2,
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(milliseconds=200),
                    "base": 2,
                },
                "retry_timeout": min(limit, timedelta(seconds=_CONNECT_S)) * 0.9,
            },
            credential_provider=self.credentials,
        )


@cache
def _loader(data_path: str | None) -> Any:
    """botocore's data about S3, for all remotes of this process: reading it is most of the cost of opening one."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _admin(session: Any, options: S3Options, region: str) -> Any:
    from botocore.config import Config

    style = {None: {}, True: {"addressing_style": "path"}, False: {"addressing_style": "virtual"}}[options.path_style]
    client = session.client(
        "s3",
        region_name=region,
        endpoint_url=options.endpoint,
        use_ssl=options.tls,
        verify=str(options.ca_bundle) if options.ca_bundle else None,
        config=Config(
            signature_version="s3v4",
            s3=style,
            connect_timeout=_CONNECT_S,
            read_timeout=_TOTAL_S,
            retries={"total_max_attempts": 1},
        ),
    )
    if options.requester_pays:
        client.meta.events.register("before-sign.s3.HeadBucket", _offer_to_pay)  # which takes no such parameter
    return client


def _offer_to_pay(request: Any, **_: object) -> None:
    request.headers["x-amz-request-payer"] = "requester"
