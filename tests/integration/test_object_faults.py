"""A server of S3 that fails in every way: nothing is wrong, deadlines are kept, and no key is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.errors import StorageError
from fdcache.settings import read_settings
from fdcache.storage.connector import Outcome, StorageState
from fdcache.storage.objects.backend import StoreFailedError
from fdcache.storage.objects.bucket import Bucket as Client
from fdcache.storage.objects.connector import BucketConnector
from fdcache.storage.objects.variables import ObjectSettings
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.commands import everything
from tests.faulty_proxy import FaultyProxy
from tests.object_help import KEY, KEY_ID, Bucket, PlainS3Server, S3Server, open_bucket
from tests.service_help import run, until

PATIENCE = 60.0
LAYOUT = conformance_layout("faults")
COUNT = 8
TIER = {"object_bytes": 4 * LAYOUT.record_bytes}


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(s3_server.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def bucket(proxy: FaultyProxy, s3: Bucket) -> Bucket:
    return Bucket(s3.url, proxy.endpoint)


@pytest.fixture
def connector(bucket: Bucket) -> Iterator[BucketConnector]:
    connector = open_bucket(bucket, LAYOUT, **TIER)
    yield connector
    connector.close()


@pytest.fixture
def records() -> KnownRecords:
    return KnownRecords(LAYOUT, COUNT)


def read(
    connector: BucketConnector, records: KnownRecords, name: str, timeout: float = PATIENCE
) -> list[Outcome]:
    """Read a path's blocks; check that exactly those that are OK have their bytes."""
    hashes = path_of(COUNT, name)
    records.wipe()
    found = connector.get(records.batch(hashes), timeout).outcomes.tolist()
    for slot, outcome in enumerate(found):
        assert records.holds(slot, hashes[slot].tobytes()) == (outcome == Outcome.OK)
    return [Outcome(value) for value in found]


def stored(connector: BucketConnector, records: KnownRecords, name: str) -> None:
    assert connector.put(records.fill(path_of(COUNT, name)), PATIENCE).ok.all()


@pytest.mark.parametrize("fault", ["500", "hang"])
def test_a_server_that_fails_is_left_alone_and_used_again(
    connector: BucketConnector, records: KnownRecords, proxy: FaultyProxy, fault: str
) -> None:
    stored(connector, records, "alone")
    hashes = path_of(COUNT, "alone")
    proxy.disturb(fault)
    begin = time.monotonic()
    expected = Outcome.TIMEOUT if fault == "hang" else Outcome.PEER_GONE
    assert read(connector, records, "alone", 2.0) == [expected] * COUNT
    assert time.monotonic() - begin < 30, "a hanging server is waited for without end"
    assert connector.stats().state is StorageState.OFF
    before = len(proxy.seen)
    refused = [
        connector.get(records.batch(hashes), PATIENCE),
        connector.put(records.fill(path_of(COUNT, "never")), PATIENCE),
    ]
    assert all(set(result.outcomes.tolist()) == {Outcome.PEER_GONE} for result in refused)
    assert connector.exists(path_of(COUNT, "new"), PATIENCE).outcome is Outcome.PEER_GONE
    assert len(proxy.seen) - before <= 3, "a server that fails is asked again and again"
    proxy.calm()
    until(lambda: read(connector, records, "alone") == [Outcome.OK] * COUNT, "the server is used again")
    assert connector.stats().state is StorageState.READY


def test_writes_and_questions_to_a_hanging_server_keep_their_deadlines(
    connector: BucketConnector, records: KnownRecords, proxy: FaultyProxy
) -> None:
    proxy.disturb("hang", ["GET"])
    asked = connector.exists(path_of(COUNT, "unknown"), 0.5)
    assert (asked.length, asked.outcome) == (0, Outcome.TIMEOUT)
    proxy.calm()
    until(lambda: connector.exists(path_of(COUNT, "unknown"), PATIENCE).outcome is Outcome.OK, "an answer")
    proxy.disturb("hang", ["PUT"])
    begin = time.monotonic()
    result = connector.put(records.fill(path_of(COUNT, "late")), 0.5)
    assert result.outcomes.tolist() == [Outcome.TIMEOUT] * COUNT
    assert time.monotonic() - begin < 30
    proxy.calm()
    until(lambda: bool(connector.put(records.fill(path_of(COUNT, "late")), PATIENCE).ok.all()), "a write")
    assert read(connector, records, "late") == [Outcome.OK] * COUNT


def test_records_of_a_read_that_was_given_up_are_not_touched_later(
    connector: BucketConnector, records: KnownRecords, proxy: FaultyProxy
) -> None:
    stored(connector, records, "given up")
    proxy.disturb("hang", ["GET"])
    assert read(connector, records, "given up", 0.5) == [Outcome.TIMEOUT] * COUNT
    other = path_of(COUNT, "another path")
    records.fill(other)
    seen = len(proxy.seen)
    proxy.calm()
    until(lambda: connector.exists(path_of(1, "asked"), PATIENCE).outcome is Outcome.OK, "the server answers")
    assert len(proxy.seen) > seen
    assert all(records.holds(slot, row.tobytes()) for slot, row in enumerate(other))


@pytest.mark.parametrize("fault", ["cut", "short", "flip"])
def test_a_disturbed_answer_is_asked_for_again(
    connector: BucketConnector, records: KnownRecords, proxy: FaultyProxy, fault: str
) -> None:
    stored(connector, records, "once")
    proxy.disturb(fault, ["GET"], times=1)
    found = read(connector, records, "once")
    assert proxy.left == 0
    assert found == [Outcome.OK] * COUNT


@pytest.mark.parametrize("fault", ["cut", "short", "flip"])
def test_answers_that_are_always_disturbed_are_never_taken_for_blocks(
    connector: BucketConnector, records: KnownRecords, proxy: FaultyProxy, bucket: Bucket, fault: str
) -> None:
    stored(connector, records, "always")
    proxy.disturb(fault, ["GET"])
    found = read(connector, records, "always", 5.0)
    assert found != [Outcome.OK] * COUNT
    assert not connector.get(records.batch(path_of(COUNT, "always")), 5.0).ok.all()
    proxy.calm()
    stored(open_bucket(bucket, LAYOUT, **TIER), records, "always")
    until(lambda: read(connector, records, "always") == [Outcome.OK] * COUNT, "the blocks are found again")


def test_a_bucket_that_may_only_be_read_is_read(
    connector: BucketConnector, records: KnownRecords, proxy: FaultyProxy
) -> None:
    stored(connector, records, "read only")
    proxy.disturb("403", ["PUT"])
    result = connector.put(records.fill(path_of(COUNT, "refused")), PATIENCE)
    assert result.outcomes.tolist() == [Outcome.PEER_GONE] * COUNT
    assert connector.stats().state is StorageState.READ_ONLY
    assert read(connector, records, "read only") == [Outcome.OK] * COUNT
    assert connector.stats().state is StorageState.READ_ONLY
    proxy.calm()
    until(
        lambda: bool(connector.put(records.fill(path_of(COUNT, "refused")), PATIENCE).ok.all()),
        "it is written",
    )
    assert connector.stats().state is StorageState.READY


def test_a_store_without_conditional_requests_is_asked_before_it_is_written(
    connector: BucketConnector, records: KnownRecords, proxy: FaultyProxy
) -> None:
    proxy.disturb("501", ["PUT"])
    stored(connector, records, "unconditional")
    assert "HEAD" in proxy.seen
    assert read(connector, records, "unconditional") == [Outcome.OK] * COUNT


def test_a_bucket_that_is_not_there_is_named(s3_server: S3Server, records: KnownRecords) -> None:
    connector = open_bucket(Bucket("s3://no-such-bucket/blocks", s3_server.endpoint), LAYOUT)
    result = connector.put(records.fill(path_of(COUNT, "nowhere")), PATIENCE)
    assert not result.ok.any()
    assert "the bucket does not exist" in str(result.error)
    assert connector.stats().state is StorageState.OFF


@pytest.fixture(params=["moto", "localbucket"])
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[S3Server]:
    """A server whose bucket no other test uses."""
    server = S3Server() if request.param == "moto" else PlainS3Server(tmp_path / "buckets")
    yield server
    server.kill()


def test_a_bucket_that_vanishes_is_a_miss_then_named_and_used_again(
    own_server: S3Server, records: KnownRecords
) -> None:
    given = own_server.bucket("vanishing")
    connector = open_bucket(given, LAYOUT, **TIER)
    stored(connector, records, "before")
    own_server.remove("blocks")
    assert read(connector, records, "before") == [Outcome.MISS] * COUNT
    result = connector.put(records.fill(path_of(COUNT, "meanwhile")), PATIENCE)
    assert not result.ok.any()
    assert "the bucket does not exist" in str(result.error)
    own_server.make("blocks")
    after = path_of(COUNT, "after")
    until(lambda: bool(connector.put(records.fill(after), PATIENCE).ok.all()), "the new bucket is written")
    assert read(connector, records, "after") == [Outcome.OK] * COUNT
    assert read(connector, records, "before") == [Outcome.MISS] * COUNT
    connector.close()


@pytest.mark.parametrize("fault", ["500", "403", "hang", "nobody"])
def test_no_key_is_in_an_error_or_a_log(
    records: KnownRecords,
    proxy: FaultyProxy,
    bucket: Bucket,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    given = bucket if fault != "nobody" else Bucket(bucket.url, "http://127.0.0.1:9")
    connector = open_bucket(given, LAYOUT)
    proxy.disturb(fault)
    results = [
        connector.put(records.fill(path_of(COUNT, "secret")), 1.0),
        connector.get(records.batch(path_of(COUNT, "secret")), 1.0),
        connector.delete(path_of(COUNT, "secret"), 1.0),
    ]
    with pytest.raises(StorageError) as cleared:
        connector.clear(1.0)
    told = [
        caplog.text,
        repr(cleared.value),
        repr(connector.stats()),
        repr(given.settings),
        *map(repr, results),
    ]
    assert not any(secret in text for secret in (KEY, KEY_ID) for text in told)
    assert any(connector.stats().error or "" in text for text in told)
    connector.close()


@pytest.mark.parametrize("url", ["gs://bucket/blocks", "az://container/blocks"])
def test_no_key_is_in_the_error_of_settings_that_are_wrong(url: str) -> None:
    settings = ObjectSettings(url=url, key_id="an-account-name", key="not a key: hidden-text")
    with pytest.raises(StorageError) as refused:
        Client(settings, 1.0)
    assert "hidden-text" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("FDCACHE_OBJECT_URL", "s3://id:hidden-text@bucket/blocks"),
        ("FDCACHE_OBJECT_URL", "az://container/blocks?sig=hidden-text"),
        ("FDCACHE_OBJECT_URL", "s3://bucket/blocks#hidden-text"),
        ("FDCACHE_OBJECT_ENDPOINT", "http://id:hidden-text@127.0.0.1:9"),
        ("FDCACHE_OBJECT_ENDPOINT", "http://127.0.0.1:9/?sig=hidden-text"),
    ],
)
def test_an_address_with_a_secret_is_refused_without_it(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"FDCACHE_STORAGE": "object", "FDCACHE_OBJECT_URL": "s3://bucket/blocks", name: address}
    for each, value in given.items():
        monkeypatch.setenv(each, value)
    settings = read_settings()
    problems = [str(each) for each in settings.problems if name in each.variables]
    assert "FDCACHE_OBJECT_KEY" in problems[0]
    with pytest.raises(StorageError, match=f"{name}.*FDCACHE_OBJECT_KEY") as refused:
        BucketConnector.require(settings.settings.group(ObjectSettings))
    shown = [
        everything(run(*command)) for command in (("env", "show"), ("env", "show", "--json"), ("doctor",))
    ]
    assert all(name in text for text in shown)
    assert not any("hidden-text" in text for text in (*problems, str(refused.value), *shown))


def test_an_error_of_the_store_shows_no_user_and_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", "http://id:hidden-text@127.0.0.1:9/?sig=hidden-text")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    client = Client(ObjectSettings(url="s3://bucket/blocks", key_id=KEY_ID, key=KEY), 1.0)
    with pytest.raises(StoreFailedError, match="performing GET") as failed:
        client.read("none", 0, 1)
    assert "hidden-text" not in str(failed.value)


@pytest.mark.parametrize(
    ("url", "problem"),
    [(None, "needs the address of a bucket"), ("http://bucket", "is not the address of a bucket")],
)
def test_settings_without_a_bucket_are_refused(
    url: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDCACHE_STORAGE", "object")
    if url is not None:
        monkeypatch.setenv("FDCACHE_OBJECT_URL", url)
    (found,) = [str(each) for each in read_settings().problems if "FDCACHE_OBJECT_URL" in each.variables]
    assert problem in found
    assert "s3://bucket/folder" in found
    with pytest.raises(StorageError, match="FDCACHE_OBJECT_URL"):
        BucketConnector.require(ObjectSettings(url=url))
