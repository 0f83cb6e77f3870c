/* The process that holds a claim for a shell, and its protocol with commands (queue_claim.h): each
 * request has a connection, with one JSON text in each direction, ended by closing. */
#include "cmd/queue/queue_claim.h"

#include "base/json.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* ---- JSON over a descriptor ------------------------------------------------------------------ */

static int write_json(int fd, json_t *object)
{
    char *text = json_dumps(object, JSON_COMPACT);
    size_t left = text ? strlen(text) : 0;
    const char *at = text;
    while (left) {
        ssize_t n = write(fd, at, left);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        at += n;
        left -= (size_t)n;
    }
    int failed = !text || left;
    free(text);
    return failed;
}

/* Reads up to the end of the stream. */
static json_t *read_json(int fd)
{
    FILE *file = fdopen(fd, "r"); /* closes fd */
    if (!file) {
        close(fd);
        return NULL;
    }
    json_t *object = json_loadf(file, 0, NULL);
    fclose(file);
    return object;
}

static json_t *error_json(const dray_error *error)
{
    return json_pack("{s:i, s:s}", "code", error->code, "error", error->message);
}

/* Turns an error in an answer into the caller's. */
static int error_of(json_t *answer, const char *whose, dray_error *error)
{
    json_t *code = json_object_get(answer, "code");
    if (!answer)
        return cmd_error(error, DRAY_ECLOSED, "%s: no answer", whose);
    if (!code)
        return DRAY_OK;
    return cmd_error(error, (int)json_integer_value(code), "%s",
                     dray__json_string(answer, "error"));
}

/* ---- the holder ------------------------------------------------------------------------------ */

typedef struct holder {
    dray_context *context;
    dray_queue *queue;
    dray_batch *batch;
    char path[108]; /* size of sun_path */
    int listening;
    bool over;
} holder;

static int holder_claim(holder *h, const cmd_claim_request *request, dray_error *error)
{
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = request->address;
    options.name = "dray queue claim";
    dray_queue_options attach = DRAY_QUEUE_OPTIONS_INIT;
    attach.timeout_ns = 2000000000;
    int rc = dray_open(&options, &h->context, error);
    if (rc == DRAY_OK)
        rc = dray_queue_open(h->context, request->queue, &attach, &h->queue, error);
    return rc ? rc : dray_queue_claim(h->queue, &request->claim, &h->batch, error);
}

static int holder_listen(holder *h, dray_error *error)
{
    const char *folder = getenv("XDG_RUNTIME_DIR");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(h->path, sizeof h->path, "%s/dray-claim-%d.socket",
                          folder && folder[0] == '/' ? folder : "/tmp", (int)getpid());
    if (length < 0 || (size_t)length >= sizeof h->path)
        return cmd_error(error, DRAY_EINVALID, "XDG_RUNTIME_DIR '%s' is too long for a socket",
                         folder);
    memcpy(address.sun_path, h->path, sizeof h->path);
    unlink(h->path);
    h->listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    mode_t mask = umask(0177); /* only this user may connect */
    int bad = h->listening < 0 ||
              bind(h->listening, (const struct sockaddr *)&address, sizeof address) ||
              listen(h->listening, 16);
    int why = errno;
    umask(mask);
    return bad ? cmd_error(error, DRAY_ESYS, "socket %s: %s", h->path, strerror(why)) : DRAY_OK;
}

static void stop_listening(holder *h)
{
    if (h->path[0])
        unlink(h->path);
    h->path[0] = 0;
}

static json_t *claim_json(const holder *h)
{
    json_t *rows = json_array();
    for (uint32_t i = 0; i < dray_batch_rows(h->batch); i++) {
        const dray_row *row = dray_batch_row(h->batch, i);
        json_array_append_new(
            rows, json_pack("{s:I, s:I, s:I, s:I, s:I, s:f}", "slot", (json_int_t)row->slot,
                            "generation", (json_int_t)row->generation, "attempt",
                            (json_int_t)row->attempt, "group", (json_int_t)row->group, "id",
                            (json_int_t)row->id, "weight", dray_batch_weight(h->batch, i)));
    }
    json_t *micros = json_array();
    for (uint32_t i = 0; i < dray_batch_micros(h->batch); i++) {
        uint32_t first, count = 0;
        dray_batch_micro(h->batch, i, &first, &count, NULL);
        json_array_append_new(micros, json_integer(count));
    }
    return json_pack("{s:s, s:s, s:o, s:o}", "claim", h->path, "partition",
                     dray_batch_partition(h->batch), "micro_batches", micros, "rows", rows);
}

/* Returns the names of the partition's columns, for a read of all of them. */
static json_t *all_columns(const holder *h, dray_error *error)
{
    char *text = NULL;
    if (dray_queue_status(h->queue, &text, error))
        return NULL;
    json_t *status = json_loads(text, 0, NULL), *names = json_array(), *partition, *value;
    dray_free(text);
    size_t i;
    const char *key;
    json_array_foreach(json_object_get(status, "partitions"), i, partition)
    {
        const char *name = dray__json_string(partition, "name");
        if (!name || strcmp(name, dray_batch_partition(h->batch)) != 0)
            continue;
        json_object_foreach(json_object_get(partition, "columns"), key, value)
            json_array_append_new(names, json_string(key));
    }
    json_decref(status);
    return names;
}

/* Adds a column to the objects of all rows. `asked` says that the user named it. */
static int add_column(const holder *h, const char *name, bool asked, json_t *rows,
                      dray_error *error)
{
    dray_column column;
    int rc = dray_batch_column(h->batch, name, &column, error);
    if (rc == DRAY_ENOENT && !asked) /* the task does not need this column */
        return DRAY_OK;
    for (uint32_t i = 0; i < dray_batch_rows(h->batch) && rc == DRAY_OK; i++)
        if (json_object_set_new(json_array_get(rows, i), name, cmd_cell_json(&column, i)))
            rc = cmd_error(error, DRAY_ENOMEM, "out of memory");
    return rc;
}

static int do_read(holder *h, json_t *request, json_t **out, dray_error *error)
{
    json_t *given = json_object_get(request, "columns"), *name;
    bool asked = json_array_size(given) > 0;
    json_t *names = asked ? json_incref(given) : all_columns(h, error), *rows = json_array();
    int rc = names ? DRAY_OK : DRAY_ECLOSED;
    for (uint32_t i = 0; i < dray_batch_rows(h->batch); i++)
        json_array_append_new(rows, json_object());
    size_t i;
    json_array_foreach(names, i, name) if (rc == DRAY_OK) rc =
        add_column(h, json_string_value(name), asked, rows, error);
    json_decref(names);
    if (rc)
        json_decref(rows);
    else
        *out = json_pack("{s:o}", "rows", rows);
    return rc;
}

static size_t read_dtypes(json_t *given, cmd_dtype *out, size_t most)
{
    const char *key;
    json_t *value;
    size_t count = 0;
    json_object_foreach(given, key, value)
    {
        if (count == most)
            break;
        snprintf(out[count].column, sizeof out[count].column, "%s", key);
        out[count++].dtype = dray_dtype_parse(json_string_value(value));
    }
    return count;
}

static int set_columns(holder *h, json_t *request, dray_error *error)
{
    json_t *rows = json_object_get(request, "rows");
    cmd_dtype dtypes[64];
    size_t dtype_count = read_dtypes(json_object_get(request, "dtypes"), dtypes, 64);
    cmd_types *types;
    cmd_columns columns = {0};
    if (json_array_size(rows) != dray_batch_rows(h->batch))
        return cmd_error(error, DRAY_EINVALID,
                         "%zu rows of output for a claim of %u: one line a row expected, in order",
                         json_array_size(rows), (unsigned)dray_batch_rows(h->batch));
    int rc = cmd_types_of(rows, dtypes, dtype_count, &types, error);
    if (rc)
        return rc;
    rc = cmd_columns_of(types, 0, json_array_size(rows), &columns, error);
    for (uint32_t i = 0; i < columns.count && rc == DRAY_OK; i++)
        rc = dray_batch_set(h->batch, &columns.items[i], error);
    cmd_columns_free(&columns);
    cmd_types_free(types);
    return rc;
}

static int set_tags(holder *h, json_t *tags, dray_error *error)
{
    const char *key;
    json_t *numbers, *number;
    int rc = DRAY_OK;
    json_object_foreach(tags, key, numbers)
    {
        size_t i;
        if (json_array_size(numbers) > dray_batch_rows(h->batch))
            return cmd_error(error, DRAY_EINVALID, "more tags than rows");
        json_array_foreach(numbers, i, number) if (rc == DRAY_OK) rc =
            dray_batch_set_tag(h->batch, (uint32_t)i, key, json_number_value(number), error);
    }
    return rc;
}

static int do_commit(holder *h, json_t *request, json_t **out, dray_error *error)
{
    int rc = json_object_get(request, "rows") ? set_columns(h, request, error) : DRAY_OK;
    if (rc == DRAY_OK)
        rc = set_tags(h, json_object_get(request, "tags"), error);
    if (rc == DRAY_OK && dray__json_true(request, "open"))
        rc = dray_batch_leave_open(h->batch, NULL, 0, error);
    if (rc == DRAY_OK)
        rc = dray_batch_commit(h->batch, error);
    if (rc && rc != DRAY_ESTALE && rc != DRAY_EGONE)
        return rc; /* the claim still exists, so the command may be repeated */
    h->over = true;
    if (rc == DRAY_OK)
        *out = json_pack("{s:I}", "committed", (json_int_t)dray_batch_rows(h->batch));
    return rc;
}

static int do_fail(holder *h, json_t *request, json_t **out, dray_error *error)
{
    const char *reason = dray__json_string(request, "reason");
    int rc = dray_batch_fail(h->batch, NULL, 0, reason ? reason : "", error);
    h->over = true;
    if (rc == DRAY_OK)
        *out = json_pack("{s:I}", "failed", (json_int_t)dray_batch_rows(h->batch));
    return rc;
}

static int do_release(holder *h, json_t *request, json_t **out, dray_error *error)
{
    (void)request, (void)error;
    h->over = true;
    *out = json_pack("{s:I}", "released", (json_int_t)dray_batch_rows(h->batch));
    return DRAY_OK;
}

static const struct verb {
    const char *name;
    int (*run)(holder *h, json_t *request, json_t **out, dray_error *error);
} verbs[] = {{"read", do_read}, {"commit", do_commit}, {"fail", do_fail}, {"release", do_release}};

static json_t *answer_to(holder *h, json_t *request)
{
    dray_error error = {0};
    json_t *answer = NULL;
    const char *what = dray__json_string(request, "do");
    int rc = cmd_error(&error, DRAY_EINVALID, "a claim cannot '%s'", what ? what : "?");
    for (size_t i = 0; what && i < sizeof verbs / sizeof verbs[0]; i++)
        if (strcmp(verbs[i].name, what) == 0)
            rc = verbs[i].run(h, request, &answer, &error);
    return rc ? error_json(&error) : answer;
}

static void serve_one(holder *h)
{
    int fd = accept4(h->listening, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return;
    struct timeval limit = {.tv_sec = 10}; /* for a client that stops in the middle of a request */
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    int reading = dup(fd);
    json_t *request = reading < 0 ? NULL : read_json(reading);
    json_t *answer = answer_to(h, request);
    if (h->over) /* done before the answer, so that later commands find no claim */
        stop_listening(h);
    write_json(fd, answer);
    json_decref(request);
    json_decref(answer);
    close(fd);
}

/* Returns whether the claim is gone. Called when the coordinator sent a message without a
 * request. */
static bool is_void(holder *h, int64_t left_ms)
{
    int rc = dray_batch_hold(h->batch, left_ms * 1000000, NULL);
    return rc && rc != DRAY_ETIMEDOUT && rc != DRAY_EFULL && rc != DRAY_ESYS;
}

static void holder_serve(holder *h, int64_t deadline)
{
    for (int64_t left; !h->over && (left = (deadline - cmd_now()) / 1000000) > 0;) {
        struct pollfd p[] = {{.fd = h->listening, .events = POLLIN},
                             {.fd = dray_queue_fd(h->queue), .events = POLLIN}};
        if (poll(p, 2, left < INT32_MAX ? (int)left : INT32_MAX) <= 0)
            continue;
        if (p[1].revents)
            h->over = is_void(h, left);
        if (p[0].revents && !h->over)
            serve_one(h);
    }
}

/* Leaves the shell's session and its terminal. */
static void detach(void)
{
    setsid();
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = 0; null >= 0 && fd < 3; fd++)
        dup2(null, fd);
}

static void hold(const cmd_claim_request *request, int tell)
{
    holder h = {.listening = -1};
    dray_error error = {0};
    signal(SIGPIPE, SIG_IGN); /* the client may be gone when the answer is ready */
    int rc = holder_claim(&h, request, &error);
    int64_t deadline = cmd_now() + request->claim.max_hold_ns;
    if (rc == DRAY_OK)
        rc = holder_listen(&h, &error);
    json_t *first = rc ? error_json(&error) : claim_json(&h);
    detach();
    int lost = write_json(tell, first);
    json_decref(first);
    close(tell);
    if (rc == DRAY_OK && !lost)
        holder_serve(&h, deadline);
    stop_listening(&h);
    dray_batch_free(h.batch);
    dray_queue_close(h.queue);
    dray_close(h.context);
}

/* ---- the commands' side ---------------------------------------------------------------------- */

int cmd_claim_start(const cmd_claim_request *request, json_t **out, dray_error *error)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC))
        return cmd_error(error, DRAY_ESYS, "a pipe to the claim's holder: %s", strerror(errno));
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        hold(request, ends[1]);
        _exit(0);
    }
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return cmd_error(error, DRAY_ESYS, "the claim's holder: %s", strerror(errno));
    }
    json_t *answer = read_json(ends[0]);
    int rc = error_of(answer, "the claim's holder", error);
    if (rc)
        json_decref(answer);
    else
        *out = answer;
    return rc;
}

int cmd_claim_ask(const char *path, json_t *request, json_t **out, dray_error *error)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!request)
        return cmd_error(error, DRAY_ENOMEM, "out of memory");
    if (strlen(path) >= sizeof address.sun_path) {
        json_decref(request);
        return cmd_error(error, DRAY_EINVALID, "claim '%s': not one that `claim` printed", path);
    }
    memcpy(address.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, sizeof address)) {
        int why = errno;
        if (fd >= 0)
            close(fd);
        json_decref(request);
        return cmd_error(error, DRAY_EGONE,
                         "claim %s: %s (it was committed, failed or released, or held too long)",
                         path, strerror(why));
    }
    write_json(fd, request);
    json_decref(request);
    shutdown(fd, SHUT_WR);
    json_t *answer = read_json(fd);
    int rc = error_of(answer, path, error);
    if (rc)
        json_decref(answer);
    else
        *out = answer;
    return rc;
}
