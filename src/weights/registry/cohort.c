/* Cohorts: the subscriber groups that read the same version at the same time, from other hosts or
 * out of pinned memory into GPUs. Their ranks divide the bytes that several of them need, and read
 * them from each other. */
#include "base/clock.h"
#include "weights/registry/state.h"

#include <dray/weights.h>
#include <stdlib.h>
#include <string.h>

/* Engines that join together begin within this time of each other. */
#define GATHER_NS (20 * DRAY__MILLISECOND)

static void cohort_free(struct cohort *cohort)
{
    free(cohort->set.entries);
    free(cohort);
}

void dray__reg_cohort_leave(struct model *model, const struct registrant *entry)
{
    for (struct cohort **at = &model->cohorts; *at;) {
        struct cohort *cohort = *at;
        bool in = false;
        for (uint32_t i = 0; i < cohort->set.world; i++)
            in |= cohort->set.entries[i] == entry;
        if (!in) {
            at = &cohort->next;
            continue;
        }
        *at = cohort->next;
        cohort_free(cohort);
    }
}

bool dray__reg_set_taken(const struct model *model, uint64_t id)
{
    bool taken = dray__reg_cohort_set(model, id) != NULL;
    for (const struct trainer *trainer = model->trainers; trainer; trainer = trainer->next)
        taken |= trainer->set.id == id;
    for (const struct group *group = model->groups; group; group = group->next)
        taken |= group->set.id == id;
    return taken;
}

const struct set *dray__reg_cohort_set(const struct model *model, uint64_t id)
{
    for (const struct cohort *cohort = model->cohorts; cohort; cohort = cohort->next)
        if (cohort->set.id == id)
            return &cohort->set;
    return NULL;
}

bool dray__reg_all_began(const struct group *group)
{
    if (group->phase != ATTEMPT_NONE || group->set.present < group->set.world)
        return false;
    for (uint32_t i = 0; i < group->set.world; i++)
        if (!group->set.entries[i]->begin.ticket)
            return false;
    return true;
}

/* May the group begin soon? It is complete, not busy, and lacks this version. */
static bool may_come(const struct group *group, const struct group *first)
{
    bool there = group->state == DRAY_GROUP_WHOLE && group->now.version == first->goal.version &&
                 group->now.incarnation == first->goal.incarnation;
    return !group->leaving && group->phase == ATTEMPT_NONE &&
           group->set.present == group->set.world && !there && !dray__reg_all_began(group);
}

bool dray__reg_cohort_waits(dray__registry *r, struct group *group)
{
    if (group->gathered)
        return false;
    bool others = false;
    for (const struct group *other = group->model->groups; other; other = other->next)
        others |= other != group && may_come(other, group);
    if (others && !group->gathering) {
        group->gathering = true;
        r->ops.expire_at(r->ops.user, group->set.entries[0]->begin.ticket,
                         dray__deadline(GATHER_NS));
    }
    return others;
}

bool dray__reg_cohort_gathered(dray__registry *r, struct registrant *entry)
{
    struct group *group = entry->group;
    if (!group->gathering || group->gathered || dray__now() >= entry->begin.deadline_ns)
        return false;
    group->gathered = true;
    r->ops.expire_at(r->ops.user, entry->begin.ticket, entry->begin.deadline_ns);
    return true;
}

static bool same_members(const struct set *a, struct registrant *const *entries, uint32_t count)
{
    return a->world == count &&
           memcmp(a->entries, entries, count * sizeof(struct registrant *)) == 0;
}

const struct set *dray__reg_cohort_make(dray__registry *r, struct model *model,
                                        struct group *const *groups, uint32_t count)
{
    uint32_t members = 0;
    for (uint32_t i = 0; i < count; i++)
        members += groups[i]->set.world;
    if (members < 2 || members > DRAY__COHORT_MAX)
        return NULL;
    struct registrant **entries = calloc(members, sizeof *entries);
    struct cohort *cohort = calloc(1, sizeof *cohort);
    if (!entries || !cohort) { /* each group reads for itself */
        free(entries);
        free(cohort);
        return NULL;
    }
    uint32_t at = 0;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t k = 0; k < groups[i]->set.world; k++)
            entries[at++] = groups[i]->set.entries[k];
    for (struct cohort *known = model->cohorts; known; known = known->next)
        if (same_members(&known->set, entries, members)) {
            free(entries);
            free(cohort);
            return &known->set;
        }
    cohort->set =
        (struct set){.id = r->next_id++, .world = members, .present = members, .entries = entries};
    cohort->next = model->cohorts;
    model->cohorts = cohort;
    return &cohort->set;
}
