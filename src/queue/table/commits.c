/* Commits: apply a claim's outputs and its acknowledgement in one step. */
#include "base/error.h"
#include "queue/journal/ledger.h"
#include "queue/table/table_inside.h"

#include <stdlib.h>
#include <string.h>

static int check_writes(const dray__table *table, const dray__claim *claim,
                        const dray__new_column *columns, uint32_t count, dray_error *error)
{
    const dray__qtask *task = &table->tasks[claim->task];
    for (uint32_t i = 0; i < task->writes_count; i++) {
        const char *name = table->columns[task->writes[i]].name;
        bool found = false;
        for (uint32_t c = 0; c < count && !found; c++)
            found = strcmp(columns[c].name, name) == 0;
        if (!found)
            return dray__fail(error, DRAY_EINVALID, "commit of task %s: column %s was not set",
                              task->name, name);
    }
    return DRAY_OK;
}

static void acknowledge(dray__table *table, dray__claim *claim, const bool *stays)
{
    dray__partition *p = claim->partition;
    dray__track *track = &p->tracks[claim->task];
    for (uint32_t i = 0; i < claim->count; i++) {
        uint32_t slot = claim->slots[i];
        if (slot == DRAY__NONE)
            continue;
        dray__bit_clear(track->taken, slot);
        track->taken_count--;
        bool dead = dray__bit_get(p->dead, slot);
        if (stays && stays[i]) {
            track->taken_dead -= dead;
            dray__count_cut(p, claim->task, slot, 1);
            track->open_from = slot < track->open_from ? slot : track->open_from;
            dray__admission_note(table, claim->task, 0);
            continue;
        }
        dray__bit_set(track->done, slot);
        track->done_count++;
        table->tasks[claim->task].counts.committed++;
        dray__admission_note(table, claim->task, dead ? 0 : 1); /* a dead row is not accepted */
        if (dead) {
            track->taken_dead--;
            continue;
        }
        track->settled_count++;
        if (p->commit_seq[claim->task]) {
            p->commit_seq[claim->task][slot] = table->commit_seq;
            p->uncovered++;
        } else {
            dray__put_settled(table, p, claim->task, slot);
        }
    }
    uint32_t last = DRAY__NONE;
    for (uint32_t i = 0; i < claim->count; i++) {
        uint32_t slot = claim->slots[i];
        if (slot == DRAY__NONE || slot / 64 == last)
            continue;
        last = slot / 64;
        dray__refresh_all_tasks(table, p, last, true);
    }
    claim->state = DRAY__CLAIM_COMMITTED;
}

/* Takes the rows out of the claim. Returns false, and takes none, when the claim lacks one of them.
 */
static bool take_out(dray__claim *claim, const uint32_t *items, uint32_t count, uint32_t *slots)
{
    uint32_t taken = 0;
    for (; taken < count; taken++) {
        if (items[taken] >= claim->count || claim->slots[items[taken]] == DRAY__NONE)
            break;
        slots[taken] = claim->slots[items[taken]];
        claim->slots[items[taken]] = DRAY__NONE;
    }
    for (uint32_t i = 0; taken < count && i < taken; i++)
        claim->slots[items[i]] = slots[i];
    claim->active -= taken == count ? count : 0;
    return taken == count;
}

int dray__claim_split(dray__table *table, dray__client *client, uint32_t ticket, uint32_t part,
                      const uint32_t *items, uint32_t count, dray_error *error)
{
    dray__claim *claim = NULL, *out;
    int rc = dray__claim_active(table, client, ticket, &claim, error);
    if (rc)
        return rc;
    if (claim->state == DRAY__CLAIM_COMMITTED || claim->consumers || !count || !part ||
        dray__table_find_claim(table, client, part))
        return dray__fail(
            error, DRAY_EINVALID,
            "split of claim %u of %s: rows of a claim that is not committed, and no "
            "rank's share, and an unused ticket expected, found %u rows and ticket %u",
            ticket, client->name, count, part);
    dray__claim made = {.task = claim->task,
                        .partition = claim->partition,
                        .count = count,
                        .active = count,
                        .hold_until = claim->hold_until,
                        .slots = malloc(count * sizeof *made.slots)};
    if (!made.slots)
        return dray__nomem(error);
    if (!take_out(claim, items, count, made.slots)) {
        free(made.slots);
        return dray__fail(
            error, DRAY_ESTALE,
            "split of claim %u of %s: rows of the claim expected, found one that it does not have",
            ticket, client->name);
    }
    rc = dray__claim_add(table, client, part, &made, &out, error);
    if (rc) {
        for (uint32_t i = 0; i < count; i++)
            claim->slots[items[i]] = made.slots[i];
        claim->active += count;
        free(made.slots);
        return rc;
    }
    out->newest = claim->newest;
    out->restores = claim->restores;
    if (!claim->active)
        claim->state = DRAY__CLAIM_FAILED;
    return DRAY_OK;
}

/* Refuses rows of versions that do not exist any more, after a run went back to a checkpoint. */
static int check_versions(const dray__claim *claim, const dray__content *content, dray_error *error)
{
    for (uint32_t i = 0; claim->newest != UINT64_MAX && i < content->tag_count; i++) {
        const dray__new_tag *tag = &content->tags[i];
        if (strcmp(content->keys[tag->key], DRAY_TAG_VERSION) == 0 &&
            tag->value > (double)claim->newest)
            return dray__fail(error, DRAY_ESTALE,
                              "commit of version %.0f: the run has gone back to version %llu",
                              tag->value, (unsigned long long)claim->newest);
    }
    return DRAY_OK;
}

/* Reads which rows of the claim stay open. Only ragged columns can be appended to. */
static int read_open(const dray__claim *claim, const dray__outputs *o, bool **out,
                     dray_error *error)
{
    for (uint32_t i = 0; i < o->open_count; i++)
        if (o->open[i] >= claim->count)
            return dray__fail(error, DRAY_EINVALID, "partial commit: row %u of a claim of %u",
                              o->open[i], claim->count);
    for (uint32_t c = 0; o->open_count && c < o->content.column_count; c++)
        if (!o->content.columns[c].spec.ragged)
            return dray__fail(error, DRAY_EINVALID,
                              "partial commit: column %s is not ragged, nothing can be appended",
                              o->content.columns[c].name);
    if (!o->open_count)
        return DRAY_OK;
    if (!o->content.column_count)
        return dray__fail(error, DRAY_EINVALID, "partial commit: the task writes no column");
    *out = calloc(claim->count, sizeof **out);
    for (uint32_t i = 0; *out && i < o->open_count; i++)
        (*out)[o->open[i]] = true;
    return *out ? DRAY_OK : dray__nomem(error);
}

int dray__claim_commit(dray__table *table, dray__client *client, uint32_t ticket,
                       uint32_t generation, const dray__outputs *o, dray_error *error)
{
    dray__claim *claim = NULL;
    int rc = dray__claim_active(table, client, ticket, &claim, error);
    if (rc && !claim) { /* an earlier controller may have done it */
        const dray__told *told = dray__ledger_told(table->ledger, client->identity, ticket);
        return told && told->generation == generation ? DRAY_OK : rc;
    }
    if (rc)
        return rc;
    if (claim->generation != generation)
        return dray__fail(error, DRAY_ESTALE, "commit: claim %u is of generation %u, found %u",
                          ticket, claim->generation, generation);
    if (claim->state == DRAY__CLAIM_COMMITTED)
        return DRAY_OK;
    uint64_t bytes;
    bool *stays = NULL;
    rc = check_writes(table, claim, o->content.columns, o->content.column_count, error);
    if (!rc)
        rc = dray__put_check(table, client, (int)claim->task, &o->content, claim->count, &bytes,
                             error);
    if (!rc)
        rc = read_open(claim, o, &stays, error);
    dray__put *put = NULL;
    if (!rc)
        rc = check_versions(claim, &o->content, error);
    if (rc == DRAY_ESTALE)
        dray__claim_void(table, claim);
    if (!rc)
        rc = dray__provisional_prepare(table, claim->partition, claim->task, error);
    if (!rc)
        rc = dray__segments_prepare(claim->partition, claim->task, claim->count, stays, error);
    if (!rc)
        rc = dray__put_prepare(table, claim->partition, (int)claim->task, &o->content, claim->count,
                               &put, error);
    if (!rc && put)
        dray__put_apply(table, claim->partition, (int)claim->task, put, claim->slots, 0,
                        claim->count, 1, stays);
    table->commit_seq += !rc && (table->settings.provisional >> claim->task & 1);
    if (!rc) {
        acknowledge(table, claim, stays);
        dray__ledger_commit(table->ledger, claim, o, put);
    }
    free(stays);
    return rc;
}
