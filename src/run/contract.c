#include "run/contract.h"

#include "base/error.h"
#include "run/devices.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

extern char **environ;

char *dray__role_label(const dray__job_role *role, uint32_t instance, char out[DRAY__LABEL_BYTES])
{
    if (role->instances > 1)
        snprintf(out, DRAY__LABEL_BYTES, "%s.%u", role->name, instance);
    else
        snprintf(out, DRAY__LABEL_BYTES, "%s", role->name);
    return out;
}

static bool starts_with_one_of(const char *variable, const char *const *names)
{
    for (; *names; names++) {
        size_t length = strlen(*names);
        if (strncmp(variable, *names, length) == 0 && variable[length] == '=')
            return true;
    }
    return false;
}

bool dray__is_secret(const char *variable)
{
    static const char *const names[] = {"DRAY_TOKEN", "DRAY_TOKEN_FILE", "DRAY_REDIS_PASSWORD",
                                        "DRAY_REDIS_PASSWORD_FILE", NULL};
    return starts_with_one_of(variable, names);
}

static bool is_password(const char *variable)
{
    return strncmp(variable, "DRAY_REDIS_", 11) == 0;
}

/* The second half is what torchrun sets, so that torch.distributed.init_process_group() works as it
 * is (names: pytorch, torch/distributed/elastic/agent/server/local_elastic_agent.py). */
static const char *const names[] = {"DRAY_ADDRESS",
                                    "DRAY_RUN",
                                    "DRAY_CONFIG",
                                    "DRAY_QUEUE",
                                    "DRAY_TASK",
                                    "DRAY_ROLE",
                                    "DRAY_INSTANCE",
                                    "DRAY_EPOCH",
                                    "DRAY_STEP",
                                    "DRAY_EVAL_FROM",
                                    "DRAY_RANK",
                                    "DRAY_DEVICES",
                                    "DRAY_LEASES",
                                    "DRAY_GROUP_FD",
                                    "RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "LOCAL_WORLD_SIZE",
                                    "GROUP_RANK",
                                    "GROUP_WORLD_SIZE",
                                    "ROLE_NAME",
                                    "ROLE_RANK",
                                    "ROLE_WORLD_SIZE",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "TORCHELASTIC_RUN_ID",
                                    "TORCHELASTIC_RESTART_COUNT",
                                    "TORCHELASTIC_MAX_RESTARTS",
                                    "TORCHELASTIC_USE_AGENT_STORE",
                                    NULL};

bool dray__contract_sets(const char *variable)
{
    return starts_with_one_of(variable, names);
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct list {
    char **items;
    size_t count, capacity;
    bool failed;
} list;

static void add_text(list *l, char *text)
{
    if (l->count + 1 >= l->capacity && text) {
        size_t capacity = 2 * l->capacity + 64;
        char **grown = realloc(l->items, capacity * sizeof(*grown));
        if (grown) {
            l->items = grown;
            l->capacity = capacity;
        }
    }
    if (!text || l->count + 1 >= l->capacity) {
        free(text);
        l->failed = true;
        return;
    }
    l->items[l->count++] = text;
    l->items[l->count] = NULL;
}

static void add(list *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(list *l, const char *format, ...)
{
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) < 0)
        text = NULL;
    va_end(arguments);
    add_text(l, text);
}

void dray__environment_free(char **environment)
{
    for (char **at = environment; at && *at; at++)
        free(*at);
    free(environment);
}

static bool given(const dray__job_role *role, const char *variable)
{
    size_t length = strcspn(variable, "=") + 1;
    for (uint32_t i = 0; i < role->env_count; i++)
        if (strncmp(role->env[i], variable, length) == 0)
            return true;
    return false;
}

static void inherit(list *l, const dray__job_role *role, bool redis)
{
    for (char **at = environ; *at; at++)
        if ((!dray__is_secret(*at) || (redis && is_password(*at))) && !dray__contract_sets(*at) &&
            !given(role, *at))
            add(l, "%s", *at);
    for (uint32_t i = 0; i < role->env_count; i++)
        add(l, "%s", role->env[i]);
}

static void add_tasks(list *l, const dray__job_role *role)
{
    char text[1024] = "";
    for (uint32_t i = 0; i < role->task_count; i++) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof(text) - used, "%s%s", i ? "," : "", role->tasks[i]);
    }
    add(l, "DRAY_TASK=%s", text);
}

static void add_own(list *l, const dray__orders *o)
{
    add(l, "DRAY_ADDRESS=%s", o->address);
    add(l, "DRAY_RUN=%s", o->folder);
    add(l, "DRAY_CONFIG=%s", o->config);
    add(l, "DRAY_QUEUE=%s", DRAY__QUEUE_NAME);
    add_tasks(l, o->role);
    add(l, "DRAY_ROLE=%s", o->role->name);
    add(l, "DRAY_INSTANCE=%u", o->instance);
    add(l, "DRAY_EPOCH=%u", o->epoch);
    add(l, "DRAY_STEP=%lld", (long long)o->first_step);
    add(l, "DRAY_RANK=%u", o->rank);
    add(l, "DRAY_EVAL_FROM=%lld", (long long)o->eval_from);
    if (o->role->devices[0])
        add(l, "DRAY_DEVICES=%s", o->role->devices);
    if (o->leases[0])
        add(l, "DRAY_LEASES=%s", o->leases);
    if (o->group_fd >= 0)
        add(l, "DRAY_GROUP_FD=%d", o->group_fd);
}

static void add_visible(list *l, const dray__orders *o)
{
    char visible[8 * DRAY__DEVICES_MAX];
    size_t used = 0;
    dray__devices own;
    if (dray__devices_read(o->role->devices, o->instance, (uint32_t)o->role->instances, &own,
                           NULL) ||
        strcmp(own.kind, "cuda") != 0)
        return;
    for (uint32_t i = 0; i < own.count; i++)
        used += (size_t)snprintf(visible + used, sizeof(visible) - used, "%s%u", i ? "," : "",
                                 own.numbers[i]);
    add(l, "CUDA_VISIBLE_DEVICES=%s", visible);
}

/* One gang on one host: its ranks are local ones, and it is the only group. */
static void add_torch(list *l, const dray__orders *o)
{
    unsigned ranks = (unsigned)o->role->ranks;
    char label[DRAY__LABEL_BYTES];
    add(l, "RANK=%u", o->rank);
    add(l, "WORLD_SIZE=%u", ranks);
    add(l, "LOCAL_RANK=%u", o->rank);
    add(l, "LOCAL_WORLD_SIZE=%u", ranks);
    add(l, "GROUP_RANK=0");
    add(l, "GROUP_WORLD_SIZE=1");
    add(l, "ROLE_NAME=%s", o->role->name);
    add(l, "ROLE_RANK=%u", o->rank);
    add(l, "ROLE_WORLD_SIZE=%u", ranks);
    add(l, "MASTER_ADDR=127.0.0.1");
    add(l, "MASTER_PORT=%u", o->port);
    add(l, "TORCHELASTIC_RUN_ID=%s/%s", o->job, dray__role_label(o->role, o->instance, label));
    add(l, "TORCHELASTIC_RESTART_COUNT=%u", o->epoch - 1);
    add(l, "TORCHELASTIC_MAX_RESTARTS=%u", o->restarts);
    add(l, "TORCHELASTIC_USE_AGENT_STORE=False"); /* rank 0 makes the store */
    /* As torchrun does: ranks of one host would take each other's cores. */
    if (ranks > 1 && !getenv("OMP_NUM_THREADS") && !given(o->role, "OMP_NUM_THREADS="))
        add(l, "OMP_NUM_THREADS=1");
    add_visible(l, o);
}

char **dray__contract_write(const dray__orders *orders)
{
    list l = {0};
    inherit(&l, orders->role, orders->redis && orders->role->task_count);
    add_own(&l, orders);
    add_torch(&l, orders);
    if (!l.failed)
        return l.items;
    dray__environment_free(l.items);
    return NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

static int read_text(const char *name, const char **out, dray_error *error)
{
    *out = getenv(name);
    return *out && **out ? DRAY_OK
                         : dray__fail(error, DRAY_EINVALID,
                                      "$%s is not set: `dray run` starts this program", name);
}

/* Not set: *out stays as it is. */
static int read_number(const char *name, int64_t low, int64_t high, int64_t *out, dray_error *error)
{
    const char *text = getenv(name);
    char *end = NULL;
    if (!text)
        return DRAY_OK;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < low || value > high)
        return dray__fail(error, DRAY_EINVALID, "$%s: expected %lld to %lld, found '%.40s'", name,
                          (long long)low, (long long)high, text);
    *out = value;
    return DRAY_OK;
}

int dray__contract_read(dray__host_options *out, dray_error *error)
{
    int64_t rank = 0, epoch = 1, instance = 0, step = 0, eval = 0, group = -1;
    int rc = read_text("DRAY_ADDRESS", &out->address, error);
    if (!rc)
        rc = read_text("DRAY_RUN", &out->folder, error);
    if (!rc)
        rc = read_text("DRAY_ROLE", &out->name, error);
    if (!rc)
        rc = read_number("DRAY_RANK", 0, 63, &rank, error);
    if (!rc)
        rc = read_number("DRAY_INSTANCE", 0, 1023, &instance, error);
    if (!rc)
        rc = read_number("DRAY_EPOCH", 1, UINT32_MAX, &epoch, error);
    if (!rc)
        rc = read_number("DRAY_STEP", 0, INT64_C(1) << 40, &step, error);
    if (!rc)
        rc = read_number("DRAY_EVAL_FROM", 0, INT64_C(1) << 40, &eval, error);
    if (!rc)
        rc = read_number("DRAY_GROUP_FD", -1, 1 << 20, &group, error);
    out->leases = getenv("DRAY_LEASES");
    out->rank = (uint32_t)rank;
    out->instance = (uint32_t)instance;
    out->epoch = (uint32_t)epoch;
    out->first_step = step;
    out->group_fd = (int)group;
    out->eval_from = eval;
    return rc;
}

/* ---- ports ----------------------------------------------------------------------------------- */

uint16_t dray__free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && bind(fd, (struct sockaddr *)&at, size) == 0 &&
              getsockname(fd, (struct sockaddr *)&at, &size) == 0;
    if (fd >= 0)
        close(fd);
    return ok ? ntohs(at.sin_port) : 0;
}
