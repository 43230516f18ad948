"""The variables of object storage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import PlainSerializer

from fdcache.settings.extensions import Extension, GivenSettings
from fdcache.settings.kinds import MASK, URL, Kind, Secret, Text, mask_url, parse_text
from fdcache.settings.problems import Problem
from fdcache.settings.variable import Component, Group, variable

SCHEMES = ("s3", "gs", "az", "file")


def mask_endpoint(url: str) -> str:
    """Hide the user, the password, the query and the fragment of an address."""
    return re.sub(r"([?#]).*", rf"\1{MASK}", mask_url(url), flags=re.DOTALL)


def mask_bucket(url: str) -> str:
    """Hide the same in the address of a bucket; a folder's name is shown as it is."""
    return url if url.startswith("file://") else mask_endpoint(url)


ENDPOINT = replace(URL, example="an address such as https://minio:9000", mask=mask_endpoint)
EndpointUrl = Annotated[str, ENDPOINT, PlainSerializer(mask_endpoint, when_used="json")]
BUCKET = Kind("address", "an address", "an address such as s3://bucket/folder", parse_text, mask=mask_bucket)
BucketUrl = Annotated[str, BUCKET, PlainSerializer(mask_bucket, when_used="json")]


class ObjectSettings(Group):
    """The bucket of ``FDCACHE_STORAGE=object``."""

    used_in = (Component.STORAGE, Component.INIT, Component.COMMANDS)

    url: BucketUrl | None = variable(
        "FDCACHE_OBJECT_URL",
        None,
        "Bucket of object storage, and a folder in it: s3://bucket/folder, gs://bucket/folder, az://container/folder "
        "or file:///folder.",
    )
    endpoint: EndpointUrl | None = variable(
        "FDCACHE_OBJECT_ENDPOINT",
        None,
        "Address of a store with the interface of S3 or Azure, such as https://minio:9000. Unset, the provider's.",
    )
    region: Text | None = variable(
        "FDCACHE_OBJECT_REGION", None, "Region of a bucket of S3. Unset, AWS_REGION or us-east-1."
    )
    key_id: Secret | None = variable(
        "FDCACHE_OBJECT_KEY_ID",
        None,
        "Access key id of S3, or account name of Azure. Unset, what the provider's own variables and the machine's "
        "role give.",
    )
    key: Secret | None = variable(
        "FDCACHE_OBJECT_KEY",
        None,
        "Secret access key of S3, account key of Azure, or the JSON text of a service account's key of Google.",
    )
    session_token: Secret | None = variable(
        "FDCACHE_OBJECT_SESSION_TOKEN", None, "Session token of S3, or shared access signature of Azure."
    )


def bucket_faults(settings: ObjectSettings) -> Iterator[tuple[str, str, str]]:
    """Yield each variable with which object storage cannot work, what is wrong, and the remedy, without a secret."""
    if (wrong := _wrong_url(settings.url)) is not None:
        yield "FDCACHE_OBJECT_URL", wrong, "set FDCACHE_OBJECT_URL, such as s3://bucket/folder"
    endpoint = settings.endpoint or ""
    if endpoint != (shown := mask_endpoint(endpoint)):
        wrong = f"{shown} has a user, a query or a fragment: keys belong into FDCACHE_OBJECT_KEY"
        yield "FDCACHE_OBJECT_ENDPOINT", wrong, "set FDCACHE_OBJECT_ENDPOINT, such as https://minio:9000"


def _wrong_url(url: str | None) -> str | None:
    if url is None:
        return "object storage needs the address of a bucket"
    scheme, colon, rest = url.partition("://")
    if not (colon and scheme in SCHEMES and rest.strip("/")):
        return f"{mask_bucket(url)} is not the address of a bucket"
    if url != mask_bucket(url):
        return f"{mask_bucket(url)} has more than a bucket and a folder: keys belong into FDCACHE_OBJECT_KEY"
    return None


def _check(settings: GivenSettings) -> Iterator[Problem]:
    if settings.storage_tier.connector.lower() != "object":
        return
    for name, wrong, right in bucket_faults(settings.group(ObjectSettings)):
        yield settings.conflict(("FDCACHE_STORAGE", name), wrong, right)


EXTENSION = Extension({"object": ObjectSettings}, check=_check)
