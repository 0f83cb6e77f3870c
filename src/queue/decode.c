/* Reading requests into an arena. Malformed input sticks to the reader; so does a lack of memory.
 */
#include "base/error.h"
#include "queue/internal.h"

#include <dray/queue.h>
#include <stdlib.h>

/* Takes the text over. */
static const char *in_arena(dray__reader *r, dray__arena *arena, char *text)
{
    const char *copy = text ? dray__arena_text(arena, text) : NULL;
    r->failed |= !copy;
    free(text);
    return copy;
}

const char *dray__get_line(dray__reader *r, dray__arena *arena)
{
    return in_arena(r, arena, dray__get_string(r, 4096));
}

const char *dray__get_lines(dray__reader *r, dray__arena *arena)
{
    return in_arena(r, arena, dray__get_prose(r, 4096));
}

const char *dray__get_text(dray__reader *r, dray__arena *arena)
{
    return in_arena(r, arena, dray__get_word(r));
}

void *dray__get_array(dray__reader *r, dray__arena *arena, size_t wire, size_t size,
                      uint32_t *count)
{
    *count = dray__get_count(r, wire);
    void *array = dray__arena_get(arena, size * (*count ? *count : 1));
    if (!array) {
        r->failed = true;
        *count = 0;
    }
    return array;
}

const dray__new_column *dray__get_columns(dray__reader *r, dray__arena *arena, uint32_t *count)
{
    dray__new_column *columns =
        dray__get_array(r, arena, 4 + DRAY__SPEC_WIRE + DRAY__EXTENT_WIRE, sizeof *columns, count);
    for (uint32_t i = 0; i < *count && !r->failed; i++) {
        columns[i].name = dray__get_text(r, arena);
        columns[i].spec = dray__get_spec(r);
        columns[i].extent = dray__get_extent(r);
    }
    return columns;
}

const dray__new_tag *dray__get_tags(dray__reader *r, dray__arena *arena, uint32_t *count)
{
    uint32_t key_count;
    const char **keys = dray__get_array(r, arena, 4, sizeof *keys, &key_count);
    for (uint32_t i = 0; i < key_count && !r->failed; i++)
        keys[i] = dray__get_text(r, arena);
    dray__new_tag *tags = dray__get_array(r, arena, 16, sizeof *tags, count);
    for (uint32_t i = 0; i < *count && !r->failed; i++) {
        uint32_t key;
        tags[i].item = dray__get_u32(r);
        key = dray__get_u32(r);
        tags[i].value = dray__get_f64(r);
        if (key >= key_count)
            r->failed = true;
        else
            tags[i].key = keys[key];
    }
    return tags;
}

void dray__get_rank(dray__reader *r, dray__arena *arena, dray__want *out)
{
    out->group = dray__get_text(r, arena);
    out->cost = dray__get_text(r, arena);
    out->group_epoch = dray__get_u64(r);
    out->round = dray__get_u64(r);
    out->token_cap = dray__get_u64(r);
    out->dp_rank = dray__get_u32(r);
    out->dp_size = dray__get_u32(r);
    out->peer = dray__get_u32(r);
    out->peers = dray__get_u32(r);
    out->micro_rows = dray__get_u32(r);
}

void dray__get_outputs(dray__reader *r, dray__arena *arena, dray__outputs *out)
{
    out->columns = dray__get_columns(r, arena, &out->column_count);
    out->tags = dray__get_tags(r, arena, &out->tag_count);
    uint32_t *open = dray__get_array(r, arena, 4, sizeof *open, &out->open_count);
    for (uint32_t i = 0; i < out->open_count && !r->failed; i++)
        open[i] = dray__get_u32(r);
    out->open = open;
}

static void get_names(dray__reader *r, dray__arena *arena, const char *const **out, uint32_t *count)
{
    const char **names = dray__get_array(r, arena, 4, sizeof *names, count);
    for (uint32_t i = 0; i < *count && !r->failed; i++)
        names[i] = dray__get_text(r, arena);
    *out = names;
}

int dray__get_opening(dray__reader *r, dray__arena *arena, dray__opening *out, int64_t *timeout_ns,
                      dray_error *error)
{
    out->name = dray__get_text(r, arena);
    out->tasks = dray__get_array(r, arena, 12, sizeof *out->tasks, &out->task_count);
    for (uint32_t i = 0; i < out->task_count && !r->failed; i++) {
        dray__task_names *task = &out->tasks[i];
        *task = (dray__task_names){.name = dray__get_text(r, arena)};
        get_names(r, arena, &task->needs, &task->needs_count);
        get_names(r, arena, &task->writes, &task->writes_count);
    }
    out->settings = (dray__settings){.capacity_rows = dray__get_u64(r)};
    out->settings.capacity_bytes = dray__get_u64(r);
    out->settings.max_attempts = dray__get_u32(r);
    out->settings.on_loss = (int32_t)dray__get_u32(r);
    out->settings.provisional = dray__get_u64(r);
    out->settings.batch_rows = dray__get_u32(r);
    out->settings.open_batches = dray__get_u32(r);
    out->settings.checkpoint_batches = dray__get_u32(r);
    out->settings.row_bytes = dray__get_u64(r);
    out->settings.durability = (int32_t)dray__get_u32(r);
    out->settings.backend = (int32_t)dray__get_u32(r);
    out->settings.backend_address = dray__get_line(r, arena);
    out->identity = dray__get_u64(r);
    out->restore = dray__get_line(r, arena);
    *timeout_ns = dray__get_i64(r);
    int rc = dray__reader_finish(r, "QUEUE_OPEN", error);
    if (!rc && (out->settings.durability < 0 || out->settings.durability > DRAY_DURABILITY_JOURNAL))
        rc = dray__fail(error, DRAY_EINVALID, "queue %s: durability %d is none", out->name,
                        out->settings.durability);
    return rc;
}
