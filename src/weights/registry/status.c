/* The registry in `dray status`: flat lists, a table each. */
#include "weights/registry/state.h"

#include <dray/weights.h>

static void add(json_t *list, json_t *row)
{
    if (row)
        json_array_append_new(list, row);
}

static void add_publishers(json_t *list, const struct trainer *trainer)
{
    const char *state = trainer->broken ? "broken" : trainer->incarnation ? "whole" : "forming";
    for (uint32_t i = 0; i < trainer->set.world && trainer->set.entries; i++) {
        const struct registrant *entry = trainer->set.entries[i];
        if (entry)
            add(list,
                json_pack("{s:s, s:I, s:s, s:I, s:I, s:s, s:I, s:o}", "model", trainer->model->name,
                          "incarnation", (json_int_t)trainer->incarnation, "state", state, "rank",
                          (json_int_t)i, "world", (json_int_t)trainer->set.world, "name",
                          entry->name, "member", (json_int_t)entry->member, "published",
                          entry->has_published ? json_integer((json_int_t)entry->published)
                                               : json_null()));
    }
}

static void add_versions(json_t *list, const struct trainer *trainer)
{
    for (const struct version *v = trainer->versions; v; v = v->next)
        add(list, json_pack("{s:s, s:I, s:I, s:I, s:b, s:b, s:I, s:I}", "model",
                            trainer->model->name, "incarnation", (json_int_t)trainer->incarnation,
                            "version", (json_int_t)v->number, "ranks", (json_int_t)v->published,
                            "ready", dray__reg_ready(trainer, v), "withdrawn", v->withdrawn,
                            "readers", (json_int_t)v->readers, "dropped", (json_int_t)v->dropped));
}

/* Returns a figure of the last update's report; null before the first update. */
static json_t *figure(const json_t *report, const char *key)
{
    json_t *value = json_object_get(report, key);
    return value ? json_incref(value) : json_null();
}

static json_t *group_row(const struct group *group)
{
    static const char *const states[] = {"empty", "whole", "torn"};
    json_t *report = group->report ? json_loads(group->report, 0, NULL) : NULL;
    json_t *row = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:s, s:b, s:b, s:o, s:I, s:I, s:o, s:o, s:o, s:o, s:o}",
        "model", group->model->name, "name", group->name, "ranks", (json_int_t)group->set.present,
        "world", (json_int_t)group->set.world, "version", (json_int_t)group->now.version,
        "incarnation", (json_int_t)group->now.incarnation, "state", states[group->state], "serving",
        dray__reg_serving(group), "leaving", group->leaving, "staged",
        group->has_staged ? json_integer((json_int_t)group->staged.version) : json_null(),
        "readers", (json_int_t)group->readers, "epoch", (json_int_t)group->epoch, "mode",
        figure(report, "mode"), "strategy", figure(report, "strategy"), "update_bytes",
        figure(report, "bytes"), "update_seconds", figure(report, "total_seconds"), "pause_seconds",
        figure(report, "pause_seconds"));
    json_decref(report);
    return row;
}

static void add_subscribers(json_t *list, const struct group *group)
{
    for (uint32_t i = 0; i < group->set.world; i++) {
        const struct registrant *entry = group->set.entries[i];
        if (!entry)
            continue;
        const char *doing = entry->begin.ticket ? "waits" : "idle";
        if (group->phase == ATTEMPT_MOVING)
            doing = entry->voted ? "voted" : entry->writing ? "writes" : "prepares";
        add(list, json_pack("{s:s, s:s, s:I, s:s, s:I, s:s}", "model", group->model->name, "group",
                            group->name, "rank", (json_int_t)i, "name", entry->name, "member",
                            (json_int_t)entry->member, "update", doing));
    }
}

void dray__registry_status(dray__registry *r, json_t *object)
{
    json_t *publishers = json_array(), *versions = json_array();
    json_t *groups = json_array(), *subscribers = json_array();
    for (const struct model *model = r->models; model; model = model->next) {
        for (const struct trainer *trainer = model->trainers; trainer; trainer = trainer->next) {
            add_publishers(publishers, trainer);
            add_versions(versions, trainer);
        }
        for (const struct group *group = model->groups; group; group = group->next) {
            add(groups, group_row(group));
            add_subscribers(subscribers, group);
        }
    }
    json_object_set_new(object, "publishers", publishers);
    json_object_set_new(object, "versions", versions);
    json_object_set_new(object, "groups", groups);
    json_object_set_new(object, "subscribers", subscribers);
}
