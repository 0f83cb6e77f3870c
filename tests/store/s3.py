"""An S3 server for tests, on this machine alone: it verifies every request's signature (AWS Signature Version 4, from its
documentation, with hmac and hashlib: nothing of dray's or of libcurl's), and does what it is told to do wrong.

    with Server(keys={"KEY": "SECRET"}) as server:
        server.buckets["models"] = {}
        server.wrong(method="GET", key="model", do="truncate", times=1)

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html and the API's reference"""
import datetime
import hashlib
import hmac
import http.server
import itertools
import re
import socket
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape

PAGE = 3  # of a list: so that every list has several


class Refused(Exception):
    def __init__(self, status, code, message=""):
        super().__init__(code)
        self.status, self.code, self.message = status, code, message


def encode(text, slashes=False):
    return urllib.parse.quote(text, safe="-_.~" + ("/" if slashes else ""))


def signature(secret, method, path, query, headers, signed, payload, date, scope):
    """Of a request, in hexadecimal. query: (name, value) pairs; headers: with small names."""
    canonical = "\n".join([
        method, encode(urllib.parse.unquote(path), slashes=True),
        "&".join(f"{n}={v}" for n, v in sorted((encode(n), encode(v)) for n, v in query)),
        "".join(f"{name}:{' '.join(headers[name].split())}\n" for name in signed), ";".join(signed), payload])
    text = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + secret).encode()
    for word in scope.split("/"):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # ---- who asks ----

    def verify(self, body):
        server, headers = self.server.owner, {k.lower(): v for k, v in self.headers.items()}
        path, _, query = self.path.partition("?")
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
        if query != "&".join(f"{encode(n)}={encode(v)}" for n, v in sorted(pairs)):
            raise Refused(400, "InvalidQuery", "the query is not encoded and in order: " + query)
        match = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=([^/]+)/([^,]+), ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]+)",
                             headers.get("authorization", ""))
        if not match:
            raise Refused(403, "AccessDenied", "no signature")
        key, scope, signed, found = match[1], match[2], match[3].split(";"), match[4]
        if key not in server.keys:
            raise Refused(403, "InvalidAccessKeyId", "no such key")
        date = headers["x-amz-date"]
        day, region, service, end = scope.split("/")
        if (day, service, end) != (date[:8], "s3", "aws4_request"):
            raise Refused(403, "SignatureDoesNotMatch", "scope " + scope)
        if region != server.region:
            raise Refused(400, "AuthorizationHeaderMalformed", f"the region '{region}' is wrong; expecting '{server.region}'")
        then = datetime.datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.timezone.utc)
        if abs((datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()) > 900:
            raise Refused(403, "RequestTimeTooSkewed", date)
        if signed != sorted(signed) or not {"host", "x-amz-content-sha256", "x-amz-date"} <= set(signed):
            raise Refused(403, "AccessDenied", "signed headers: " + ";".join(signed))
        unsigned = [h for h in headers if h.startswith("x-amz-") and h not in signed]
        if unsigned:
            raise Refused(403, "AccessDenied", "headers not signed: " + ", ".join(unsigned))
        payload = headers["x-amz-content-sha256"]
        if payload != hashlib.sha256(body).hexdigest():
            raise Refused(400, "XAmzContentSHA256Mismatch", payload)
        secret, token = server.keys[key], server.tokens.get(key)
        wanted = signature(secret, self.command, path, pairs, headers, signed, payload, date, scope)
        if not hmac.compare_digest(wanted, found):
            raise Refused(403, "SignatureDoesNotMatch", "the signature does not match")
        if token and headers.get("x-amz-security-token") != token:
            raise Refused(403, "InvalidToken", "the token is another one")
        return urllib.parse.unquote(path), dict(pairs)

    # ---- answers ----

    def answer(self, status, body=b"", headers=None, kind="application/xml"):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if body:
            self.send_header("Content-Type", kind)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def xml(self, name, text, status=200):
        self.answer(status, f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{text}</{name}>'.encode())

    def cut(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def handle_one(self):
        server = self.server.owner
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.requests.append((self.command, self.path))
        try:
            path, query = self.verify(body)
            bucket, _, key = path.lstrip("/").partition("/")
            with server.lock:
                fault = server.fault_of(self.command, key, query)
            if callable(fault):
                fault = fault()
            if fault in ("503", "500"):
                raise Refused(int(fault), "SlowDown" if fault == "503" else "InternalError", "later")
            if fault == "cut":
                return self.cut()
            with server.lock:
                self.serve(bucket, key, query, body, fault)
        except Refused as refused:
            server.refused.append(refused.code)
            self.xml("Error", f"<Code>{refused.code}</Code><Message>{escape(refused.message)}</Message>", refused.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def serve(self, bucket, key, query, body, fault):
        server = self.server.owner
        if bucket not in server.buckets:
            raise Refused(404, "NoSuchBucket", "the bucket does not exist")
        objects = server.buckets[bucket]
        if "uploads" in query and self.command == "POST":
            server.last_upload += 1
            upload = f"id/{server.last_upload}+="  # it must be encoded
            server.uploads[upload] = (bucket, key, {})
            self.xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        elif "uploads" in query:
            self.list_uploads(bucket, query)
        elif "uploadId" in query:
            self.multipart(objects, bucket, key, query, body, fault)
        elif self.command == "PUT":
            objects[key] = server.object(body)
            server.history.setdefault(key, []).append(objects[key])
            self.answer(200, headers={"ETag": objects[key].etag})
        elif self.command == "DELETE":
            objects.pop(key, None)
            self.answer(204)
        elif not key:
            self.list_objects(server.old_list if fault == "stale" else objects, query)
        else:
            self.get(objects, key, fault)

    def get(self, objects, key, fault):
        server = self.server.owner
        history = server.history.get(key, [])
        if fault == "stale" and len(history) > 1:
            found = history[-2]
        elif key in objects:
            found = objects[key]
        else:
            raise Refused(404, "NoSuchKey", "the object does not exist")
        if self.headers.get("If-Match", found.etag) != found.etag and fault != "unmatched":
            raise Refused(412, "PreconditionFailed")
        data, status, headers = found.data, 200, {"ETag": found.etag}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match:
            begin, end = int(match[1]), min(int(match[2]) + 1, len(data))
            if fault == "shifted":  # another range of as many bytes
                begin, end = begin + 1 - 2 * (end == len(data)), end + 1 - 2 * (end == len(data))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            data, status = data[begin:end], 206
        server.sent += len(data) if self.command == "GET" else 0
        if fault == "wrong":
            data = data[:len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1:]
        if fault == "short":  # a whole answer, of fewer bytes than were asked for
            data = data[:len(data) // 2]
        headers["Content-Length"] = str(len(data))
        if fault == "drip":  # three bytes a second, until the client has left
            self.answer(status, b"", headers)
            for byte in itertools.cycle(data):
                self.wfile.write(bytes([byte]))
                time.sleep(0.3)
        if fault == "truncate":  # and the connection ends
            self.answer(status, data[:len(data) // 2], headers, "application/octet-stream")
            return self.cut()
        return self.answer(status, data, headers, "application/octet-stream")

    def list_objects(self, objects, query):
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        keys = sorted(k for k in objects if k.startswith(prefix) and k > after)
        if "delimiter" in query:
            keys = [k for k in keys if query["delimiter"] not in k[len(prefix):]]
        page = keys[:PAGE]
        text = "".join(f"<Contents><Key>{escape(k)}</Key><LastModified>{objects[k].made}</LastModified>"
                       f"<Size>{len(objects[k].data)}</Size></Contents>" for k in page)
        more = len(keys) > PAGE
        text += f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        self.xml("ListBucketResult", text + (f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""))

    def list_uploads(self, bucket, query):
        found = [(k, u) for u, (b, k, _) in self.server.owner.uploads.items() if b == bucket and k.startswith(query["prefix"])]
        after = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        found = sorted(f for f in found if f > after)
        page, more = found[:PAGE], len(found) > PAGE
        text = "".join(f"<Upload><Key>{escape(k)}</Key><UploadId>{u}</UploadId></Upload>" for k, u in page)
        text += f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        if more:
            text += f"<NextKeyMarker>{escape(page[-1][0])}</NextKeyMarker><NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
        self.xml("ListMultipartUploadsResult", text)

    def multipart(self, objects, bucket, key, query, body, fault):
        server, upload = self.server.owner, query["uploadId"]
        if server.uploads.get(upload, (None, None))[:2] != (bucket, key):
            raise Refused(404, "NoSuchUpload")
        parts = server.uploads[upload][2]
        if fault in ("InternalError", ""):  # as Amazon's server does it: the status came before the failure
            return self.xml("Error", f"<Code>{fault}</Code>" if fault else "<Message>?</Message>")
        if self.command == "PUT":
            parts[int(query["partNumber"])] = server.object(body)
            server.parts += 1
            self.answer(200, headers={"ETag": parts[int(query["partNumber"])].etag})
        elif self.command == "GET":
            after = int(query.get("part-number-marker", 0))
            left = sorted(n for n in parts if n > after)
            text = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(parts[n].etag)}</ETag>"
                           f"<Size>{len(parts[n].data)}</Size></Part>" for n in left[:PAGE])
            more = len(left) > PAGE
            text += f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
            self.xml("ListPartsResult", text + (f"<NextPartNumberMarker>{left[PAGE - 1]}</NextPartNumberMarker>" if more else ""))
        elif self.command == "DELETE":
            del server.uploads[upload]
            self.answer(204)
        else:
            said = [(int(n), e) for n, e in re.findall(r"<PartNumber>(\d+)</PartNumber><ETag>([^<]+)</ETag>", body.decode())]
            small = [n for n, _ in said[:-1] if len(parts[n].data) < 5 << 20]
            if [(n, p.etag) for n, p in sorted(parts.items())] != said:
                raise Refused(400, "InvalidPart", "not the parts that are there")
            if small:
                raise Refused(400, "EntityTooSmall", str(small))
            objects[key] = server.object(b"".join(parts[n].data for n, _ in said))
            del server.uploads[upload]
            self.xml("CompleteMultipartUploadResult", f"<ETag>{escape(objects[key].etag)}</ETag>")


class Object:
    def __init__(self, data, made):
        self.data, self.made, self.etag = data, made, '"' + hashlib.md5(data).hexdigest() + '"'


class Server:
    def __init__(self, keys, region="us-test-1", tokens=None):
        self.keys, self.region, self.tokens = keys, region, tokens or {}
        self.buckets, self.uploads, self.history, self.old_list = {}, {}, {}, {}
        self.requests, self.refused, self.faults = [], [], []
        self.last_upload = self.parts = self.sent = self.ticks = 0
        self.lock = threading.RLock()
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads, self.http.owner = True, self
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"

    def object(self, data):
        """Each is a second younger than the one before, whatever the clock does."""
        self.ticks += 1
        made = datetime.datetime(2026, 1, 1) + datetime.timedelta(seconds=self.ticks)
        return Object(data, made.strftime("%Y-%m-%dT%H:%M:%S.000Z"))

    def wrong(self, do, method="GET", key="", times=1, query=None):
        """The next `times` requests of this method for keys with `key` in them (and this name in the query) get the fault:
        503, 500, cut, drip, truncate, short, shifted, unmatched (If-Match is not seen), wrong, stale, InternalError or "" (with status
        200, in place of a completed upload), or what a function returns."""
        self.faults.append([method, key, query, do, times])

    def fault_of(self, method, key, query):
        for fault in self.faults:
            if fault[4] and fault[0] == method and fault[1] in key and (fault[2] is None or fault[2] in query):
                fault[4] -= 1
                return fault[3]
        return None

    def pending(self):
        """How many of the faults were not asked for."""
        return sum(fault[4] for fault in self.faults)

    def __enter__(self):
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()
