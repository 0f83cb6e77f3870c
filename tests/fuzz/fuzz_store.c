/* Answers of a server of object stores: what `latest`, a version's manifest and a list of objects
 * say. The first byte of an input says which of them the rest is: 0 `latest` as it is, 1 `latest`
 * with a sum of its own that is right, 2 the manifest's JSON (its sum is added), 3 a list. Behind
 * every other name there is an object of OBJECT bytes. What is read of it through a manifest that
 * fits it must be its bytes. */
#include "fuzz/fuzz.h"

#include "base/hash.h"
#include "store/s3.h"

#include <dray/checkpoint.h>
#include <dray/model.h>

#include <arpa/inet.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

enum { OBJECT = 100, HEAD_MAX = 8192 };

static struct server {
    pthread_mutex_t lock;
    int listener;
    unsigned run; /* of inputs: each has a prefix of its own, as manifests are kept */
    dray__writer latest, manifest, list;
    uint8_t object[OBJECT];
} s = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void fill(uint8_t object[OBJECT])
{
    for (size_t i = 0; i < OBJECT; i++)
        object[i] = (uint8_t)(i * 37 + 1);
}

/* ---- the server ------------------------------------------------------------------------------ */

static void send_all(int fd, const void *data, size_t size)
{
    for (ssize_t n; size; data = (const char *)data + n, size -= (size_t)n)
        if ((n = send(fd, data, size, MSG_NOSIGNAL)) <= 0)
            return;
}

static void answer(int fd, const char *status, const void *body, size_t size, bool head)
{
    char text[256];
    int n = snprintf(text, sizeof text,
                     "HTTP/1.1 %s\r\nETag: \"one\"\r\nContent-Length: %zu\r\n"
                     "Connection: close\r\n\r\n",
                     status, size);
    send_all(fd, text, (size_t)n);
    if (!head)
        send_all(fd, body, size);
}

/* A range of the object, with zeros behind its end. */
static void answer_range(int fd, uint64_t from, uint64_t to)
{
    uint64_t size = to - from + 1;
    uint8_t *body = size <= DRAY__S3_BLOCK ? calloc(1, (size_t)size) : NULL;
    if (body && from < OBJECT)
        memcpy(body, s.object + from,
               size < OBJECT - from ? (size_t)size : (size_t)(OBJECT - from));
    answer(fd, body ? "206 Partial Content" : "416 Range Not Satisfiable", body, body ? size : 0,
           false);
    free(body);
}

static void answer_one(int fd)
{
    char heard[HEAD_MAX + 1] = "", path[2048] = "", method[8] = "";
    unsigned long long from, to;
    size_t size = 0;
    for (ssize_t n; size < HEAD_MAX && !strstr(heard, "\r\n\r\n"); heard[size] = 0) {
        n = recv(fd, heard + size, HEAD_MAX - size, 0);
        if (n <= 0)
            return;
        size += (size_t)n;
    }
    if (sscanf(heard, "%7s %2047s", method, path) != 2)
        return;
    const char *name = strrchr(path, '/'), *range = strstr(heard, "ange: bytes=");
    const dray__writer *known = strstr(path, "list-type=2")          ? &s.list
                                : strcmp(name, "/latest") == 0       ? &s.latest
                                : strcmp(name, "/objects.json") == 0 ? &s.manifest
                                                                     : NULL;
    bool absent = strcmp(name, "/.partial") == 0 || (known && !known->data);
    if (absent)
        answer(fd, "404 Not Found", "", 0, strcmp(method, "HEAD") == 0);
    else if (known)
        answer(fd, "200 OK", known->data, known->size, strcmp(method, "HEAD") == 0);
    else if (range && sscanf(range, "ange: bytes=%llu-%llu", &from, &to) == 2 && to >= from)
        answer_range(fd, from, to);
    else
        answer(fd, "200 OK", s.object, OBJECT, strcmp(method, "HEAD") == 0);
}

static void *serve(void *user)
{
    (void)user;
    for (;;) {
        int fd = accept(s.listener, NULL, NULL);
        MUST(fd >= 0);
        pthread_mutex_lock(&s.lock);
        answer_one(fd);
        pthread_mutex_unlock(&s.lock);
        close(fd);
    }
    return NULL;
}

static void begin(void)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof name;
    char endpoint[64];
    pthread_t thread;
    fill(s.object);
    s.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(bind(s.listener, (const struct sockaddr *)&name, sizeof name) == 0);
    MUST(listen(s.listener, 16) == 0);
    MUST(getsockname(s.listener, (struct sockaddr *)&name, &size) == 0);
    snprintf(endpoint, sizeof endpoint, "http://127.0.0.1:%u", ntohs(name.sin_port));
    setenv("AWS_ENDPOINT_URL", endpoint, 1);
    setenv("AWS_ACCESS_KEY_ID", "key", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "secret", 1);
    setenv("DRAY_CACHE", fuzz_folder(), 1);
    setenv("DRAY_CACHE_BYTES", "0", 1);
    MUST(pthread_create(&thread, NULL, serve, NULL) == 0);
    pthread_detach(thread);
}

/* ---- the client ------------------------------------------------------------------------------ */

static void put_digits(dray__writer *w, uint64_t sum, const char *before)
{
    char text[32];
    int n = snprintf(text, sizeof text, "%s%016llx\n", before, (unsigned long long)sum);
    dray__put_bytes(w, text, (size_t)n);
}

static void set(int kind, const void *data, size_t size)
{
    pthread_mutex_lock(&s.lock);
    dray__writer_free(&s.latest);
    dray__writer_free(&s.manifest);
    dray__writer_free(&s.list);
    s.latest = s.manifest = s.list = (dray__writer){0};
    dray__writer *to = kind < 2 ? &s.latest : kind == 2 ? &s.manifest : &s.list;
    dray__put_bytes(to, data, size);
    if (kind == 1) {
        char *name = calloc(1, size + 1);
        MUST(name);
        memcpy(name, data, size);
        put_digits(&s.latest, dray__name_hash(name), " ");
        free(name);
    } else if (kind == 2) {
        put_digits(&s.manifest, dray__hash(data, size), "\n");
    }
    s.run++;
    pthread_mutex_unlock(&s.lock);
}

static void ask(void)
{
    char folder[64], step[96], *path = NULL;
    dray_layout *layout = NULL;
    dray_error error = {0};
    void *data = NULL;
    size_t bytes = 0;
    uint64_t version;
    snprintf(folder, sizeof folder, "s3://bucket/run-%u", s.run);
    snprintf(step, sizeof step, "%s/step-000007", folder);
    if (dray_checkpoint_latest(folder, &version, &path, &error) == DRAY_OK)
        MUST(strncmp(path, folder, strlen(folder)) == 0);
    dray_free(path);
    if (dray_checkpoint_get(step, "model.safetensors", &data, &bytes, &error) == DRAY_OK)
        MUST(bytes <= OBJECT && memcmp(data, s.object, bytes) == 0);
    dray_free(data);
    if (dray_layout_safetensors(step, &layout, &error) == DRAY_OK)
        dray_layout_free(layout);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool begun;
    char detail[128];
    if (!size || dray_store_find("s3", detail, sizeof detail, NULL) != DRAY_OK)
        return 0;
    if (!begun)
        begin();
    begun = true;
    set(data[0] % 4, data + 1, size - 1);
    ask();
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    uint8_t object[OBJECT];
    char manifest[512];
    fill(object);
    snprintf(manifest, sizeof manifest,
             "{\"version\":1,\"block\":4194304,\"objects\":{\"model.safetensors\":"
             "{\"bytes\":100,\"sums\":[\"%016llx\"]},\"config.json\":{\"bytes\":0,\"sums\":[]}}}",
             (unsigned long long)dray__hash(object, OBJECT));
    fuzz_put_text(put, user, 0, "step-000007 0123456789abcdef\n");
    fuzz_put_text(put, user, 1, "step-000007");
    fuzz_put_text(put, user, 1, "step-000007.2");
    fuzz_put_text(put, user, 2, manifest);
    fuzz_put_text(put, user, 2,
                  "{\"version\":1,\"block\":4194304,\"objects\":{\"model.safetensors\":"
                  "{\"bytes\":4194305,\"sums\":[\"00000000000000aa\",\"00000000000000ab\"]}}}");
    fuzz_put_text(put, user, 3,
                  "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run-1/"
                  "step-000007/model.safetensors</Key><LastModified>2026-11-27T10:58:31.000Z"
                  "</LastModified><Size>100</Size></Contents></ListBucketResult>");
    fuzz_put_text(put, user, 3,
                  "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>a&#38;b"
                  "</NextContinuationToken></ListBucketResult>");
}

const int fuzz_rounds = 150;
