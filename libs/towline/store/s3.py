"""A store in an S3 bucket, through the MinIO SDK: s3://bucket/prefix.

What may be repeated without harm (reads, listings, puts of the same bytes, deletions) is repeated with a back-off for as
long as `store.timeout_seconds`. A conditional put is repeated only where the server surely didn't take it.
"""

from __future__ import annotations

import io
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from minio.helpers import check_bucket_name
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from towline.config import StoreSettings
from towline.errors import FullError, MissingError, TowlineError, UnavailableError, UsageError
from towline.store.objects import CHUNK_BYTES, ObjectInfo, checked_key

PART_BYTES = 64 << 20
"""Larger objects are uploaded in parts of this size; they appear whole all the same."""
_CONNECT_SECONDS = 5.0
_CHECK_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.1, 2.0
_PROBE = "towline-check"
_MISSING = {"NoSuchKey", "NoSuchVersion", "NoSuchUpload"}
_BAD_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthorizationHeaderMalformed"}
_BUSY = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted", "XMinioServerNotInitialized"}
_FULL = {"XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "InsufficientStorage"}
T = TypeVar("T")


class S3Store:
    """See `towline.store.objects.ObjectStore`."""

    def __init__(self, settings: StoreSettings) -> None:
        parts = urlsplit(settings.url)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        if not self._bucket or parts.query or (self._prefix and checked_key(self._prefix) != self._prefix):
            raise UsageError(f"store.url = {settings.url!r}: use s3://bucket/prefix", code="store_url")
        try:
            check_bucket_name(self._bucket)
        except ValueError as error:
            raise UsageError(f"store.url = {settings.url!r}: {error}", code="store_url") from None
        endpoint = settings.endpoint or os.environ.get("AWS_ENDPOINT_URL", "") or "https://s3.amazonaws.com"
        server = urlsplit(endpoint)
        if server.scheme not in ("http", "https") or not server.netloc or server.path.strip("/"):
            raise UsageError(f"store.endpoint = {endpoint!r}: use http(s)://host:port", code="store_endpoint")
        self._endpoint = f"{server.scheme}://{server.netloc}"
        self._seconds = settings.timeout_seconds
        own_access, own_secret = settings.keys
        access = own_access or os.environ.get("AWS_ACCESS_KEY_ID", "")
        secret = own_secret or os.environ.get("AWS_SECRET_ACCESS_KEY", "")
        if not access or not secret:
            raise UsageError(
                "no S3 keys: set store.keys_folder, store.access_key and secret_key, or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY",
                code="store_keys",
            )
        token = None if own_access else os.environ.get("AWS_SESSION_TOKEN")
        timeout = urllib3.Timeout(connect=min(_CONNECT_SECONDS, self._seconds), read=self._seconds)
        if settings.ca and not os.path.isfile(settings.ca):
            raise UsageError(f"store.ca = {settings.ca!r}: no such file", code="store_ca")
        pool = urllib3.PoolManager(
            maxsize=32, retries=False, timeout=timeout, cert_reqs="CERT_REQUIRED", ca_certs=settings.ca or None
        )
        try:
            self._client = Minio(server.netloc, access, secret, token, server.scheme == "https", settings.region, pool)
        except ValueError as error:
            raise UsageError(f"store.endpoint = {endpoint!r}: {error}", code="store_endpoint") from error

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}" + f"/{self._prefix}" * bool(self._prefix) + f" at {self._endpoint}"

    def get(self, key: str) -> bytes:
        def read() -> bytes:
            response = self._client.get_object(self._bucket, self._name(key))
            try:
                data: bytes = response.read()
                return data
            finally:
                response.close()
                response.release_conn()

        return self._repeat(key, read)

    def stream(self, key: str) -> Iterator[bytes]:
        etag: str | None = None
        done = 0
        while True:
            response = self._repeat(key, partial(self._open, key, done, etag))
            start, etag = done, response.headers.get("etag")
            try:
                while chunk := response.read(CHUNK_BYTES):
                    done += len(chunk)
                    yield chunk
                return
            except HTTPError as error:
                if done == start:  # a connection that brings nothing isn't a passing fault
                    raise self._fault(key, error) from error
            finally:
                response.close()
                response.release_conn()

    def put(self, key: str, data: bytes | Path) -> None:
        def write() -> None:
            if isinstance(data, Path):
                with data.open("rb") as file:
                    self._client.put_object(self._bucket, self._name(key), file, data.stat().st_size, part_size=PART_BYTES)
            else:
                self._client.put_object(self._bucket, self._name(key), io.BytesIO(data), len(data), part_size=PART_BYTES)

        self._repeat(key, write)

    def create(self, key: str, data: bytes) -> bool:
        return self._conditional_put(key, data, self._seconds)

    def stat(self, key: str) -> ObjectInfo | None:
        try:
            found = self._repeat(key, lambda: self._client.stat_object(self._bucket, self._name(key)))
        except MissingError:
            return None
        return _info(key, found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix:
            checked_key(prefix.rstrip("/"))
        cut = len(self._prefix) + 1 if self._prefix else 0
        full = f"{self._prefix}/{prefix}" if self._prefix else prefix
        seen: set[str] = set()
        backoffs, deadline = _backoffs(), time.monotonic() + self._seconds
        while True:
            try:
                for found in self._client.list_objects(self._bucket, full, recursive=True):
                    if found.object_name not in seen and not found.object_name.endswith("/"):
                        seen.add(found.object_name)
                        backoffs, deadline = _backoffs(), time.monotonic() + self._seconds
                        yield _info(found.object_name[cut:], found)
                return
            except (MinioException, HTTPError, OSError) as error:
                self._wait_or_raise(prefix, error, next(backoffs), deadline)

    def delete(self, key: str) -> None:
        self._repeat(key, lambda: self._client.remove_object(self._bucket, self._name(key)))

    def make_bucket(self) -> bool:
        """True: it was missing and is there now."""
        if self._repeat("", lambda: self._client.bucket_exists(self._bucket)):
            return False
        try:
            self._client.make_bucket(self._bucket)
        except S3Error as error:
            if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise self._fault("", error) from error
            return False
        except (MinioException, HTTPError, OSError) as error:
            raise self._fault("", error) from error
        return True

    def check(self, *, writes: bool = True) -> None:
        seconds = min(_CHECK_SECONDS, self._seconds)
        if not self._repeat("", lambda: self._client.bucket_exists(self._bucket), seconds):
            raise UsageError(
                f"{self._endpoint} has no bucket {self._bucket!r}; create it, or correct store.url", code="store_bucket"
            )
        if not writes:
            return
        self._conditional_put(_PROBE, b"towline", seconds)
        if self._conditional_put(_PROBE, b"towline", seconds):
            raise UsageError(
                f"{self._endpoint} ignores If-None-Match: two writers could both commit; use a store that has conditional puts",
                code="store_lies",
            )

    def _conditional_put(self, key: str, data: bytes, seconds: float) -> bool:
        """The only conditional put: the SDK has no public one. True: created; False: something stands there (412)."""
        name, deadline = self._name(key), time.monotonic() + seconds
        for backoff in _backoffs():
            try:
                self._client._put_object(self._bucket, name, data, {"If-None-Match": "*"})
                return True
            except S3Error as error:
                if error.code == "PreconditionFailed" or error.response.status == 412:
                    return False
                if error.code != "ConditionalRequestConflict":
                    raise _in_doubt(self._fault(key, error)) from error
                self._wait_or_raise(key, error, backoff, deadline)
            except (NewConnectionError, ConnectTimeoutError) as error:  # nothing was sent
                self._wait_or_raise(key, error, backoff, deadline)
            except (MinioException, HTTPError, OSError) as error:
                raise _in_doubt(self._fault(key, error)) from error
        raise AssertionError("unreachable")

    def _open(self, key: str, offset: int, etag: str | None) -> Any:
        headers = {"If-Match": etag} if etag else None
        response = self._client.get_object(self._bucket, self._name(key), offset=offset, request_headers=headers)
        if offset and response.status != 206:
            response.close()
            raise UnavailableError(f"{self.url}: {key}: the store can't resume a read; read it again", code="object_replaced")
        return response

    def _repeat(self, key: str, act: Callable[[], T], seconds: float | None = None) -> T:
        deadline = time.monotonic() + (self._seconds if seconds is None else seconds)
        for backoff in _backoffs():
            try:
                return act()
            except (MinioException, HTTPError, OSError) as error:
                self._wait_or_raise(key, error, backoff, deadline)
        raise AssertionError("unreachable")

    def _wait_or_raise(self, key: str, error: Exception, backoff: float, deadline: float) -> None:
        fault = self._fault(key, error)
        passing = isinstance(fault, UnavailableError) and not isinstance(fault, FullError) and fault.code != "object_replaced"
        if not passing or time.monotonic() + backoff > deadline:
            traceback.clear_frames(error.__traceback__)  # the SDK's frame has the error, as this one has the fault: cycles, which
            try:  # the collector alone would find, of some 60 objects for each look at a LOG without a new entry
                raise fault from error
            finally:
                del fault, error
        time.sleep(backoff)

    def _fault(self, key: str, error: Exception) -> TowlineError:
        where = f"{self.url}: {key}" if key else self.url
        if isinstance(error, S3Error):
            return self._refusal(where, error)
        status = {InvalidResponseError: "_code", ServerError: "status_code"}.get(type(error))
        if status and getattr(error, status) < 500 and getattr(error, status) != 429:
            return UsageError(f"{self._endpoint} doesn't answer like an S3 server; correct store.endpoint", code="store_endpoint")
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            return UsageError(f"{error.filename}: {error.strerror}", code="file")
        reason = str(error).rpartition(": ")[2].strip() or type(error).__name__
        return UnavailableError(f"{where}: no answer ({reason}); is the store running and store.endpoint right?",
                                code="store_unavailable")  # fmt: skip

    def _refusal(self, where: str, error: S3Error) -> TowlineError:
        code, status = error.code or "", error.response.status
        if code in _MISSING or (status == 404 and code != "NoSuchBucket"):
            return MissingError(f"{where}: no such object", code="object_missing")
        if code == "NoSuchBucket":
            return UsageError(
                f"{self._endpoint} has no bucket {self._bucket!r}; create it, or correct store.url", code="store_bucket"
            )
        if code in _BAD_KEYS:
            return UsageError(
                f"{self._endpoint} refuses the S3 keys ({code}); correct store.keys_folder, or access_key and secret_key",
                code="store_keys",
            )
        if code in _FULL or status == 507:
            return FullError(f"{where}: the store has no room ({code}); free some", code="store_full")
        if status == 403:
            return UsageError(
                f"{where}: these S3 keys may not do that ({code}); correct keys or policy: `towline access s3` writes them "
                "for each --run, and the --bucket and --prefix that store.url has",
                code="store_permission",
            )
        if code in _BUSY or code == "ConditionalRequestConflict" or status >= 500 or status == 429:
            return UnavailableError(f"{where}: the store is busy ({code}); try again", code="store_busy")
        if code == "PreconditionFailed":
            return UnavailableError(f"{where}: replaced while it was read; read it again", code="object_replaced")
        return UsageError(f"{where}: {code}: {error.message}", code="store_refused")

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{checked_key(key)}" if self._prefix else checked_key(key)


def _info(key: str, found: Any) -> ObjectInfo:
    return ObjectInfo(key, found.size or 0, found.last_modified.timestamp() if found.last_modified else 0.0)


def _in_doubt(fault: TowlineError) -> TowlineError:
    """A conditional put's failure: where the server may have taken it all the same, the code says so."""
    if isinstance(fault, UnavailableError) and not isinstance(fault, FullError):
        return UnavailableError(f"{fault.message} (the put may have been taken)", code="reply_lost")
    return fault


def _backoffs() -> Iterator[float]:
    """Seconds to wait after each failure, without end; a deadline ends it."""
    seconds = _FIRST_BACKOFF_SECONDS
    while True:
        yield seconds * random.uniform(0.5, 1.0)
        seconds = min(2 * seconds, _MAX_BACKOFF_SECONDS)
