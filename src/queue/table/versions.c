/* The versions of the weights that made a row: dropping rows that are too old, and admitting no
 * more rollout than can still be young enough (AReaL's rule: capacity = min(concurrency - running,
 * (staleness + version + 1) * batch - (accepted + running))). */
#include "queue/table/table_inside.h"

#include "base/error.h"
#include "queue/journal/ledger.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define VERSION_MAX 9007199254740992.0 /* 2^53: doubles are whole up to there */
#define ACCEPTED_MAX (UINT64_C(1) << 62)

int dray__version_check(const char *key, double value, dray_error *error)
{
    if (strcmp(key, DRAY_TAG_VERSION) != 0)
        return DRAY_OK;
    if (value >= 0 && value <= VERSION_MAX && floor(value) == value)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID, "tag %s: a whole number expected, found %g", key,
                      value);
}

int dray__versions_prepare(dray__partition *p, dray_error *error)
{
    int rc = DRAY_OK;
    if (!p->oldest)
        rc = dray__grow(&p->oldest, 0, p->row_capacity, sizeof *p->oldest, error);
    if (!rc && !p->newest)
        rc = dray__grow(&p->newest, 0, p->row_capacity, sizeof *p->newest, error);
    return rc;
}

static void note(const dray__table *table, dray__partition *p, uint32_t slot, uint64_t version)
{
    uint64_t stored = version + 1;
    if (!p->oldest[slot] || stored < p->oldest[slot])
        p->oldest[slot] = stored;
    if (stored > p->newest[slot])
        p->newest[slot] = stored;
    for (uint32_t t = 0; t < table->task_count; t++)
        if (version < p->tracks[t].floor)
            p->tracks[t].floor = version;
}

void dray__versions_note(const dray__table *table, dray__partition *p, const dray__put *put,
                         const uint32_t *slots, uint32_t first, uint32_t from, uint32_t to,
                         uint32_t divisor)
{
    bool any = false;
    for (uint32_t i = 0; i < put->tag_count && !any; i++)
        any = put->tags[i].key == table->version_key;
    for (uint32_t i = from; any && i < to; i++) {
        uint32_t slot = slots ? slots[i] : first + i, item = i / divisor;
        uint32_t tag = put->tag_start ? put->tag_start[item] : 0;
        uint32_t end = put->tag_start ? put->tag_start[item + 1] : put->tag_count;
        for (uint32_t k = tag; slot != DRAY__NONE && k < end; k++)
            if (put->tags[k].key == table->version_key)
                note(table, p, slot, (uint64_t)put->tags[k].value);
    }
}

/* ---- staleness ------------------------------------------------------------------------------- */

static bool stale(const dray__partition *p, const dray__want *want, uint32_t slot)
{
    return want->version > want->staleness && p->oldest && p->oldest[slot] &&
           p->oldest[slot] - 1 < want->version - want->staleness;
}

bool dray__is_left(const dray__partition *p, const dray__want *want, uint32_t slot)
{
    return want->fresh == DRAY_FRESH_LEFT && stale(p, want, slot);
}

uint32_t dray__count_left(const dray__partition *p, const dray__want *want)
{
    uint32_t count = 0;
    for (uint32_t slot = 0; want->fresh == DRAY_FRESH_LEFT && slot < p->rows; slot++)
        count += dray__bit_get(p->tracks[want->task].ready, slot) && dray__is_left(p, want, slot);
    return count;
}

static uint64_t oldest_open(const dray__partition *p, const dray__track *track)
{
    uint64_t found = UINT64_MAX;
    for (uint32_t slot = 0; slot < p->rows; slot++)
        if (p->oldest[slot] && p->oldest[slot] - 1 < found && !dray__bit_get(track->done, slot) &&
            !dray__bit_get(p->dead, slot))
            found = p->oldest[slot] - 1;
    return found;
}

void dray__drop_stale(dray__table *table, dray__partition *p, const dray__want *want)
{
    dray__track *track = &p->tracks[want->task];
    if (want->version <= want->staleness || track->floor >= want->version - want->staleness)
        return;
    uint32_t words = (uint32_t)dray__bit_words(p->rows);
    for (uint32_t w = 0; w < words; w++) {
        for (uint64_t left = track->ready[w]; left; left &= left - 1) {
            uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(left);
            /* Losing one may have lost others of its group. */
            if (!dray__bit_get(track->ready, slot) || !stale(p, want, slot))
                continue;
            char reason[DRAY__REASON_MAX];
            snprintf(reason, sizeof reason,
                     "of version %llu, too old for version %llu with staleness %u",
                     (unsigned long long)p->oldest[slot] - 1, (unsigned long long)want->version,
                     want->staleness);
            dray__lose(table, p, want->task, slot, DRAY_LOSS_STALE, reason);
        }
    }
    track->floor = oldest_open(p, track);
}

/* ---- admission ------------------------------------------------------------------------------- */

uint64_t dray__admission_running(const dray__table *table)
{
    uint64_t running = 0;
    for (uint32_t i = 0; table->admission.task != DRAY__NONE && i < table->partition_count; i++) {
        const dray__track *track = &table->partitions[i]->tracks[table->admission.task];
        running += track->taken_count - track->taken_dead + track->cut_count;
    }
    return running;
}

int64_t dray__admission_room(const dray__table *table)
{
    const dray__admission *a = &table->admission;
    if (!a->batch)
        return INT64_MAX;
    int64_t running = (int64_t)dray__admission_running(table), room;
    /* Versions are at most 2^53, batches and staleness 2^32: the product may not fit. */
    if (__builtin_mul_overflow((int64_t)(a->staleness + a->version + 1), (int64_t)a->batch, &room))
        room = INT64_MAX;
    room -= (int64_t)a->accepted + running;
    if (a->concurrency && (int64_t)a->concurrency - running < room)
        room = (int64_t)a->concurrency - running;
    return room;
}

bool dray__admission_refuses(const dray__table *table, const dray__want *want)
{
    int64_t room = want->task == table->admission.task ? dray__admission_room(table) : INT64_MAX;
    for (uint32_t i = 0; room < want->count && i < table->partition_count; i++) {
        const dray__partition *p = table->partitions[i];
        const dray__track *track = &p->tracks[want->task];
        if (want->partition && strcmp(p->name, want->partition) != 0)
            continue;
        if ((int64_t)track->ready_count - track->cut_count > (room > 0 ? room : 0))
            return true;
    }
    return false;
}

void dray__admission_note(dray__table *table, uint32_t task, int64_t by)
{
    dray__admission *a = &table->admission;
    if (!a->batch || task != a->task)
        return;
    a->accepted = by < 0 && a->accepted < (uint64_t)-by ? 0 : a->accepted + (uint64_t)by;
    if (task == DRAY__NONE)
        table->freed |= by < 0;
    else
        table->dirty |= UINT64_C(1) << task;
}

static void wake(dray__table *table)
{
    if (table->admission.task == DRAY__NONE)
        table->freed = true;
    else
        table->dirty |= UINT64_C(1) << table->admission.task;
}

int dray__admission_check(const dray__table *table, const dray__admission *a, dray_error *error)
{
    if (a->task != DRAY__NONE && a->task >= table->task_count)
        return dray__fail(error, DRAY_EINVALID, "admission: one of %u tasks expected, found %u",
                          table->task_count, a->task);
    if (a->version > (uint64_t)VERSION_MAX || a->accepted > ACCEPTED_MAX)
        return dray__fail(error, DRAY_EINVALID,
                          "admission: at most version %.0f and %llu rows expected, found %llu and "
                          "%llu",
                          VERSION_MAX, (unsigned long long)ACCEPTED_MAX,
                          (unsigned long long)a->version, (unsigned long long)a->accepted);
    return DRAY_OK;
}

int dray__table_admit(dray__table *table, const dray__admission *admission, bool resume,
                      dray_error *error)
{
    dray__admission *own = &table->admission;
    dray__admission next = *admission;
    if (!admission->batch)
        return dray__fail(error, DRAY_EINVALID, "admission: a task and its rows a batch expected");
    if (!resume && own->batch && admission->version < own->version)
        return dray__fail(error, DRAY_EINVALID, "admission: version %llu is behind %llu",
                          (unsigned long long)admission->version, (unsigned long long)own->version);
    next.accepted = own->accepted;
    if ((!own->batch || resume) &&
        (__builtin_mul_overflow(admission->version, (uint64_t)admission->batch, &next.accepted) ||
         next.accepted > ACCEPTED_MAX / 2)) /* rows are counted on from there */
        return dray__fail(error, DRAY_EINVALID, "admission: version %llu of %u rows overflows",
                          (unsigned long long)admission->version, admission->batch);
    int rc = dray__admission_check(table, &next, error);
    if (rc)
        return rc;
    *own = next;
    dray__ledger_write(table->ledger, DRAY__RECORD_ADMIT, 0, own);
    wake(table);
    return DRAY_OK;
}

int dray__table_version(dray__table *table, uint64_t version, dray_error *error)
{
    dray__admission *own = &table->admission;
    if (!own->batch)
        return dray__fail(error, DRAY_EINVALID, "queue %s has no admission", table->name);
    if (version < own->version || (double)version > VERSION_MAX)
        return dray__fail(error, DRAY_EINVALID, "admission: version %llu is behind %llu",
                          (unsigned long long)version, (unsigned long long)own->version);
    own->version = version;
    dray__ledger_write(table->ledger, DRAY__RECORD_ADMIT, 0, own);
    wake(table);
    return DRAY_OK;
}
