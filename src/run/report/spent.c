#include "run/report/spent.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "trace/account.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct dray__spent {
    char *folder;
    int64_t looked_ns;     /* the last look; 0 when there was none */
    json_t *roles, *named; /* sums at that time, in ns: {ROLE: {KEY: N}}, {NAME: N} */
};

/* The accounts of all processes that the run has had. */
typedef struct accounts {
    dray__accounted *items;
    uint32_t count;
} accounts;

int dray__spent_open(const char *folder, dray__spent **out, dray_error *error)
{
    dray__spent *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    self->roles = json_object();
    self->named = json_object();
    if (asprintf(&self->folder, "%s/trace", folder) < 0)
        self->folder = NULL;
    if (!self->roles || !self->named || !self->folder) {
        dray__spent_close(self);
        return dray__nomem(error);
    }
    *out = self;
    return DRAY_OK;
}

void dray__spent_close(dray__spent *self)
{
    if (!self)
        return;
    json_decref(self->roles);
    json_decref(self->named);
    free(self->folder);
    free(self);
}

void dray__spans_path(const char *folder, const char *label, uint32_t rank, uint32_t epoch,
                      char *out, size_t capacity)
{
    snprintf(out, capacity, "%s/trace/%s-%" PRIu32 "-%" PRIu32 ".spans", folder, label, rank,
             epoch);
}

/* ---- reading --------------------------------------------------------------------------------- */

static int is_spans(const struct dirent *entry)
{
    const char *end = strrchr(entry->d_name, '.');
    return end && strcmp(end, ".spans") == 0;
}

/* Compares by process, and then by the order in which one replaced the other. */
static int by_process(const void *a, const void *b)
{
    const dray__accounted *x = a, *y = b;
    int order = strcmp(x->label, y->label);
    return order ? order : (x->first_ns > y->first_ns) - (x->first_ns < y->first_ns);
}

static int read_all(const dray__spent *self, int64_t now, accounts *out, dray_error *error)
{
    struct dirent **entries = NULL;
    char path[PATH_MAX];
    int count = scandir(self->folder, &entries, is_spans, NULL);
    if (count < 0)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%s", self->folder);
    out->items = calloc((size_t)count + 1, sizeof(*out->items));
    for (int i = 0; i < count; i++) {
        snprintf(path, sizeof(path), "%s/%s", self->folder, entries[i]->d_name);
        if (out->items && dray__account_read(path, now, &out->items[out->count]))
            out->count++;
        free(entries[i]);
    }
    free(entries);
    if (!out->items)
        return dray__nomem(error);
    qsort(out->items, out->count, sizeof(*out->items), by_process);
    return DRAY_OK;
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void add(json_t *sums, const char *key, int64_t ns)
{
    json_int_t before = dray__json_integer(sums, key);
    if (ns > 0 || !json_object_get(sums, key))
        json_object_set_new(sums, key, json_integer(before + ns));
}

static void add_states(json_t *role, const dray__accounted *one)
{
    char key[32];
    add(role, "cpu", one->cpu_ns);
    add(role, "busy", one->state_ns[DRAY__STATE_BUSY]);
    add(role, "transfer", one->state_ns[DRAY__STATE_TRANSFER]);
    for (int cause = 0; cause < DRAY__WAIT_CAUSES; cause++) {
        snprintf(key, sizeof(key), "wait.%s", dray__cause_name((dray_wait_cause)cause));
        add(role, key, one->state_ns[DRAY__STATE_WAIT + cause]);
    }
}

/* "engine.2 0" is rank 0 of an instance of the role engine. */
static json_t *role_of(json_t *roles, const char *label)
{
    char name[64];
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(label, ". "), label);
    json_t *role = json_object_get(roles, name);
    if (role)
        return role;
    json_object_set_new(roles, name, json_object());
    return json_object_get(roles, name);
}

static bool leads(const dray__accounted *one)
{
    const char *rank = strrchr(one->label, ' ');
    return rank && strcmp(rank, " 0") == 0;
}

static const dray__accounted *same(const accounts *all, uint32_t i, uint32_t as)
{
    bool there = i < all->count && strcmp(all->items[i].label, all->items[as].label) == 0;
    return there ? &all->items[i] : NULL;
}

/* Adds the account of one process. One that died counts as waiting for its restart until its
 * successor has begun. */
static void add_one(const dray__spent *self, const accounts *all, uint32_t i, int64_t now,
                    json_t *roles, json_t *named)
{
    const dray__accounted *one = &all->items[i], *next = same(all, i + 1, i),
                          *before = i > 0 ? same(all, i - 1, i) : NULL;
    json_t *role = role_of(roles, one->label);
    bool replaced = next != NULL, came = self->looked_ns && one->first_ns > self->looked_ns;
    add_states(role, one);
    if (!replaced)
        add(role, "processes", 1);
    if (!before && came)
        add(role, "starting", one->first_ns - self->looked_ns);
    if (one->ended_ns)
        add(role, "wait.restart", (replaced ? next->first_ns : now) - one->ended_ns);
    for (uint32_t k = 0; leads(one) && k < one->named_count; k++)
        add(named, one->named[k].name, one->named[k].ns);
}

/* ---- differences of two looks
 * -------------------------------------------------------------------- */

static double since(const json_t *now, const json_t *before, const char *key)
{
    return (double)(dray__json_integer(now, key) - dray__json_integer(before, key)) /
           (double)DRAY__SECOND;
}

/* Corrects a wait that went on over a look. It was counted as a wait for samples at that look; if
 * it turns out at its end to have been one for admission, it is in both sums, and is subtracted
 * from admission. */
static void pay(json_t *waits, double debt)
{
    json_t *admission = json_object_get(waits, "admission");
    double seconds = json_real_value(admission);
    json_real_set(admission, seconds - (debt < seconds ? debt : seconds));
}

static json_t *role_since(json_t *now, const json_t *before)
{
    const char *key;
    json_t *value, *out = json_object(), *waits = json_object();
    double debt = 0;
    json_object_foreach(now, key, value)
    {
        bool wait = strncmp(key, "wait.", 5) == 0;
        double seconds = since(now, before, key);
        if (strcmp(key, "processes") == 0)
            json_object_set(out, key, value);
        else if (strcmp(key, "starting") == 0) /* not a running sum, but of this time alone */
            json_object_set_new(out, key, json_real(since(now, NULL, key)));
        else if (wait && seconds < 0)
            debt -= seconds;
        else if (!wait || seconds > 0)
            json_object_set_new(wait ? waits : out, wait ? key + 5 : key, json_real(seconds));
    }
    pay(waits, debt);
    json_object_set_new(out, "wait", waits);
    return out;
}

static int write_down(const dray__spent *self, json_t *roles, json_t *named, json_t *row,
                      dray_error *error)
{
    const char *key;
    json_t *value, *time = json_object(), *seconds = json_object();
    json_object_foreach(roles, key, value)
    {
        json_object_set_new(time, key, role_since(value, json_object_get(self->roles, key)));
    }
    json_object_foreach(named, key, value)
    {
        double spent = since(named, self->named, key);
        if (spent > 0)
            json_object_set_new(seconds, key, json_real(spent));
    }
    int rc = json_object_set_new(row, "time", time);
    rc |= json_object_set_new(row, "seconds", seconds);
    return rc ? dray__nomem(error) : DRAY_OK;
}

enum { TRIES = 8, QUICK_US = 500, FILE_US = 50 };

/* Reads all accounts. An account that changes between `now` and its reading has later time in it,
 * so all are read quickly, and again if it took too long. */
static int read_quickly(const dray__spent *self, accounts *all, int64_t *now, dray_error *error)
{
    int rc = DRAY_OK;
    for (int i = 0; i < TRIES && !rc; i++) {
        free(all->items);
        *all = (accounts){0};
        *now = dray__now();
        rc = read_all(self, *now, all, error);
        if (dray__now() - *now < (QUICK_US + FILE_US * (int64_t)all->count) * 1000)
            break;
    }
    return rc;
}

int dray__spent_look(dray__spent *self, json_t *row, int64_t *now_ns, dray_error *error)
{
    accounts all = {0};
    json_t *roles = json_object(), *named = json_object();
    int rc = read_quickly(self, &all, now_ns, error);
    for (uint32_t i = 0; i < all.count; i++)
        add_one(self, &all, i, *now_ns, roles, named);
    if (!rc && row)
        rc = write_down(self, roles, named, row, error);
    json_decref(self->roles);
    json_decref(self->named);
    self->roles = roles;
    self->named = named;
    self->looked_ns = *now_ns;
    free(all.items);
    return rc;
}
