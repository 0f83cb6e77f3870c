/* Publishers that wait until groups have committed a version. The wait withdraws no version. A
 * group's commit counts for all ranks that ask, even when the group has ended since. */
#include "weights/registry/state.h"

#include <dray/weights.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void delivered_free(struct delivered *delivered)
{
    free(delivered->group);
    free(delivered);
}

void dray__reg_delivered_free(struct trainer *trainer)
{
    for (struct delivered *next; trainer->delivered; trainer->delivered = next) {
        next = trainer->delivered->next;
        delivered_free(trainer->delivered);
    }
}

/* Forgets commits of versions that are older than all versions kept. */
static void forget_old(struct trainer *trainer)
{
    uint64_t oldest = 0;
    for (const struct version *v = trainer->versions; v; v = v->next)
        oldest = v->number;
    for (struct delivered **at = &trainer->delivered; *at;) {
        struct delivered *delivered = *at;
        if (delivered->version >= oldest) {
            at = &delivered->next;
            continue;
        }
        *at = delivered->next;
        delivered_free(delivered);
    }
}

/* Records the group's commit. Without memory it is found again while the group holds the version.
 */
static void note(struct trainer *trainer, const struct group *group)
{
    struct delivered *delivered = trainer->delivered;
    while (delivered && strcmp(delivered->group, group->name) != 0)
        delivered = delivered->next;
    if (delivered && delivered->version < group->now.version)
        delivered->version = group->now.version;
    if (delivered)
        return;
    delivered = calloc(1, sizeof *delivered);
    char *name = strdup(group->name);
    if (!delivered || !name) {
        free(delivered);
        free(name);
        return;
    }
    *delivered = (struct delivered){trainer->delivered, name, group->now.version};
    trainer->delivered = delivered;
}

void dray__reg_delivered(struct group *group)
{
    for (struct trainer *trainer = group->model->trainers; trainer; trainer = trainer->next)
        if (trainer->incarnation && trainer->incarnation == group->now.incarnation) {
            forget_old(trainer);
            note(trainer, group);
        }
}

static bool has(const struct trainer *trainer, const char *name, uint64_t number)
{
    const struct delivered *delivered = trainer->delivered;
    while (delivered && strcmp(delivered->group, name) != 0)
        delivered = delivered->next;
    return delivered && delivered->version >= number;
}

uint32_t dray__reg_arrived(const struct pending *d)
{
    struct trainer *trainer = d->entry->trainer;
    uint32_t count = 0;
    for (const struct group *group = trainer->model->groups; group; group = group->next)
        if (group->state == DRAY_GROUP_WHOLE && group->set.present == group->set.world &&
            trainer->incarnation && group->now.incarnation == trainer->incarnation)
            note(trainer, group); /* it registered with it after a restart */
    for (uint32_t i = 0; d->groups && i < d->count; i++)
        count += has(trainer, d->groups[i], d->number);
    for (const struct delivered *a = trainer->delivered; a && !d->groups; a = a->next)
        count += a->version >= d->number;
    return count;
}

/* ---- at the deadline ------------------------------------------------------------------------- */

/* "b (holds version 4)" */
static void add_missing(char *text, size_t capacity, const char *name, const struct group *group)
{
    char holds[96] = "not there";
    if (group && group->set.present < group->set.world)
        snprintf(holds, sizeof holds, "%" PRIu32 " of %" PRIu32 " ranks are there",
                 group->set.present, group->set.world);
    else if (group && group->state == DRAY_GROUP_WHOLE)
        snprintf(holds, sizeof holds, "holds version %" PRIu64 " of incarnation %" PRIu64,
                 group->now.version, group->now.incarnation);
    else if (group)
        snprintf(holds, sizeof holds, "%s",
                 group->state == DRAY_GROUP_TORN ? "is torn" : "holds none");
    size_t used = strlen(text);
    snprintf(text + used, capacity - used, "%s%.100s (%s)", used ? ", " : "missing: ", name, holds);
}

void dray__reg_missing(const struct pending *d, char *text, size_t capacity)
{
    const struct trainer *trainer = d->entry->trainer;
    const struct group *group;
    text[0] = 0;
    for (uint32_t i = 0; d->groups && i < d->count; i++) {
        for (group = trainer->model->groups; group && strcmp(group->name, d->groups[i]) != 0;)
            group = group->next;
        if (!has(trainer, d->groups[i], d->number))
            add_missing(text, capacity, d->groups[i], group);
    }
    for (group = trainer->model->groups; group && !d->groups; group = group->next)
        if (!has(trainer, group->name, d->number))
            add_missing(text, capacity, group->name, group);
    if (!text[0])
        snprintf(text, capacity, "no other group is open");
}
