/* Objects in Redis (backend.h). An object is cut into pieces, so that no value is large. Each piece
 * has a key of its own:
 *     dray:SPACE:OWNER:NUMBER:PIECE   (hexadecimal)
 * Of several servers, a piece is on the one with the highest hash of server and key (D. Thaler, C.
 * Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 6(1), 1998), so that
 * adding or removing a server moves only the keys of that server. */
#include "queue/storage/backend.h"

#ifdef DRAY_HIREDIS
#include "queue/storage/redis_link.h"

#include "base/arena.h"
#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PIECE (UINT64_C(1) << 20) /* bytes of a key's value */
#define SERVERS_MAX 64u
#define PASSWORD_MAX 1024u
#define SWEEP_BATCH "1000"

typedef struct redis {
    dray__backend backend;
    uint64_t space;
    char *password;
    dray__redis_link links[SERVERS_MAX];
    uint64_t hashes[SERVERS_MAX];
    uint32_t count;
} redis;

static void close_redis(dray__backend *backend)
{
    redis *self = (redis *)backend;
    if (!self)
        return;
    for (uint32_t i = 0; i < self->count; i++)
        dray__redis_link_free(&self->links[i]);
    if (self->password)
        explicit_bzero(self->password, strlen(self->password));
    free(self->password);
    free(self);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int read_password_file(const char *path, char **out, dray_error *error)
{
    char text[PASSWORD_MAX + 2];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    int errnum = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0)
        return dray__fail_errno(error, errnum, "the password of redis, in %s", path);
    text[n] = 0;
    text[strcspn(text, "\r\n")] = 0;
    if (!*text || strlen(text) > PASSWORD_MAX)
        return dray__fail(error, DRAY_EINVALID,
                          "the password of redis, in %s: one line of 1 to %u bytes expected", path,
                          PASSWORD_MAX);
    *out = strdup(text);
    explicit_bzero(text, sizeof text);
    return *out ? DRAY_OK : dray__nomem(error);
}

/* Reads the password from a file or the environment; command lines are visible to all users. */
static int find_password(char **out, dray_error *error)
{
    const char *path = getenv("DRAY_REDIS_PASSWORD_FILE"), *text = getenv("DRAY_REDIS_PASSWORD");
    if (path && *path)
        return read_password_file(path, out, error);
    if (!text || !*text)
        return DRAY_OK;
    if (strlen(text) > PASSWORD_MAX)
        return dray__fail(error, DRAY_EINVALID, "$DRAY_REDIS_PASSWORD: at most %u bytes",
                          PASSWORD_MAX);
    *out = strdup(text);
    return *out ? DRAY_OK : dray__nomem(error);
}

static int add_server(redis *self, const char *address, dray_error *error)
{
    if (self->count == SERVERS_MAX)
        return dray__fail(error, DRAY_EINVALID, "redis: at most %u servers", SERVERS_MAX);
    int rc = dray__redis_link_init(&self->links[self->count], address, self->password, error);
    if (!rc)
        self->hashes[self->count++] = dray__hash(address, strlen(address));
    return rc;
}

static int add_servers(redis *self, const char *addresses, dray_error *error)
{
    char *list = strdup(addresses ? addresses : ""), *rest = list, *address;
    if (!list)
        return dray__nomem(error);
    int rc = DRAY_OK;
    while (!rc && (address = strsep(&rest, ", ")))
        if (*address)
            rc = add_server(self, address, error);
    free(list);
    if (!rc && !self->count)
        rc = dray__fail(error, DRAY_EINVALID,
                        "backend redis: its address is missing (unix:/path or tcp:HOST:PORT, or "
                        "several, separated by commas)");
    return rc;
}

static int open_redis(const char *address, uint64_t space, dray__backend **out, dray_error *error)
{
    redis *self = calloc(1, sizeof *self);
    if (!self)
        return dray__nomem(error);
    self->backend.kind = &dray__backend_redis;
    self->space = space;
    int rc = find_password(&self->password, error);
    if (!rc)
        rc = add_servers(self, address, error);
    if (rc) {
        close_redis(&self->backend);
        return rc;
    }
    *out = &self->backend;
    return DRAY_OK;
}

/* ---- commands, by server --------------------------------------------------------------------- */

enum { KEY = 64 };

struct redis_work { /* commands for each server, in the order in which they were added */
    dray__redis_command *commands;
    uint32_t *servers; /* [command] */
    void **users;
    uint32_t count;
    uint64_t capacity[3]; /* of the three arrays */
};

static void plan_free(struct redis_work *plan)
{
    free(plan->commands);
    free(plan->servers);
    free(plan->users);
}

static uint32_t server_of(const redis *self, const char *key)
{
    uint64_t best = 0, name = dray__hash(key, strlen(key));
    uint32_t server = 0;
    for (uint32_t i = 0; i < self->count; i++) {
        uint64_t pair[2] = {self->hashes[i], name}, weight = dray__hash(pair, sizeof pair);
        if (weight >= best) {
            best = weight;
            server = i;
        }
    }
    return server;
}

static void key_of(const redis *self, uint64_t object, uint64_t piece, char out[KEY])
{
    snprintf(out, KEY, "dray:%016llx:%08x:%08x:%llx", (unsigned long long)self->space,
             (uint32_t)(object >> 32), (uint32_t)object, (unsigned long long)piece);
}

/* Adds a command for the server of the key. Returns NULL when out of memory. */
static dray__redis_command *add(redis *self, struct redis_work *plan, const char *key, void *user)
{
    if (!dray__append(&plan->commands, sizeof *plan->commands, plan->count, &plan->capacity[0]) ||
        !dray__append(&plan->servers, sizeof *plan->servers, plan->count, &plan->capacity[1]) ||
        !dray__append(&plan->users, sizeof *plan->users, plan->count, &plan->capacity[2]))
        return NULL;
    plan->servers[plan->count] = server_of(self, key);
    plan->users[plan->count] = user;
    return &plan->commands[plan->count++];
}

static int swap(struct redis_work *plan, uint32_t a, uint32_t b)
{
    dray__redis_command command = plan->commands[a];
    uint32_t server = plan->servers[a];
    void *user = plan->users[a];
    plan->commands[a] = plan->commands[b];
    plan->servers[a] = plan->servers[b];
    plan->users[a] = plan->users[b];
    plan->commands[b] = command;
    plan->servers[b] = server;
    plan->users[b] = user;
    return 0;
}

/* Runs the commands, one server after the other. */
static int run(redis *self, struct redis_work *plan, int64_t deadline, dray_error *error)
{
    uint32_t from = 0;
    for (uint32_t server = 0; server < self->count && from < plan->count; server++) {
        uint32_t to = from;
        for (uint32_t i = from; i < plan->count; i++)
            if (plan->servers[i] == server && to++ != i)
                swap(plan, to - 1, i);
        int rc = to == from ? DRAY_OK
                            : dray__redis_run(&self->links[server], plan->commands + from,
                                              to - from, deadline, error);
        if (rc)
            return rc;
        from = to;
    }
    return DRAY_OK;
}

/* ---- put, get, drop -------------------------------------------------------------------------- */

/* Adds bytes `from` to `to` of the parts, back to back, to the command. Returns false when they are
 * in too many parts. */
static bool add_bytes(dray__redis_command *command, const struct iovec *parts, uint32_t count,
                      uint64_t from, uint64_t to)
{
    static char end[] = "\r\n";
    uint64_t at = 0;
    for (uint32_t i = 0; i < count && at < to; at += parts[i++].iov_len) {
        uint64_t first = from > at ? from - at : 0;
        uint64_t last = to - at < parts[i].iov_len ? to - at : parts[i].iov_len;
        if (first >= last)
            continue;
        if (command->body_count + 1 == DRAY__REDIS_BODY)
            return false;
        command->body[command->body_count++] =
            (struct iovec){(char *)parts[i].iov_base + first, last - first};
    }
    command->body[command->body_count++] = (struct iovec){end, 2};
    return true;
}

static int put(dray__backend *backend, uint64_t object, const struct iovec *parts, uint32_t count,
               int64_t deadline, dray_error *error)
{
    redis *self = (redis *)backend;
    struct redis_work plan = {0};
    uint64_t size = 0;
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count; i++)
        size += parts[i].iov_len;
    for (uint64_t at = 0; !rc && at < size; at += PIECE) {
        uint64_t to = size - at < PIECE ? size : at + PIECE;
        char key[KEY];
        key_of(self, object, at / PIECE, key);
        dray__redis_command *command = add(self, &plan, key, NULL);
        if (!command) {
            rc = dray__nomem(error);
            break;
        }
        dray__redis_command_begin(command, (const char *const[]){"SET", key}, 2,
                                  (int64_t)(to - at));
        if (!add_bytes(command, parts, count, at, to))
            rc = dray__fail(error, DRAY_EINTERNAL, "redis: a value of more than %d parts",
                            DRAY__REDIS_BODY - 1);
    }
    if (!rc)
        rc = run(self, &plan, deadline, error);
    plan_free(&plan);
    return rc;
}

static int add_gets(redis *self, struct redis_work *plan, dray__range *range)
{
    uint8_t *to = range->at;
    uint64_t end = range->offset + range->bytes;
    for (uint64_t at = range->offset; at < end;) {
        uint64_t piece = at / PIECE, first = at % PIECE;
        uint64_t bytes = end - at < PIECE - first ? end - at : PIECE - first;
        char key[KEY], from[24], last[24];
        key_of(self, range->object, piece, key);
        snprintf(from, sizeof from, "%llu", (unsigned long long)first);
        snprintf(last, sizeof last, "%llu", (unsigned long long)(first + bytes - 1));
        dray__redis_command *command = add(self, plan, key, range);
        if (!command)
            return DRAY_ENOMEM;
        dray__redis_command_begin(command, (const char *const[]){"GETRANGE", key, from, last}, 4,
                                  -1);
        command->at = to;
        command->bytes = bytes;
        to += bytes;
        at += bytes;
    }
    return DRAY_OK;
}

static int get(dray__backend *backend, dray__range *ranges, uint32_t count, int64_t deadline,
               dray_error *error)
{
    redis *self = (redis *)backend;
    struct redis_work plan = {0};
    int rc = DRAY_OK;
    for (uint32_t i = 0; !rc && i < count; i++) {
        ranges[i].lost = false;
        rc = add_gets(self, &plan, &ranges[i]) ? dray__nomem(error) : DRAY_OK;
    }
    if (!rc)
        rc = run(self, &plan, deadline, error);
    for (uint32_t i = 0; !rc && i < plan.count; i++)
        ((dray__range *)plan.users[i])->lost |= plan.commands[i].lost;
    plan_free(&plan);
    return rc;
}

static int add_unlink(redis *self, struct redis_work *plan, const char *key, dray_error *error)
{
    dray__redis_command *command = add(self, plan, key, NULL);
    if (!command)
        return dray__nomem(error);
    dray__redis_command_begin(command, (const char *const[]){"UNLINK", key}, 2, -1);
    return DRAY_OK;
}

static int drop(dray__backend *backend, const dray__object *objects, uint32_t count,
                int64_t deadline, dray_error *error)
{
    redis *self = (redis *)backend;
    struct redis_work plan = {0};
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++)
        for (uint64_t piece = 0; piece * PIECE < objects[i].size && !rc; piece++) {
            char key[KEY];
            key_of(self, objects[i].id, piece, key);
            rc = add_unlink(self, &plan, key, error);
        }
    if (!rc)
        rc = run(self, &plan, deadline, error);
    plan_free(&plan);
    return rc;
}

/* ---- sweeping -------------------------------------------------------------------------------- */

static bool kept(const char *key, const uint64_t *keep, uint32_t count)
{
    unsigned long long space, piece;
    unsigned owner, number;
    if (sscanf(key, "dray:%16llx:%8x:%8x:%llx", &space, &owner, &number, &piece) != 4)
        return true; /* not a key of ours */
    uint64_t id = (uint64_t)owner << 32 | number;
    return count && bsearch(&id, keep, count, sizeof id, dray__by_u64);
}

/* Unlinks keys of one answer to SCAN. */
static int unlink_keys(redis *self, dray__redis_link *link, const redisReply *keys,
                       const uint64_t *keep, uint32_t keep_count, int64_t deadline,
                       dray_error *error)
{
    struct redis_work plan = {0};
    int rc = DRAY_OK;
    for (size_t i = 0; i < keys->elements && !rc; i++) {
        const char *key = keys->element[i]->type == REDIS_REPLY_STRING ? keys->element[i]->str : "";
        if (strlen(key) < KEY && !kept(key, keep, keep_count))
            rc = add_unlink(self, &plan, key, error);
    }
    if (!rc)
        rc = dray__redis_run(link, plan.commands, plan.count, deadline, error);
    plan_free(&plan);
    return rc;
}

static int sweep_server(redis *self, dray__redis_link *link, const char *pattern,
                        const uint64_t *keep, uint32_t count, int64_t deadline, dray_error *error)
{
    char cursor[24] = "0";
    do {
        dray__redis_command scan;
        dray__redis_command_begin(
            &scan, (const char *const[]){"SCAN", cursor, "MATCH", pattern, "COUNT", SWEEP_BATCH}, 6,
            -1);
        scan.keep = true;
        int rc = dray__redis_run(link, &scan, 1, deadline, error);
        if (rc) { /* bytes behind the answer may be wrong, too */
            freeReplyObject(scan.reply);
            return rc;
        }
        const redisReply *reply = scan.reply;
        if (reply->type != REDIS_REPLY_ARRAY || reply->elements != 2 ||
            reply->element[0]->type != REDIS_REPLY_STRING ||
            reply->element[1]->type != REDIS_REPLY_ARRAY)
            rc = dray__fail(error, DRAY_EPROTO, "redis: SCAN was answered with something else");
        if (!rc) {
            snprintf(cursor, sizeof cursor, "%s", reply->element[0]->str);
            rc = unlink_keys(self, link, reply->element[1], keep, count, deadline, error);
        }
        freeReplyObject(scan.reply);
        if (rc)
            return rc;
    } while (strcmp(cursor, "0") != 0);
    return DRAY_OK;
}

static int sweep(dray__backend *backend, uint32_t owner, const uint64_t *keep, uint32_t count,
                 int64_t deadline, dray_error *error)
{
    redis *self = (redis *)backend;
    char pattern[KEY];
    int at = snprintf(pattern, sizeof pattern, "dray:%016llx:", (unsigned long long)self->space);
    snprintf(pattern + at, sizeof pattern - (size_t)at, owner ? "%08x:*" : "*", owner);
    for (uint32_t i = 0; i < self->count; i++) {
        int rc = sweep_server(self, &self->links[i], pattern, keep, count, deadline, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

const dray__backend_kind dray__backend_redis = {.name = "redis",
                                                .open = open_redis,
                                                .close = close_redis,
                                                .put = put,
                                                .get = get,
                                                .drop = drop,
                                                .sweep = sweep};
#else
const dray__backend_kind dray__backend_redis = {.name = "redis", .missing = "hiredis"};
#endif
