"""The variables of object storage."""

from __future__ import annotations

from collections.abc import Iterator

from fdcache.settings.extensions import Extension, GivenSettings
from fdcache.settings.kinds import Secret, Text, Url
from fdcache.settings.problems import Problem
from fdcache.settings.variable import Component, Group, variable

SCHEMES = ("s3", "gs", "az", "file")


class ObjectSettings(Group):
    """The bucket of ``FDCACHE_STORAGE=object``."""

    used_in = (Component.STORAGE, Component.INIT, Component.COMMANDS)

    url: Text | None = variable(
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


def is_bucket_url(url: str) -> bool:
    """Return True for an address that object storage can use."""
    scheme, colon, rest = url.partition("://")
    return bool(colon) and scheme in SCHEMES and bool(rest.strip("/"))


def _check(settings: GivenSettings) -> Iterator[Problem]:
    if settings.storage_tier.connector.lower() != "object":
        return
    url = settings.group(ObjectSettings).url
    if url is None:
        wrong = "object storage needs the address of a bucket"
    elif not is_bucket_url(url):
        wrong = f"{url} is not the address of a bucket"
    else:
        return
    right = "set FDCACHE_OBJECT_URL, such as s3://bucket/folder"
    yield settings.conflict(("FDCACHE_STORAGE", "FDCACHE_OBJECT_URL"), wrong, right)


EXTENSION = Extension({"object": ObjectSettings}, check=_check)
