"""Checkpoints in a bucket of OpenStack Swift (its s3api, which verifies signatures; keys by tempauth): a chain of deltas, with
objects in parts, comes out bit for bit on a machine that has fetched nothing; a request with a wrong key is refused."""
import os
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

import dray
from dray import checkpoint

BIN = os.path.dirname(sys.executable)
KINDS = ("account", "container", "object")
SERVER = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = root
swift_dir = {top}
devices = {top}/devices
mount_check = false
log_level = ERROR
"""
PROXY = """[pipeline:main]
pipeline = catch_errors cache s3api tempauth copy slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:s3api]
use = egg:swift#s3api
location = us-test-1
""" + "".join(f"[filter:{name}]\nuse = egg:swift#{use}\n" for name, use in (
    ("catch_errors", "catch_errors"), ("cache", "memcache"), ("copy", "copy"), ("slo", "slo"), ("dlo", "dlo")))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def start(top, kind, port, rest):
    write(f"{top}/{kind}.conf", SERVER.format(top=top, port=port) + rest)
    server = subprocess.Popen([sys.executable, f"{BIN}/swift-{kind}-server", f"{top}/{kind}.conf"],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while True:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return server
        assert server.poll() is None and time.monotonic() < deadline, f"swift-{kind}-server does not listen"
        time.sleep(0.1)


def bucket(name):
    """By the signatures' own rules, as tests/store/s3.py has them: dray makes no buckets."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "store"))
    import datetime
    import hashlib
    import urllib.request

    import s3
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    host, payload = os.environ["AWS_ENDPOINT_URL"][7:], hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": payload, "x-amz-date": date}
    scope = f"{date[:8]}/us-test-1/s3/aws4_request"
    sign = s3.signature("testing", "PUT", f"/{name}", [], headers, sorted(headers), payload, date, scope)
    headers["authorization"] = (f"AWS4-HMAC-SHA256 Credential=test:tester/{scope},SignedHeaders={';'.join(sorted(headers))},"
                                f"Signature={sign}")
    urllib.request.urlopen(urllib.request.Request(f"http://{host}/{name}", method="PUT", headers=headers), timeout=60).close()


def main(top):
    os.makedirs(f"{top}/devices/d1")
    write(f"{top}/swift.conf", "[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n"
          "[storage-policy:0]\nname = p\ndefault = yes\n")
    ports = {kind: free_port() for kind in KINDS}
    for kind in KINDS:
        for words in (["create", "4", "1", "1"], ["add", f"r1z1-127.0.0.1:{ports[kind]}/d1", "1"], ["rebalance"]):
            subprocess.run([sys.executable, f"{BIN}/swift-ring-builder", f"{top}/{kind}.builder", *words],
                           stdout=subprocess.DEVNULL, check=True)
    servers = []
    try:
        for kind in KINDS:
            servers.append(start(top, kind, ports[kind], f"[pipeline:main]\npipeline = {kind}-server\n"
                                 f"[app:{kind}-server]\nuse = egg:swift#{kind}\n"))
        port = free_port()
        servers.append(start(top, "proxy", port, PROXY))
        os.environ.update(AWS_ACCESS_KEY_ID="test:tester", AWS_SECRET_ACCESS_KEY="testing", AWS_REGION="us-test-1",
                          AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
        bucket("models")
        chain(top)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(timeout=60)


def chain(top):
    folder, rng = "s3://models/runs/one", np.random.default_rng(1)
    tensors = {"wide": rng.standard_normal((5000, 1000)).astype(np.float32), "a name": np.arange(77.0)}
    for version in range(4):  # 20 MB: three parts, then deltas
        os.environ["DRAY_CACHE"] = f"{top}/writer"
        os.makedirs(f"{top}/writer", exist_ok=True)
        checkpoint.save(folder, version, tensors, deltas=3, keep=4)
        os.environ["DRAY_CACHE"] = tempfile.mkdtemp(dir=top)
        out = {name: np.zeros_like(value) for name, value in tensors.items()}
        found, path = checkpoint.latest(folder)
        checkpoint.load(path, out)
        assert found == version and all(np.array_equal(out[name], tensors[name]) for name in tensors), version
        tensors["wide"].reshape(-1)[rng.integers(0, tensors["wide"].size, 50_000)] += 1
    os.environ["AWS_SECRET_ACCESS_KEY"] = "another"
    try:
        checkpoint.latest(folder)
    except dray.DrayError as error:
        assert "SignatureDoesNotMatch" in str(error), error
    else:
        raise AssertionError("a wrong key was not refused")


with tempfile.TemporaryDirectory() as work:
    main(work)
print("a chain of 4 versions in Swift's bucket, bit for bit; a wrong key was refused")
