"""The variables of object storage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import PlainSerializer

from fdcache.settings.extensions import Extension, GivenSettings
from fdcache.settings.kinds import MASK, Kind, Secret, Text, Url, mask_url, parse_text
from fdcache.settings.problems import Problem
from fdcache.settings.variable import Component, Group, variable

SCHEMES = ("s3", "gs", "az", "file")


def mask_bucket(url: str) -> str:
    """Hide the user, the password and the query of an address; a folder's name is shown as it is."""
    if url.startswith("file://"):
        return url
    return re.sub(r"\?.*", f"?{MASK}", mask_url(url), flags=re.DOTALL)


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
    endpoint: Url | None = variable(
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


def wrong_bucket(url: str | None) -> str | None:
    """Return why object storage cannot use an address, without a secret that it has; None if it can."""
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
    if (wrong := wrong_bucket(settings.group(ObjectSettings).url)) is not None:
        right = "set FDCACHE_OBJECT_URL, such as s3://bucket/folder"
        yield settings.conflict(("FDCACHE_STORAGE", "FDCACHE_OBJECT_URL"), wrong, right)


EXTENSION = Extension({"object": ObjectSettings}, check=_check)
