/* Provisional commits: the rows that a trainer has consumed are kept until a checkpoint covers the
 * step that they made. A run that goes back to an earlier checkpoint can consume them again. */
#include "queue/table/table_inside.h"

#include "base/error.h"
#include "queue/journal/ledger.h"

#include <stdio.h>

#define SEQ_MAX (UINT64_C(1) << 62) /* of cursors, from which commits are counted on */

/* Most rows are in the queue while the last batch before a checkpoint is consumed: then
 * checkpoint_batches - 1 batches wait for the checkpoint, and open_batches are open, with that
 * one. */
int dray__settings_check(const char *name, const dray__settings *s, dray_error *error)
{
    uint64_t open = s->open_batches ? s->open_batches : 1;
    uint64_t kept = s->checkpoint_batches ? s->checkpoint_batches - 1 : 0;
    uint64_t capacity = s->capacity_rows ? s->capacity_rows : DRAY__CAPACITY_ROWS, bytes = 0;
    uint64_t room = s->capacity_bytes ? s->capacity_bytes : DRAY__CAPACITY_BYTES, rows;
    bool overflow = __builtin_mul_overflow(open + kept, (uint64_t)s->batch_rows, &rows) ||
                    __builtin_mul_overflow(rows, s->row_bytes, &bytes);
    if (overflow || rows > capacity)
        return dray__fail(error, DRAY_EFULL,
                          "queue %s: %llu open batches + %llu that wait for a checkpoint, of %u "
                          "rows, are %llu rows; its capacity is %llu",
                          name, (unsigned long long)open, (unsigned long long)kept, s->batch_rows,
                          (unsigned long long)rows, (unsigned long long)capacity);
    if (bytes > room)
        return dray__fail(error, DRAY_EFULL,
                          "queue %s: (%llu open batches + %llu that wait for a checkpoint) * %u "
                          "rows * %llu bytes are %llu; its capacity is %llu",
                          name, (unsigned long long)open, (unsigned long long)kept, s->batch_rows,
                          (unsigned long long)s->row_bytes, (unsigned long long)bytes,
                          (unsigned long long)room);
    return DRAY_OK;
}

int dray__provisional_prepare(const dray__table *table, dray__partition *p, uint32_t task,
                              dray_error *error)
{
    if (p->commit_seq[task] || !(table->settings.provisional >> task & 1))
        return DRAY_OK;
    return dray__grow(&p->commit_seq[task], 0, p->row_capacity, sizeof **p->commit_seq, error);
}

bool dray__is_provisional(const dray__partition *p, uint32_t task, uint32_t slot)
{
    return p->commit_seq[task] && p->commit_seq[task][slot];
}

bool dray__provisional_end(dray__partition *p, uint32_t task, uint32_t slot)
{
    if (!dray__is_provisional(p, task, slot))
        return false;
    p->commit_seq[task][slot] = 0;
    p->uncovered--;
    return true;
}

/* Calls action for every provisional commit with a sequence number from `first` to `last`. */
static void each_commit(dray__table *table, uint64_t first, uint64_t last,
                        void (*action)(dray__table *, dray__partition *, uint32_t, uint32_t))
{
    for (uint32_t i = 0; i < table->partition_count; i++) {
        dray__partition *p = table->partitions[i];
        for (uint32_t t = 0; p->uncovered && t < table->task_count; t++) {
            const uint64_t *seq = p->commit_seq[t];
            for (uint32_t slot = 0; seq && slot < p->rows; slot++)
                if (seq[slot] && seq[slot] >= first && seq[slot] <= last)
                    action(table, p, t, slot);
        }
    }
}

static void cover_row(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot)
{
    dray__provisional_end(p, task, slot);
    dray__put_settled(table, p, task, slot);
}

void dray__clear_covered(dray__table *table)
{
    if (table->ledger && table->ledger->replaying) /* later records clear them */
        return;
    for (uint32_t i = table->partition_count; i-- > 0;) {
        const dray__partition *p = table->partitions[i];
        if (p->clearing && !p->uncovered)
            dray__table_clear(table, p->name, NULL);
    }
}

static int check_cursor(const dray__table *table, uint32_t epoch, uint64_t seq, dray_error *error)
{
    if (epoch < table->epoch && seq > table->resumed_seq)
        return dray__fail(error, DRAY_ESTALE,
                          "queue %s: commits up to %llu of epoch %u, but the run went back to %llu "
                          "and is in epoch %u",
                          table->name, (unsigned long long)seq, epoch,
                          (unsigned long long)table->resumed_seq, table->epoch);
    return DRAY_OK;
}

int dray__table_cover(dray__table *table, const dray__cursor *cursor, dray_error *error)
{
    int rc = check_cursor(table, cursor->epoch, cursor->seq, error);
    if (rc)
        return rc;
    dray__ledger_write(table->ledger, DRAY__RECORD_COVER, 0, cursor);
    each_commit(table, 1, cursor->seq, cover_row);
    dray__clear_covered(table);
    return DRAY_OK;
}

/* Resets the row for the task, as if the task had never begun it. The tags that the task gave the
 * row are dropped; it writes no columns. */
static void undo_row(dray__table *table, dray__partition *p, uint32_t task, uint32_t slot)
{
    dray__track *track = &p->tracks[task];
    dray__provisional_end(p, task, slot);
    if (p->places[task + 1])
        p->places[task + 1][slot] = (dray__place){DRAY__NONE, DRAY__NONE};
    dray__bit_clear(track->done, slot);
    track->done_count--;
    p->clearing = false;
    if (dray__bit_get(p->dead, slot)) { /* another task has lost it meanwhile: it stays settled */
        dray__put_settled(table, p, task, slot);
        return;
    }
    track->settled_count--;
    if (slot < track->open_from)
        track->open_from = slot;
    dray__refresh(table, p, task, slot / 64, true);
}

/* Loses rows of versions that no longer exist, unless the checkpoint covers their use. */
static void lose_newer(dray__table *table, dray__partition *p, uint64_t version)
{
    uint32_t task = (uint32_t)__builtin_ctzll(table->settings.provisional);
    char reason[DRAY__REASON_MAX];
    for (uint32_t slot = 0; p->newest && slot < p->rows; slot++) {
        if (!p->newest[slot] || p->newest[slot] - 1 <= version || dray__bit_get(p->dead, slot) ||
            dray__bit_get(p->tracks[task].done, slot))
            continue;
        snprintf(reason, sizeof reason, "of version %llu, the run went back to version %llu",
                 (unsigned long long)p->newest[slot] - 1, (unsigned long long)version);
        dray__lose(table, p, task, slot, DRAY_LOSS_ROLLED_BACK, reason);
    }
}

int dray__table_resume(dray__table *table, const dray__cursor *cursor, dray_error *error)
{
    uint32_t epoch = cursor->epoch, newest = epoch > table->epoch ? epoch : table->epoch;
    uint64_t seq = cursor->seq, version = cursor->version;
    int rc = check_cursor(table, epoch, seq, error);
    if (!rc && !table->settings.provisional)
        rc = dray__fail(error, DRAY_EINVALID, "queue %s has no provisional task", table->name);
    if (!rc && (newest >= UINT32_MAX - 1 || seq >= SEQ_MAX)) /* no queue counts so far */
        rc = dray__fail(error, DRAY_EINVALID, "queue %s: commit %llu of epoch %u: impossible",
                        table->name, (unsigned long long)seq, epoch);
    if (!rc)
        rc = dray__version_check(DRAY_TAG_VERSION, (double)version, error);
    if (rc)
        return rc;
    dray__ledger_write(table->ledger, DRAY__RECORD_RESUME, 0, cursor);
    each_commit(table, 1, seq, cover_row);
    each_commit(table, seq + 1, UINT64_MAX, undo_row);
    for (dray__claim *claim = table->claims; claim; claim = claim->next) {
        if (table->settings.provisional >> claim->task & 1)
            dray__claim_void(table, claim);
        if (version < claim->newest)
            claim->newest = version;
    }
    bool again = table->ledger && table->ledger->replaying; /* each loss has its own record */
    for (uint32_t i = 0; i < table->partition_count && !again; i++)
        lose_newer(table, table->partitions[i], version);
    table->ended = false; /* it was ended after the cursor, or is ended again by the same
                           * task */
    table->resumed_seq = seq;
    if (seq > table->commit_seq) /* a new table */
        table->commit_seq = seq;
    table->epoch = newest + 1;
    table->admission.version = version; /* accepted changes only by the lost rows */
    table->dirty = ~UINT64_C(0);
    table->freed = true;
    dray__clear_covered(table);
    return DRAY_OK;
}
