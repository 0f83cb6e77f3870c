#include "queue/client/feed.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/io.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_NAME "feed.json"

/* A step of which some groups are trained. */
typedef struct feed_step {
    int64_t step;
    uint32_t *holds, count; /* groups by their places; NULL means all */
    bool *trained;          /* [prompts], by group */
} feed_step;

struct dray__feed {
    const dray_steps_rules *rules;
    int64_t first;
    feed_step *entries;
    uint32_t count;
    uint64_t room;
};

static uint32_t prompts_of(const dray__feed *self)
{
    return self->rules->rows / self->rules->group;
}

void dray__partition_name(const char *kind, int64_t step, char out[DRAY__PARTITION_BYTES])
{
    snprintf(out, DRAY__PARTITION_BYTES, "%.8s-%06lld", kind, (long long)step);
}

int64_t dray__partition_step(const char *kind, const char *name)
{
    size_t length = strlen(kind);
    if (strncmp(name, kind, length) != 0 || name[length] != '-')
        return -1;
    char *end;
    long long step = strtoll(name + length + 1, &end, 10);
    return *end || end == name + length + 1 || step < 0 ? -1 : step;
}

/* ---- reading --------------------------------------------------------------------------------- */

static feed_step *find(const dray__feed *self, int64_t step)
{
    for (uint32_t i = 0; i < self->count; i++)
        if (self->entries[i].step == step)
            return &self->entries[i];
    return NULL;
}

static int add(dray__feed *self, int64_t step, feed_step **out, dray_error *error)
{
    bool *trained = calloc(prompts_of(self), sizeof(*trained));
    *out = trained ? dray__append(&self->entries, sizeof **out, self->count, &self->room) : NULL;
    if (!*out) {
        free(trained);
        return dray__nomem(error);
    }
    self->count++;
    **out = (feed_step){.step = step, .trained = trained};
    return DRAY_OK;
}

static int bad(const char *what, dray_error *error)
{
    return dray__fail(error, DRAY_EFORMAT, "the groups that were trained: expected %s", what);
}

/* A list of groups: numbers below the job's prompts. */
static int read_group(const dray__feed *self, const json_t *list, size_t i, uint32_t *group,
                      dray_error *error)
{
    const json_t *one = json_array_get(list, i);
    json_int_t value = json_is_integer(one) ? json_integer_value(one) : -1;
    if (value < 0 || value >= (json_int_t)prompts_of(self))
        return bad("numbers of the step's prompts", error);
    *group = (uint32_t)value;
    return DRAY_OK;
}

static int read_entry(dray__feed *self, const json_t *object, dray_error *error)
{
    const json_t *holds = json_object_get(object, "holds"),
                 *trained = json_object_get(object, "trained");
    feed_step *e = NULL;
    uint32_t group = 0;
    int rc = add(self, json_integer_value(json_object_get(object, "step")), &e, error);
    if (!rc && json_is_array(holds) &&
        !(e->holds = malloc((json_array_size(holds) + 1) * sizeof(*e->holds))))
        rc = dray__nomem(error);
    for (size_t i = 0; !rc && e->holds && i < json_array_size(holds); i++) {
        rc = read_group(self, holds, i, &group, error);
        e->holds[e->count++] = group;
    }
    for (size_t i = 0; !rc && i < json_array_size(trained); i++) {
        rc = read_group(self, trained, i, &group, error);
        if (!rc)
            e->trained[group] = true;
    }
    return rc;
}

static int read_card(dray__feed *self, const json_t *card, dray_error *error)
{
    const json_t *first = json_object_get(card, "first"), *steps = json_object_get(card, "steps");
    if (!json_is_integer(first) || !json_is_array(steps))
        return bad("{\"first\": step, \"steps\": [...]}", error);
    self->first = json_integer_value(first);
    int rc = DRAY_OK;
    for (size_t i = 0; !rc && i < json_array_size(steps); i++)
        rc = read_entry(self, json_array_get(steps, i), error);
    return rc;
}

static int feed_new(const dray_steps_rules *rules, int64_t first_step, dray__feed **out,
                    dray_error *error)
{
    dray__feed *self = calloc(1, sizeof(*self));
    if (!self)
        return dray__nomem(error);
    self->rules = rules;
    self->first = first_step + 1;
    *out = self;
    return DRAY_OK;
}

int dray__feed_open(const dray_steps_rules *rules, const char *folder, int64_t first_step,
                    dray__feed **out, dray_error *error)
{
    char path[PATH_MAX];
    dray__feed *self = NULL;
    int rc = feed_new(rules, first_step, &self, error);
    if (rc)
        return rc;
    json_error_t problem;
    snprintf(path, sizeof(path), "%s/" FILE_NAME, folder ? folder : ".");
    errno = ENOENT;
    FILE *file = folder ? dray__open_stream(path, "r") : NULL;
    json_t *card = file ? json_loadf(file, 0, &problem) : NULL;
    if (card)
        rc = read_card(self, card, error);
    else if (file)
        rc = dray__fail(error, DRAY_EFORMAT, "%s:%d: %s", path, problem.line, problem.text);
    else if (errno != ENOENT)
        rc = dray__fail_errno(error, errno, "%s", path);
    json_decref(card);
    if (file)
        fclose(file);
    if (rc)
        dray__feed_close(self);
    else
        *out = self;
    return rc;
}

static void entry_free(feed_step *e)
{
    free(e->holds);
    free(e->trained);
}

void dray__feed_close(dray__feed *self)
{
    for (uint32_t i = 0; self && i < self->count; i++)
        entry_free(&self->entries[i]);
    if (self)
        free(self->entries);
    free(self);
}

int64_t dray__feed_first(const dray__feed *self)
{
    return self->first;
}

uint32_t dray__feed_groups(const dray__feed *self, int64_t step, const uint32_t **groups)
{
    const feed_step *e = find(self, step);
    *groups = e ? e->holds : NULL;
    return *groups ? e->count : prompts_of(self);
}

uint32_t dray__feed_group(const dray__feed *self, int64_t step, uint32_t at)
{
    const uint32_t *groups;
    return at < dray__feed_groups(self, step, &groups) && groups ? groups[at] : at;
}

/* ---- training -------------------------------------------------------------------------------- */

/* Returns true when all groups of the step are trained. */
static bool is_over(const dray__feed *self, const feed_step *e)
{
    uint32_t left = prompts_of(self);
    for (uint32_t i = 0; e && i < prompts_of(self); i++)
        left -= e->trained[i];
    return e && !left;
}

/* Forgets the first steps that are over, and further behind than the steps that are open at once.
 * One that is not over stays: a group may be generated again and again while later steps go by, and
 * more steps are open where one waits for samples of the newest version. */
static void forget(dray__feed *self, int64_t newest)
{
    int64_t first = self->first, most = newest - self->rules->open + 1;
    uint32_t kept = 0;
    while (first < most && is_over(self, find(self, first)))
        first++;
    if (first == self->first)
        return;
    self->first = first;
    for (uint32_t i = 0; i < self->count; i++) {
        if (self->entries[i].step < first)
            entry_free(&self->entries[i]);
        else
            self->entries[kept++] = self->entries[i];
    }
    self->count = kept;
}

int dray__feed_trained(dray__feed *self, int64_t step, uint32_t at, dray_error *error)
{
    forget(self, step);
    uint32_t group = dray__feed_group(self, step, at);
    feed_step *e = find(self, step);
    int rc = e ? DRAY_OK : add(self, step, &e, error);
    if (!rc && (group >= prompts_of(self) || e->trained[group]))
        rc = dray__fail(error, DRAY_EINTERNAL, "group %u of step %lld came to be trained twice",
                        group, (long long)step);
    if (!rc)
        e->trained[group] = true;
    return rc;
}

static json_t *entry_card(const dray__feed *self, const feed_step *e)
{
    json_t *holds = json_array(), *trained = json_array();
    for (uint32_t i = 0; e->holds && i < e->count; i++)
        json_array_append_new(holds, json_integer(e->holds[i]));
    for (uint32_t i = 0; i < prompts_of(self); i++)
        if (e->trained[i])
            json_array_append_new(trained, json_integer(i));
    json_t *card = json_pack("{s:I, s:o}", "step", (json_int_t)e->step, "trained", trained);
    if (e->holds)
        json_object_set(card, "holds", holds);
    json_decref(holds);
    return card;
}

json_t *dray__feed_card(const dray__feed *self)
{
    json_t *steps = json_array();
    for (uint32_t i = 0; i < self->count; i++)
        json_array_append_new(steps, entry_card(self, &self->entries[i]));
    return json_pack("{s:I, s:o}", "first", (json_int_t)self->first, "steps", steps);
}

/* ---- the beginning --------------------------------------------------------------------------- */

static bool in_queue(const json_t *state, int64_t step)
{
    const json_t *partition;
    size_t i;
    json_array_foreach(json_object_get(state, "partitions"), i, partition)
    {
        const char *name = json_string_value(json_object_get(partition, "name"));
        if (name && dray__partition_step(DRAY__PARTITION_STEP, name) == step)
            return true;
    }
    return false;
}

/* Leaves out the trained groups of a step that is not in the queue any more and is inserted
 * again. */
static int leave_out(const dray__feed *self, feed_step *e, dray_error *error)
{
    const uint32_t *groups;
    uint32_t had = dray__feed_groups(self, e->step, &groups), count = 0;
    uint32_t *left = malloc((had + 1) * sizeof(*left));
    if (!left)
        return dray__nomem(error);
    for (uint32_t i = 0; i < had; i++) {
        uint32_t group = groups ? groups[i] : i;
        if (!e->trained[group])
            left[count++] = group;
    }
    free(e->holds);
    e->holds = left;
    e->count = count;
    return DRAY_OK;
}

int dray__feed_begin(const dray_steps_rules *rules, const char *folder, const json_t *card,
                     const json_t *queue_state, dray_error *error)
{
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/" FILE_NAME, folder);
    if (!card)
        return unlink(path) == 0 || errno == ENOENT ? DRAY_OK
                                                    : dray__fail_errno(error, errno, "%s", path);
    dray__feed *self = NULL;
    int rc = feed_new(rules, 0, &self, error);
    if (rc)
        return rc;
    rc = read_card(self, card, error);
    for (uint32_t i = 0; i < self->count && !rc; i++)
        if (!in_queue(queue_state, self->entries[i].step))
            rc = leave_out(self, &self->entries[i], error);
    json_t *now = rc ? NULL : dray__feed_card(self);
    FILE *file = now ? dray__open_stream(path, "w") : NULL;
    bool written = file && json_dumpf(now, file, JSON_COMPACT) == 0;
    if (file && fclose(file))
        written = false;
    if (!rc && !written)
        rc = now ? dray__fail_errno(error, errno, "%s", path) : dray__nomem(error);
    json_decref(now);
    dray__feed_close(self);
    return rc;
}
