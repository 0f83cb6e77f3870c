/* Checks the memory that the queues of one token hold together against the coordinator's limits. */
#include "base/error.h"
#include "queue/table/table.h"

void dray__quota_join(dray__quota *quota, dray__table *table)
{
    table->quota = quota;
    table->quota_next = quota->tables;
    quota->tables = table;
}

void dray__quota_leave(dray__table *table)
{
    if (!table->quota)
        return;
    dray__table **at = &table->quota->tables;
    while (*at != table)
        at = &(*at)->quota_next;
    *at = table->quota_next;
    table->quota = NULL;
}

dray__quota_use dray__quota_used(const dray__quota *quota)
{
    dray__quota_use use = {0};
    for (const dray__table *table = quota->tables; table; table = table->quota_next) {
        use.queues++;
        use.rows += table->rows;
        use.bytes += table->objects ? 0 : table->chunk_bytes;
        use.table_bytes += table->memory;
    }
    return use;
}

void dray__quota_freed(dray__table *table)
{
    table->freed = true;
    for (dray__table *t = table->quota ? table->quota->tables : NULL; t; t = t->quota_next)
        t->freed = true;
}

/* Returns the most memory that the arrays of partitions.c take for so many rows, with all columns
 * committed. */
uint64_t dray__rows_memory(const dray__table *table, uint32_t rows, uint32_t group)
{
    uint64_t capacity = 64, tasks = table->task_count, writers = 1, bits, each;
    while (capacity < rows)
        capacity *= 2;
    for (uint32_t t = 0; t < table->task_count; t++)
        writers += table->tasks[t].writes_count != 0;
    bits = 3 + 3 * tasks + table->column_count;
    each = 2 * sizeof(uint32_t) + tasks * sizeof(dray__row_state) + writers * sizeof(dray__place) +
           2 * sizeof(uint64_t) +
           (uint64_t)__builtin_popcountll(table->settings.provisional) * sizeof(uint64_t);
    uint64_t groups = capacity / (group ? group : 1) + 1;
    return capacity * each + capacity / 8 * bits +
           groups * (sizeof(dray__group_range) + tasks * (sizeof(dray__link) + 1));
}

/* Returns the memory of tags. When some are of single rows, tags of all rows are copied to each
 * row.
 */
uint64_t dray__tags_memory(const dray__content *content, uint32_t items)
{
    uint64_t common = 0, count = content->tag_count;
    for (uint32_t i = 0; i < count; i++)
        common += content->tags[i].item == DRAY__NONE;
    uint64_t all = common == count ? count : common * items + (count - common);
    return all * sizeof(dray__put_tag);
}

static int full(const dray__quota *quota, const char *what, uint64_t used, uint64_t more,
                uint64_t most, dray_error *error)
{
    return dray__fail(error, more > most ? DRAY_EFULL : DRAY_EAGAIN,
                      "%llu %s of the token %s + %llu > %llu, which the coordinator allows",
                      (unsigned long long)used, what, quota->who, (unsigned long long)more,
                      (unsigned long long)most);
}

int dray__quota_rows(const dray__table *table, uint64_t rows, uint64_t memory, dray_error *error)
{
    const dray__quota *quota = table->quota;
    if (!quota)
        return DRAY_OK;
    dray__quota_use use = dray__quota_used(quota);
    if (rows > quota->limits.rows || use.rows > quota->limits.rows - rows)
        return full(quota, "rows", use.rows, rows, quota->limits.rows, error);
    if (memory > quota->limits.table_bytes || use.table_bytes > quota->limits.table_bytes - memory)
        return full(quota, "bytes for rows", use.table_bytes, memory, quota->limits.table_bytes,
                    error);
    return DRAY_OK;
}

int dray__quota_bytes(const dray__table *table, uint64_t bytes, dray_error *error)
{
    const dray__quota *quota = table->quota;
    if (!quota)
        return DRAY_OK;
    dray__quota_use use = dray__quota_used(quota);
    if (bytes > quota->limits.bytes || use.bytes > quota->limits.bytes - bytes)
        full(quota, "bytes of shared memory", use.bytes, bytes, quota->limits.bytes, error);
    else
        return DRAY_OK;
    if (error)
        error->code = DRAY_EFULL;
    return DRAY_EFULL;
}

/* The bytes of kept batches are bounded, because all of them were in the queue when the last of
 * these batches was got. Chunks that are not full take more memory than the bytes in them. */
bool dray__table_roomy(const dray__table *table)
{
    uint64_t used = table->charged + table->hidden + table->kept;
    uint64_t capacity = table->settings.capacity_bytes;
    const dray__quota *quota = table->quota;
    return used <= capacity / 4 && table->chunk_bytes - table->spare_bytes <= capacity / 2 &&
           (!quota || dray__quota_used(quota).bytes <= quota->limits.bytes / 2);
}
