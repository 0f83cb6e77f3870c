/* What `dray status` shows of the registry. */
#include "control/registry_state.h"

#include <dray/weights.h>

static json_t *publishers(const struct gang *gang)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < gang->set.world && gang->set.entries; i++) {
        const struct entry *entry = gang->set.entries[i];
        if (!entry)
            continue;
        json_array_append_new(
            list, json_pack("{s:I, s:s, s:I, s:I, s:I}", "rank", (json_int_t)i, "name", entry->name,
                            "member", (json_int_t)entry->member, "pid", (json_int_t)entry->pid,
                            "published", (json_int_t)entry->published));
    }
    return list;
}

static json_t *versions(const struct gang *gang)
{
    json_t *list = json_array();
    for (const struct version *v = gang->versions; v; v = v->next)
        json_array_append_new(
            list, json_pack("{s:I, s:I, s:b, s:b, s:I, s:I}", "version", (json_int_t)v->number,
                            "published", (json_int_t)v->published, "ready",
                            dray__reg_ready(gang, v), "withdrawn", v->withdrawn, "readers",
                            (json_int_t)v->readers, "dropped", (json_int_t)v->dropped));
    return list;
}

static json_t *gang_json(const struct gang *gang)
{
    return json_pack("{s:I, s:s, s:I, s:o, s:o}", "incarnation", (json_int_t)gang->incarnation,
                     "state",
                     gang->broken        ? "broken"
                     : gang->incarnation ? "whole"
                                         : "forming",
                     "world", (json_int_t)gang->set.world, "ranks", publishers(gang), "versions",
                     versions(gang));
}

static json_t *ranks(const struct group *group)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < group->set.world; i++) {
        const struct entry *entry = group->set.entries[i];
        if (!entry)
            continue;
        const char *doing = entry->begin.ticket ? "waits" : "idle";
        if (group->phase == ATTEMPT_MOVING)
            doing = entry->voted ? "voted" : entry->writing ? "writes" : "prepares";
        json_array_append_new(list,
                              json_pack("{s:I, s:s, s:I, s:I, s:s}", "rank", (json_int_t)i, "name",
                                        entry->name, "member", (json_int_t)entry->member, "pid",
                                        (json_int_t)entry->pid, "update", doing));
    }
    return list;
}

static json_t *group_json(const struct group *group)
{
    static const char *const states[] = {"empty", "whole", "torn"};
    json_t *report = group->report ? json_loads(group->report, 0, NULL) : NULL;
    return json_pack("{s:s, s:I, s:I, s:I, s:s, s:I, s:o, s:o}", "name", group->name, "world",
                     (json_int_t)group->set.world, "version", (json_int_t)group->version,
                     "incarnation", (json_int_t)group->incarnation, "state", states[group->state],
                     "epoch", (json_int_t)group->epoch, "ranks", ranks(group), "last_update",
                     report ? report : json_null());
}

void dray__registry_status(dray__registry *r, json_t *object)
{
    json_t *models = json_array();
    for (const struct model *model = r->models; model; model = model->next) {
        json_t *gangs = json_array(), *groups = json_array();
        for (const struct gang *gang = model->gangs; gang; gang = gang->next)
            json_array_append_new(gangs, gang_json(gang));
        for (const struct group *group = model->groups; group; group = group->next)
            json_array_append_new(groups, group_json(group));
        const struct gang *gang = NULL;
        const struct version *newest = dray__reg_latest(model, &gang);
        json_array_append_new(models,
                              json_pack("{s:s, s:I, s:I, s:o, s:o}", "name", model->name, "version",
                                        (json_int_t)(newest ? newest->number : 0), "incarnation",
                                        (json_int_t)(gang ? gang->incarnation : 0), "publishers",
                                        gangs, "groups", groups));
    }
    json_object_set_new(object, "models", models);
}
