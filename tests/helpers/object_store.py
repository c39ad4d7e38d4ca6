"""An S3 server on the loopback, in a process of its own, with the variables by which s3fs finds it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from txl_dist.distributed.rendezvous import free_port

BUCKET = "bucket"


class ObjectStore(NamedTuple):
    """Running server with one empty bucket."""

    url: str
    """URL of the bucket, such as s3://bucket."""
    variables: dict[str, str]
    """Environment variables of a process that uses the server."""
    file_system: Any
    """File system of s3fs in this process."""

    def names(self, prefix: str) -> list[str]:
        """Return the objects below a prefix of the bucket, without the prefix."""
        self.file_system.invalidate_cache()
        start = f"{BUCKET}/{prefix}/"
        return [path.removeprefix(start) for path in self.file_system.find(start.rstrip("/"))]

    def read(self, name: str) -> str:
        """Return the content of an object of the bucket, as text."""
        content: bytes = self.file_system.cat_file(f"{BUCKET}/{name}")
        return content.decode()

    def checkpoints(self, prefix: str) -> list[int]:
        """Return the steps of the whole checkpoints below a prefix."""
        whole = [name for name in self.names(prefix) if name.endswith("/MANIFEST.json")]
        return sorted(int(name.split("/")[1][len("step_") :][:9]) for name in whole)


@contextmanager
def serve_objects() -> Iterator[ObjectStore]:
    """Yield a server with one bucket. It ends with the block."""
    port = free_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = os.environ | variables
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        from s3fs import S3FileSystem

        file_system = S3FileSystem(
            key="testing",
            secret="testing",
            client_kwargs={"endpoint_url": variables["AWS_ENDPOINT_URL"]},
            use_listings_cache=False,
        )
        end_s = time.monotonic() + 120
        while True:
            try:
                file_system.mkdir(BUCKET)
                break
            except Exception:  # noqa: BLE001  it does not listen yet
                assert server.poll() is None, "the server has ended"
                assert time.monotonic() < end_s, "the server does not answer"
                time.sleep(0.1)
        yield ObjectStore(f"s3://{BUCKET}", variables, file_system)
    finally:
        server.kill()
        server.wait()
