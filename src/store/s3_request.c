/* One request to an S3 server, signed by libcurl (AWS Signature Version 4), and repeated when that
 * may help. API: https://docs.aws.amazon.com/AmazonS3/latest/API/
 *
 * libcurl signs the path and the query as given, so they are encoded in the form that the signature
 * requires (unreserved characters unchanged, all others as %XX, names of the query sorted). */
#include "store/s3.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "store/curl.h"
#include "store/deadline.h"

#include <inttypes.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    TRIES = 6,
    URL_MAX = 8192,
    CONNECT_MS = 10000,
    SILENT_SECONDS = 20, /* a server that sends no byte for this time counts as gone */
    IDLE_HANDLES = 16
};

/* ---- settings in the environment ------------------------------------------------------------- */

typedef struct account {
    const char *key, *secret, *token, *region, *endpoint;
} account;

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static const char *endpoint(void)
{
    const char *own = variable("AWS_ENDPOINT_URL_S3");
    return own ? own : variable("AWS_ENDPOINT_URL");
}

/* Amazon's regions are one server: a bucket's name is given once for all of them. */
uint64_t dray__s3_server(void)
{
    const char *named = endpoint();
    return named ? dray__hash(named, strlen(named)) : 0;
}

static int read_account(const dray__s3_place *place, account *out, dray_error *error)
{
    *out = (account){variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY"),
                     variable("AWS_SESSION_TOKEN"), variable("AWS_REGION"), endpoint()};
    if (!out->region)
        out->region = variable("AWS_DEFAULT_REGION");
    if (!out->key || !out->secret)
        return dray__fail(error, DRAY_EPERM,
                          "s3://%s: expected the environment to have AWS_ACCESS_KEY_ID and "
                          "AWS_SECRET_ACCESS_KEY, found no %s",
                          place->bucket, out->key ? "AWS_SECRET_ACCESS_KEY" : "AWS_ACCESS_KEY_ID");
    if (!out->region && !out->endpoint)
        return dray__fail(
            error, DRAY_EINVALID,
            "s3://%s: expected AWS_REGION (the bucket's), or AWS_ENDPOINT_URL, in the "
            "environment, found neither",
            place->bucket);
    if (!out->region)
        out->region = "us-east-1";
    if (out->endpoint && strncmp(out->endpoint, "http://", 7) != 0 &&
        strncmp(out->endpoint, "https://", 8) != 0)
        return dray__fail(error, DRAY_EINVALID,
                          "AWS_ENDPOINT_URL: expected http://... or https://..., found '%.200s'",
                          out->endpoint);
    return DRAY_OK;
}

/* ---- addresses ------------------------------------------------------------------------------- */

typedef struct s3_address {
    char text[URL_MAX];
    size_t size;
    bool full;
} s3_address;

static void put(s3_address *l, const char *text, size_t size)
{
    l->full |= size >= sizeof l->text - l->size;
    if (l->full)
        return;
    memcpy(l->text + l->size, text, size);
    l->size += size;
    l->text[l->size] = 0;
}

static void put_text(s3_address *l, const char *text)
{
    put(l, text, strlen(text));
}

/* UriEncode of https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html */
static void put_encoded(s3_address *l, const char *text, bool slashes)
{
    for (; *text; text++) {
        char c = *text, hex[4];
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                     strchr("-._~", c) || (slashes && c == '/');
        if (!plain)
            snprintf(hex, sizeof hex, "%%%02X", (unsigned char)c);
        put(l, plain ? text : hex, plain ? 1 : 3);
    }
}

static int make_url(const dray__s3_request *r, const account *a, s3_address *url, dray_error *error)
{
    *url = (s3_address){0};
    if (a->endpoint) {
        size_t size = strlen(a->endpoint);
        while (size && a->endpoint[size - 1] == '/')
            size--;
        put(url, a->endpoint, size);
        put_text(url, "/");
        put_text(url, r->place->bucket);
    } else { /* a wildcard certificate covers only one label before the region's name */
        bool dots = strchr(r->place->bucket, '.') != NULL;
        put_text(url, "https://");
        put_text(url, dots ? "" : r->place->bucket);
        put_text(url, dots ? "s3." : ".s3.");
        put_text(url, a->region);
        put_text(url, ".amazonaws.com");
        put_text(url, dots ? "/" : "");
        put_text(url, dots ? r->place->bucket : "");
    }
    put_text(url, "/");
    put_encoded(url, r->place->key, true);
    for (size_t i = 0; i < DRAY__S3_QUERIES && r->query[i][0]; i++) {
        put_text(url, i ? "&" : "?");
        put_encoded(url, r->query[i][0], false);
        put_text(url, "=");
        put_encoded(url, r->query[i][1], false);
    }
    return url->full
               ? dray__fail(error, DRAY_EINVALID, "s3://%s/%.200s...: the address is too long",
                            r->place->bucket, r->place->key)
               : DRAY_OK;
}

/* ---- libcurl's handles, each with its connections -------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *idle[IDLE_HANDLES];
static unsigned idle_count;
static pid_t owner; /* a forked child does not use its parent's connections */

static void *take_handle(const dray__curl *curl)
{
    pthread_mutex_lock(&lock);
    if (owner != getpid())
        idle_count = 0;
    owner = getpid();
    void *handle = idle_count ? idle[--idle_count] : NULL;
    pthread_mutex_unlock(&lock);
    return handle ? handle : curl->easy_init();
}

static void give_handle(const dray__curl *curl, void *handle)
{
    curl->easy_reset(handle);
    pthread_mutex_lock(&lock);
    bool kept = owner == getpid() && idle_count < IDLE_HANDLES;
    if (kept)
        idle[idle_count++] = handle;
    pthread_mutex_unlock(&lock);
    if (!kept)
        curl->easy_cleanup(handle);
}

/* ---- one exchange ---------------------------------------------------------------------------- */

typedef struct exchange {
    dray__s3_request *request;
    size_t sent, capacity;
    long status;
    bool overrun, no_memory, shifted; /* shifted: the answer has another range */
    char problem[DRAY__CURL_ERROR_SIZE];
    /* code and message of a refusal in the answer */
    char code[64], message[200];
} exchange;

/* Receives data. All that is not the requested range is text: a small object, or an error. */
static size_t on_data(char *data, size_t one, size_t count, void *user)
{
    exchange *e = user;
    dray__s3_request *r = e->request;
    (void)one;
    if (r->into && e->status / 100 == 2) {
        e->overrun = count > r->range - r->size;
        if (e->overrun)
            return 0;
        memcpy((char *)r->into + r->size, data, count);
        r->size += count;
        return count;
    }
    size_t need = r->size + count + 1;
    if (need > DRAY__S3_TEXT_MAX) {
        e->overrun = true;
        return 0;
    }
    if (need > e->capacity) {
        size_t capacity = need * 2;
        char *grown = realloc(r->text, capacity);
        e->no_memory = !grown;
        if (!grown)
            return 0;
        r->text = grown;
        e->capacity = capacity;
    }
    memcpy(r->text + r->size, data, count);
    r->size += count;
    r->text[r->size] = 0;
    return count;
}

/* Gets the value of the header if it has this name. */
static bool header_is(const char *data, size_t size, const char *name, char *out, size_t room)
{
    size_t n = strlen(name);
    if (size <= n || strncasecmp(data, name, n) != 0 || data[n] != ':')
        return false;
    data += n + 1;
    size -= n + 1;
    while (size && (*data == ' ' || *data == '\t')) {
        data++;
        size--;
    }
    while (size && (data[size - 1] == '\r' || data[size - 1] == '\n' || data[size - 1] == ' '))
        size--;
    snprintf(out, room, "%.*s", (int)(size < room ? size : room), data);
    return true;
}

/* Compares the value of Content-Range, such as "bytes 0-99/200", with the requested range. */
static bool is_range(const dray__s3_request *r, const char *text)
{
    uint64_t from, last;
    return sscanf(text, "bytes %" SCNu64 "-%" SCNu64, &from, &last) == 2 && from == r->from &&
           last - from == r->range - 1;
}

static size_t on_header(char *data, size_t one, size_t count, void *user)
{
    exchange *e = user;
    char text[80];
    (void)one;
    if (count > 9 && strncmp(data, "HTTP/", 5) == 0) { /* begins each answer, also "100 Continue" */
        const char *space = memchr(data, ' ', count);
        char digits[4] = "";
        if (space && (size_t)(space - data) + 4 <= count)
            memcpy(digits, space + 1, 3);
        e->status = strtol(digits, NULL, 10);
        e->request->length = 0;
        e->request->answer_etag[0] = 0;
        e->shifted = false;
    } else if (header_is(data, count, "Content-Length", text, sizeof text))
        e->request->length = strtoull(text, NULL, 10);
    else if (header_is(data, count, "Content-Range", text, sizeof text))
        e->shifted = e->request->range && !is_range(e->request, text);
    else
        header_is(data, count, "ETag", e->request->answer_etag, sizeof e->request->answer_etag);
    return count;
}

static size_t on_send(char *data, size_t one, size_t count, void *user)
{
    exchange *e = user;
    size_t left = e->request->body_bytes - e->sent, n = one * count < left ? one * count : left;
    memcpy(data, (const char *)e->request->body + e->sent, n);
    e->sent += n;
    return n;
}

static int on_seek(void *user, int64_t offset, int origin)
{
    exchange *e = user;
    if (origin != SEEK_SET || offset < 0 || (uint64_t)offset > e->request->body_bytes)
        return 1;
    e->sent = (size_t)offset;
    return 0;
}

static bool is_given_up(const atomic_bool *stop)
{
    return (stop && atomic_load(stop)) || dray__store_is_late();
}

static int on_progress(void *user, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const exchange *e = user;
    (void)a, (void)b, (void)c, (void)d;
    return is_given_up(e->request->stop);
}

static bool body_sum(const dray__s3_request *r, char out[65])
{
    unsigned char sum[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    if (!EVP_Digest(r->body ? r->body : "", r->body_bytes, sum, &size, EVP_sha256(), NULL))
        return false;
    for (unsigned i = 0; i < size && i < 32; i++)
        snprintf(out + 2 * (size_t)i, 3, "%02x", sum[i]);
    return size == 32;
}

static bool add_header(const dray__curl *curl, dray__curl_list **list, const char *name,
                       const char *value)
{
    char *text = NULL;
    if (!value)
        return true;
    if (asprintf(&text, "%s: %s", name, value) < 0)
        return false;
    dray__curl_list *grown = curl->slist_append(*list, text);
    free(text);
    if (grown)
        *list = grown;
    return grown != NULL;
}

static void set_options(const dray__curl *curl, void *h, exchange *e, const account *a,
                        const char *url, const char *signing)
{
    const dray__s3_request *r = e->request;
    const char *silent = variable("DRAY_STORE_SECONDS");
    long seconds = silent ? strtol(silent, NULL, 10) : 0;
    curl->easy_setopt(h, DRAY__CURLOPT_URL, url);
    curl->easy_setopt(h, DRAY__CURLOPT_PATH_AS_IS, 1L);
    curl->easy_setopt(h, DRAY__CURLOPT_PROTOCOLS, (long)DRAY__CURLPROTO_HTTP_AND_HTTPS);
    curl->easy_setopt(h, DRAY__CURLOPT_NOSIGNAL, 1L);
    curl->easy_setopt(h, DRAY__CURLOPT_USERNAME, a->key);
    curl->easy_setopt(h, DRAY__CURLOPT_PASSWORD, a->secret);
    curl->easy_setopt(h, DRAY__CURLOPT_AWS_SIGV4, signing);
    curl->easy_setopt(h, DRAY__CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS);
    curl->easy_setopt(h, DRAY__CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl->easy_setopt(h, DRAY__CURLOPT_LOW_SPEED_TIME, seconds > 0 ? seconds : SILENT_SECONDS);
    curl->easy_setopt(h, DRAY__CURLOPT_ERRORBUFFER, e->problem);
    curl->easy_setopt(h, DRAY__CURLOPT_WRITEFUNCTION, on_data);
    curl->easy_setopt(h, DRAY__CURLOPT_WRITEDATA, e);
    curl->easy_setopt(h, DRAY__CURLOPT_HEADERFUNCTION, on_header);
    curl->easy_setopt(h, DRAY__CURLOPT_HEADERDATA, e);
    curl->easy_setopt(h, DRAY__CURLOPT_NOPROGRESS, 0L);
    curl->easy_setopt(h, DRAY__CURLOPT_XFERINFOFUNCTION, on_progress);
    curl->easy_setopt(h, DRAY__CURLOPT_XFERINFODATA, e);
    if (strcmp(r->method, "HEAD") == 0)
        curl->easy_setopt(h, DRAY__CURLOPT_NOBODY, 1L);
    else if (strcmp(r->method, "PUT") == 0) {
        curl->easy_setopt(h, DRAY__CURLOPT_UPLOAD, 1L);
        curl->easy_setopt(h, DRAY__CURLOPT_READFUNCTION, on_send);
        curl->easy_setopt(h, DRAY__CURLOPT_READDATA, e);
        curl->easy_setopt(h, DRAY__CURLOPT_SEEKFUNCTION, on_seek);
        curl->easy_setopt(h, DRAY__CURLOPT_SEEKDATA, e);
        curl->easy_setopt(h, DRAY__CURLOPT_INFILESIZE_LARGE, (int64_t)r->body_bytes);
    } else if (strcmp(r->method, "POST") == 0) {
        curl->easy_setopt(h, DRAY__CURLOPT_POST, 1L);
        curl->easy_setopt(h, DRAY__CURLOPT_POSTFIELDS, r->body ? r->body : "");
        curl->easy_setopt(h, DRAY__CURLOPT_POSTFIELDSIZE_LARGE, (int64_t)r->body_bytes);
    } else if (strcmp(r->method, "GET") != 0)
        curl->easy_setopt(h, DRAY__CURLOPT_CUSTOMREQUEST, r->method);
}

/* Does one exchange, and returns libcurl's code. */
static int exchange_once(const dray__curl *curl, exchange *e, const account *a, const char *url)
{
    dray__s3_request *r = e->request;
    char sum[65], signing[160], range[64];
    dray__curl_list *headers = NULL;
    snprintf(signing, sizeof signing, "aws:amz:%.100s:s3", a->region);
    snprintf(range, sizeof range, "%" PRIu64 "-%" PRIu64, r->from, r->from + r->range - 1);
    r->size = 0;
    if (r->text)
        r->text[0] = 0;
    *e = (exchange){.request = r, .capacity = e->capacity};
    void *h = take_handle(curl);
    bool ready = h && body_sum(r, sum) && add_header(curl, &headers, "x-amz-content-sha256", sum) &&
                 add_header(curl, &headers, "x-amz-security-token", a->token) &&
                 add_header(curl, &headers, "content-type", r->type) &&
                 add_header(curl, &headers, "if-match", r->etag);
    int code = DRAY__CURLE_OUT_OF_MEMORY;
    if (ready) {
        set_options(curl, h, e, a, url, signing);
        curl->easy_setopt(h, DRAY__CURLOPT_HTTPHEADER, headers);
        if (r->range)
            curl->easy_setopt(h, DRAY__CURLOPT_RANGE, range);
        code = curl->easy_perform(h);
    }
    if (h)
        give_handle(curl, h);
    curl->slist_free_all(headers);
    return code;
}

/* ---- results of a request -------------------------------------------------------------------- */

static void read_refusal(exchange *e)
{
    const dray__s3_request *r = e->request;
    if (e->status / 100 == 2 && !r->says) /* the body is not an error */
        return;
    const char *end = r->text ? r->text + r->size : NULL, *at = r->text;
    if (!r->text || !dray__s3_tag(&at, end, "Code", e->code, sizeof e->code))
        snprintf(e->code, sizeof e->code, "HTTP %ld", e->status);
    at = r->text;
    if (!r->text || !dray__s3_tag(&at, end, "Message", e->message, sizeof e->message))
        e->message[0] = 0;
}

static bool passes(const exchange *e, int code)
{
    static const long passing[] = {408, 429, 500, 502, 503, 504};
    if (code != DRAY__CURLE_OK)
        return code != DRAY__CURLE_OUT_OF_MEMORY && code != DRAY__CURLE_ABORTED_BY_CALLBACK &&
               !e->no_memory;
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++)
        if (e->status == passing[i])
            return true;
    return strcmp(e->code, "RequestTimeout") == 0 || strcmp(e->code, "InternalError") == 0 ||
           strcmp(e->code, "SlowDown") == 0;
}

/* Returns true for a successful answer with the requested range, and with the text that it must
 * have: a server may begin an answer before it knows whether it fails. */
static bool is_right(const exchange *e, int code)
{
    const dray__s3_request *r = e->request;
    return code == DRAY__CURLE_OK && e->status / 100 == 2 &&
           (!r->range || (r->size == r->range && (e->status == 206 || r->from == 0))) &&
           (!r->range || !e->shifted) && (!r->says || (r->text && strstr(r->text, r->says)));
}

/* Returns true for an answer of another object than the one that was asked for: by its status, or
 * by its ETag where the server does not heed If-Match. */
static bool is_other(const exchange *e, int code)
{
    const dray__s3_request *r = e->request;
    return code == DRAY__CURLE_OK &&
           (e->status == 412 || (e->status / 100 == 2 && r->etag && r->answer_etag[0] &&
                                 strcmp(r->answer_etag, r->etag) != 0));
}

static int refused(const exchange *e, int code, const char *problem, dray_error *error)
{
    const dray__s3_place *p = e->request->place;
    const char *why = e->message[0] ? e->message : "";
    if (code == DRAY__CURLE_ABORTED_BY_CALLBACK && dray__store_is_late())
        return dray__fail(error, DRAY_ETIMEDOUT, "s3://%s/%.200s: no whole answer by the deadline",
                          p->bucket, p->key);
    if (code == DRAY__CURLE_ABORTED_BY_CALLBACK)
        return dray__fail(error, DRAY_ECANCELED, "s3://%s/%.200s: given up", p->bucket, p->key);
    if (code == DRAY__CURLE_OUT_OF_MEMORY || e->no_memory)
        return dray__nomem(error);
    if (is_other(e, code))
        return dray__fail(error, DRAY_ESTALE, "s3://%s/%.300s: it was replaced while it was read",
                          p->bucket, p->key);
    if (code != DRAY__CURLE_OK || e->status / 100 == 2)
        return dray__fail(error, DRAY_ESYS, "s3://%s/%.200s: %s: %.120s, after %d tries", p->bucket,
                          p->key, e->request->method,
                          e->overrun               ? "more bytes than were asked for"
                          : e->code[0]             ? e->code
                          : code == DRAY__CURLE_OK ? "another range than was asked for"
                          : e->problem[0]          ? e->problem
                                                   : problem,
                          TRIES);
    if (strcmp(e->code, "NoSuchBucket") == 0)
        return dray__fail(error, DRAY_EINVALID,
                          "s3://%s: the server has no bucket of this name (%.80s)", p->bucket, why);
    if (e->status == 404)
        return dray__fail(error, DRAY_ENOENT, "s3://%s/%.300s: no such object", p->bucket, p->key);
    if (e->status == 301 || e->status == 307 || strcmp(e->code, "PermanentRedirect") == 0 ||
        strcmp(e->code, "AuthorizationHeaderMalformed") == 0)
        return dray__fail(error, DRAY_EPERM,
                          "s3://%s: %.60s: %.120s (is AWS_REGION the bucket's region, or "
                          "AWS_ENDPOINT_URL its server?)",
                          p->bucket, e->code, why);
    if (e->status == 401 || e->status == 403)
        return dray__fail(error, DRAY_EPERM,
                          "s3://%s/%.160s: %s was refused: %.60s%s%.120s (see AWS_ACCESS_KEY_ID, "
                          "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and what they may do)",
                          p->bucket, p->key, e->request->method, e->code, why[0] ? ": " : "", why);
    return dray__fail(error, DRAY_ESYS, "s3://%s/%.200s: %s: %ld %.60s%s%.120s", p->bucket, p->key,
                      e->request->method, e->status, e->code, why[0] ? ": " : "", why);
}

/* Waits before the next attempt: 50 ms at first, and then twice as long each time. */
static void pause_before(unsigned attempt, const atomic_bool *stop)
{
    int64_t until = dray__deadline((INT64_C(50) << attempt) * DRAY__MILLISECOND);
    while (dray__left(until) && !is_given_up(stop)) {
        struct timespec step = {.tv_nsec = 10 * DRAY__MILLISECOND};
        nanosleep(&step, NULL);
    }
}

int dray__s3_do(dray__s3_request *r, dray_error *error)
{
    const dray__curl *curl;
    account a;
    s3_address *url = malloc(sizeof *url);
    exchange e = {.request = r};
    int rc = url ? dray__curl_get(&curl, error) : dray__nomem(error), code = 0;
    if (rc && url)
        dray__fail_prefix(error, rc, "s3://%s: ", r->place->bucket);
    if (!rc)
        rc = read_account(r->place, &a, error);
    if (!rc)
        rc = make_url(r, &a, url, error);
    for (unsigned attempt = 0; !rc; attempt++) {
        code = exchange_once(curl, &e, &a, url->text);
        bool other = is_other(&e, code);
        if (!other && is_right(&e, code))
            break;
        read_refusal(&e);
        bool again = code != DRAY__CURLE_OK || e.status / 100 != 2 ? passes(&e, code) : !other;
        if (!again || attempt + 1 == TRIES)
            rc = refused(&e, code, curl->easy_strerror(code), error);
        else
            pause_before(attempt, r->stop);
    }
    free(url);
    if (rc) {
        free(r->text);
        r->text = NULL;
    }
    return rc;
}

/* ---- answers' text --------------------------------------------------------------------------- */

static const char *find(const char *at, const char *end, const char *what)
{
    return at && at < end ? memmem(at, (size_t)(end - at), what, strlen(what)) : NULL;
}

bool dray__s3_element(const char **at, const char *end, const char *tag, const char **from,
                      const char **to)
{
    char open[64], shut[64];
    snprintf(open, sizeof open, "<%.50s>", tag);
    snprintf(shut, sizeof shut, "</%.50s>", tag);
    const char *begin = find(*at, end, open);
    const char *last = begin ? find(begin + strlen(open), end, shut) : NULL;
    if (!last)
        return false;
    *from = begin + strlen(open);
    *to = last;
    *at = last + strlen(shut);
    return true;
}

static char decode(const char **at, const char *to)
{
    static const struct {
        const char *name;
        char is;
    } entities[] = {
        {"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}};
    for (size_t i = 0; i < sizeof entities / sizeof *entities; i++) {
        size_t n = strlen(entities[i].name);
        if ((size_t)(to - *at) >= n && memcmp(*at, entities[i].name, n) == 0) {
            *at += n;
            return entities[i].is;
        }
    }
    char *after;
    if (to - *at > 3 && (*at)[1] == '#') {
        bool hex = (*at)[2] == 'x';
        long value = strtol(*at + (hex ? 3 : 2), &after, hex ? 16 : 10);
        if (after < to && *after == ';' && value > 0 && value < 128) {
            *at = after + 1;
            return (char)value;
        }
    }
    return *(*at)++;
}

bool dray__s3_tag(const char **at, const char *end, const char *tag, char *out, size_t room)
{
    const char *from, *to;
    size_t n = 0;
    if (!dray__s3_element(at, end, tag, &from, &to))
        return false;
    while (from < to && n + 1 < room)
        out[n++] = decode(&from, to);
    out[n] = 0;
    return from == to;
}
