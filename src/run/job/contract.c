#include "run/job/contract.h"

#include "base/arena.h"
#include "base/error.h"
#include "run/job/devices.h"
#include "run/job/tasks.h"

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

/* Returns whether the name of the variable ("NAME=...") is in `names`, which have blanks between
 * them. */
static bool is_one_of(const char *variable, const char *names)
{
    size_t length = strcspn(variable, "=");
    for (; *names; names += strcspn(names, " "), names += strspn(names, " "))
        if (strcspn(names, " ") == length && strncmp(variable, names, length) == 0)
            return variable[length] == '=';
    return false;
}

bool dray__is_secret(const char *variable)
{
    return is_one_of(variable, "DRAY_TOKEN DRAY_TOKEN_FILE DRAY_REDIS_PASSWORD "
                               "DRAY_REDIS_PASSWORD_FILE");
}

static bool is_password(const char *variable)
{
    return strncmp(variable, "DRAY_REDIS_", 11) == 0;
}

/* The second half are the variables of torchrun, so that torch.distributed.init_process_group()
 * works unchanged (names: pytorch,
 * torch/distributed/elastic/agent/server/local_elastic_agent.py). */
static const char names[] =
    "DRAY_ADDRESS DRAY_RUN DRAY_CONFIG DRAY_QUEUE DRAY_TASK DRAY_ROLE DRAY_INSTANCE DRAY_EPOCH "
    "DRAY_STEP DRAY_EVAL_FROM DRAY_RANK DRAY_DEVICES DRAY_LEASES DRAY_GROUP_FD RANK WORLD_SIZE "
    "LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT "
    "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE";

bool dray__contract_sets(const char *variable)
{
    return is_one_of(variable, names);
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct list {
    char **items; /* NULL at the end */
    uint64_t count, capacity;
    bool failed;
} list;

static __attribute__((format(printf, 2, 3))) void add(list *l, const char *format, ...)
{
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    bool whole = vasprintf(&text, format, arguments) >= 0 &&
                 dray__append(&l->items, sizeof(*l->items), l->count + 1, &l->capacity);
    va_end(arguments);
    l->failed = l->failed || !whole;
    if (!whole) {
        free(text);
        return;
    }
    l->items[l->count++] = text;
    l->items[l->count] = NULL;
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

static const char visible_name[] = "CUDA_VISIBLE_DEVICES=";

/* Gets the GPUs of the orders' process. Returns false when they are not the contract's to choose.
 */
static bool gpus_of(const dray__orders *o, dray__devices *own)
{
    return !given(o->role, visible_name) &&
           dray__devices_read(o->role->devices, o->instance, (uint32_t)o->role->instances, own,
                              NULL) == DRAY_OK &&
           strcmp(own->kind, "cuda") == 0;
}

static void inherit(list *l, const dray__orders *o)
{
    const dray__job_role *role = o->role;
    dray__devices own;
    bool redis = o->redis && role->task_count, gpus = gpus_of(o, &own);
    for (char **at = environ; *at; at++)
        if ((!dray__is_secret(*at) || (redis && is_password(*at))) && !dray__contract_sets(*at) &&
            !given(role, *at) &&
            !(gpus && strncmp(*at, visible_name, sizeof(visible_name) - 1) == 0))
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
    if (o->token_file)
        add(l, "DRAY_TOKEN_FILE=%s", o->token_file);
}

/* Returns the name of a GPU of this process, whose own $CUDA_VISIBLE_DEVICES says which ones have
 * the numbers 0, 1, ... here: a part of that text, or NULL when the number is the name. */
static const char *name_of_gpu(uint32_t number, int *length)
{
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    for (uint32_t i = 0; at && i < number; i++)
        at = (at = strchr(at, ',')) ? at + 1 : NULL;
    *length = at ? (int)strcspn(at, ",") : 0;
    return *length ? at : NULL;
}

static void add_visible(list *l, const dray__orders *o)
{
    char *text = NULL;
    size_t size;
    dray__devices own;
    if (!gpus_of(o, &own))
        return;
    FILE *out = open_memstream(&text, &size);
    for (uint32_t i = 0; out && i < own.count; i++) {
        int length;
        const char *name = name_of_gpu(own.numbers[i], &length);
        fputs(i ? "," : "", out);
        if (name)
            fprintf(out, "%.*s", length, name);
        else
            fprintf(out, "%u", own.numbers[i]);
    }
    l->failed = !out || fclose(out) || l->failed;
    if (!l->failed)
        add(l, "%s%s", visible_name, text);
    free(text);
}

/* Adds torchrun's variables. All ranks of the instance are one worker group; local ranks are
 * counted from the host's first rank. */
static void add_torch(list *l, const dray__orders *o)
{
    unsigned ranks = (unsigned)o->role->ranks;
    char label[DRAY__LABEL_BYTES];
    add(l, "RANK=%u", o->rank);
    add(l, "WORLD_SIZE=%u", ranks);
    add(l, "LOCAL_RANK=%u", o->rank - o->first);
    add(l, "LOCAL_WORLD_SIZE=%u", o->here);
    add(l, "GROUP_RANK=0");
    add(l, "GROUP_WORLD_SIZE=1");
    add(l, "ROLE_NAME=%s", o->role->name);
    add(l, "ROLE_RANK=%u", o->rank);
    add(l, "ROLE_WORLD_SIZE=%u", ranks);
    add(l, "MASTER_ADDR=%s", o->master ? o->master : "127.0.0.1");
    add(l, "MASTER_PORT=%u", o->port);
    add(l, "TORCHELASTIC_RUN_ID=%s/%s", o->job, dray__role_label(o->role, o->instance, label));
    add(l, "TORCHELASTIC_RESTART_COUNT=%u", o->epoch - 1);
    add(l, "TORCHELASTIC_MAX_RESTARTS=%u", o->restarts);
    add(l, "TORCHELASTIC_USE_AGENT_STORE=False"); /* rank 0 makes the store */
    /* As torchrun does, because ranks of one host would compete for cores. */
    if (ranks > 1 && !getenv("OMP_NUM_THREADS") && !given(o->role, "OMP_NUM_THREADS="))
        add(l, "OMP_NUM_THREADS=1");
    add_visible(l, o);
}

char **dray__contract_write(const dray__orders *orders)
{
    list l = {0};
    inherit(&l, orders);
    add_own(&l, orders);
    add_torch(&l, orders);
    if (!l.failed)
        return l.items;
    dray__environment_free(l.items);
    return NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

int dray__contract_read(dray__host_options *out, dray_error *error)
{
    const struct {
        const char *name, **to;
    } texts[] = {
        {"DRAY_ADDRESS", &out->address}, {"DRAY_RUN", &out->folder}, {"DRAY_ROLE", &out->name}};
    enum { RANK, INSTANCE, EPOCH, STEP, EVAL_FROM, GROUP_FD, NUMBERS };
    static const struct {
        const char *name;
        int64_t low, high, unset;
    } numbers[NUMBERS] = {{"DRAY_RANK", 0, 63, 0},
                          {"DRAY_INSTANCE", 0, 1023, 0},
                          {"DRAY_EPOCH", 1, UINT32_MAX, 1},
                          {"DRAY_STEP", 0, INT64_C(1) << 40, 0},
                          {"DRAY_EVAL_FROM", 0, INT64_C(1) << 40, 0},
                          {"DRAY_GROUP_FD", -1, 1 << 20, -1}};
    int64_t values[NUMBERS];
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        *texts[i].to = getenv(texts[i].name);
        if (!*texts[i].to || !**texts[i].to)
            return dray__fail(error, DRAY_EINVALID,
                              "$%s is not set: `dray run` starts this program", texts[i].name);
    }
    for (int i = 0; i < NUMBERS; i++) {
        const char *text = getenv(numbers[i].name);
        char *end = NULL;
        errno = 0;
        values[i] = text ? strtoll(text, &end, 10) : numbers[i].unset;
        if (text && (errno || end == text || *end || values[i] < numbers[i].low ||
                     values[i] > numbers[i].high))
            return dray__fail(error, DRAY_EINVALID, "$%s: expected %lld to %lld, found '%.40s'",
                              numbers[i].name, (long long)numbers[i].low,
                              (long long)numbers[i].high, text);
    }
    out->leases = getenv("DRAY_LEASES");
    out->rank = (uint32_t)values[RANK];
    out->instance = (uint32_t)values[INSTANCE];
    out->epoch = (uint32_t)values[EPOCH];
    out->first_step = values[STEP];
    out->eval_from = values[EVAL_FROM];
    out->group_fd = (int)values[GROUP_FD];
    return DRAY_OK;
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
