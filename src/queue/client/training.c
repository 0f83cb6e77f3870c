/* The steps of a trainer, by the rules of a schedule (dray/steps.h). */
#include "queue/client/training.h"

#include "base/error.h"
#include "base/options.h"

#include <stdbool.h>
#include <stdlib.h>

#define TAG_STEP "step"

struct dray_steps {
    dray_steps_rules rules;
    int64_t number;
    char partition[DRAY__PARTITION_BYTES];
    uint32_t taken, old; /* rows of the step; those of older versions than the newest */
    dray__feed *feed;    /* NULL when steps take their own prompts */
};

static int64_t at_least_0(int64_t number)
{
    return number > 0 ? number : 0;
}

int64_t dray__rules_oldest(const dray_steps_rules *rules, int64_t step)
{
    return at_least_0(step - rules->oldest);
}

int64_t dray__rules_newest(const dray_steps_rules *rules, int64_t step)
{
    return at_least_0(step - rules->newest);
}

static int read_rules(const dray_steps_rules *given, dray_steps_rules *out, dray_error *error)
{
    *out = (dray_steps_rules)DRAY_STEPS_RULES_INIT;
    int rc = DRAY__OPTIONS_READ(dray_steps_rules, tagged, out, given, error);
    if (rc)
        return rc;
    if (out->newest < 1 || out->oldest < out->newest || out->open < 1 || out->kept < 1 ||
        out->oldest > UINT32_MAX)
        return dray__fail(
            error, DRAY_EINVALID,
            "rules of steps: versions from 1 <= newest <= oldest before, and at least "
            "one step and version that are kept expected, found %lld to %lld, %lld "
            "and %lld",
            (long long)out->newest, (long long)out->oldest, (long long)out->open,
            (long long)out->kept);
    if (!out->rows || !out->group || out->rows % out->group || out->fresh > out->rows)
        return dray__fail(error, DRAY_EINVALID,
                          "rules of steps: whole groups of rows, and at most as many fresh ones "
                          "expected, found %u rows in groups of %u, %u of them fresh",
                          out->rows, out->group, out->fresh);
    return DRAY_OK;
}

static void begin(dray_steps *self, int64_t number)
{
    self->number = number;
    self->taken = self->old = 0;
    dray__partition_name(DRAY__PARTITION_STEP, number, self->partition);
}

int dray_steps_open(const dray_steps_rules *rules, const char *folder, int64_t step,
                    dray_steps **out, dray_error *error)
{
    dray_steps_rules read;
    int rc = read_rules(rules, &read, error);
    dray_steps *self = rc ? NULL : calloc(1, sizeof *self);
    if (!rc && !self)
        return dray__nomem(error);
    if (rc)
        return rc;
    self->rules = read;
    if (read.first_complete)
        rc = dray__feed_open(&self->rules, folder, step, &self->feed, error);
    if (rc) {
        dray_steps_close(self);
        return rc;
    }
    begin(self, step + 1);
    *out = self;
    return DRAY_OK;
}

void dray_steps_close(dray_steps *self)
{
    if (self)
        dray__feed_close(self->feed);
    free(self);
}

void dray_steps_next(dray_steps *self)
{
    begin(self, self->number + 1);
}

/* ---- claims ---------------------------------------------------------------------------------- */

void dray__rules_consume(const dray_steps_rules *rules, int64_t step, dray_claim_options *claim)
{
    claim->fresh = DRAY_FRESH_DROP;
    claim->staleness = (uint32_t)(rules->oldest - 1);
    claim->version = (uint64_t)(step - 1);
}

/* Returns how many more rows of older versions the step may have. */
static uint32_t old_left(const dray_steps_rules *rules, uint32_t old)
{
    uint32_t most = rules->rows - rules->fresh;
    return most > old ? most - old : 0;
}

/* Returns true when a part of the step's samples must be of the newest version. The last steps take
 * any remaining samples, because no prompts are left for newer weights. */
static bool shares(const dray_steps_rules *rules, int64_t step)
{
    return rules->fresh && (!rules->last || step + rules->oldest - 1 <= rules->last);
}

bool dray__rules_newest_only(const dray_steps_rules *rules, int64_t step, uint32_t old)
{
    return shares(rules, step) && old_left(rules, old) < rules->group;
}

uint32_t dray__rules_groups(const dray_steps_rules *rules, uint32_t most, uint32_t left)
{
    if (!left)
        return 0;
    if (most > left)
        most = left;
    return most < rules->group ? rules->group : most / rules->group * rules->group;
}

uint32_t dray__rules_bind(const dray_steps_rules *rules, int64_t step, uint32_t old, uint32_t most,
                          uint32_t left)
{
    bool mixed = shares(rules, step) && !dray__rules_newest_only(rules, step, old);
    if (mixed && most > old_left(rules, old))
        most = old_left(rules, old);
    return dray__rules_groups(rules, most, left);
}

void dray__rules_leave_old(dray_claim_options *claim)
{
    claim->fresh = DRAY_FRESH_LEFT;
    claim->staleness = 0;
}

uint32_t dray_steps_claim(const dray_steps *self, uint32_t most, dray_claim_options *claim)
{
    const dray_steps_rules *rules = &self->rules;
    uint32_t left = rules->rows - self->taken;
    dray__rules_consume(rules, self->number, claim);
    claim->up_to = rules->first_complete;
    if (rules->first_complete) {
        claim->partition = NULL;
        claim->policy = DRAY_POLICY_GROUP;
        claim->count = dray__rules_bind(rules, self->number, self->old, most, left);
        if (dray__rules_newest_only(rules, self->number, self->old))
            dray__rules_leave_old(claim);
    } else { /* samples of the next step may be ready, too */
        claim->partition = rules->open > 1 ? self->partition : NULL;
        claim->count = most < left ? most : left;
    }
    return claim->count;
}

/* ---- checks of the samples that a step takes ------------------------------------------------- */

static int check_version(const dray_steps_rules *rules, int64_t step, const dray_batch *batch,
                         uint32_t row, dray_error *error)
{
    double version = 0;
    int64_t oldest = dray__rules_oldest(rules, step), newest = dray__rules_newest(rules, step);
    int rc = dray_batch_tag(batch, row, DRAY_TAG_VERSION, &version, error);
    if (rc == DRAY_ENOENT && !rules->tagged)
        return DRAY_OK;
    if (rc || (version >= (double)oldest && version <= (double)newest))
        return rc;
    return dray__fail(error, DRAY_EINTERNAL,
                      "a sample of step %lld is of version %.0f: its schedule expects %lld to %lld",
                      (long long)step, version, (long long)oldest, (long long)newest);
}

int dray__rules_check(const dray_steps_rules *rules, int64_t step, const dray_batch *batch,
                      dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < dray_batch_rows(batch) && !rc; i++)
        rc = check_version(rules, step, batch, i, error);
    return rc;
}

uint32_t dray__rules_count_old(int64_t step, const dray_batch *batch)
{
    uint32_t old = 0;
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        double version = (double)(step - 1);
        dray_batch_tag(batch, i, DRAY_TAG_VERSION, &version, NULL);
        old += version < (double)(step - 1);
    }
    return old;
}

int dray__feed_take(dray__feed *feed, const dray_steps_rules *rules, const dray_batch *batch,
                    dray_error *error)
{
    uint32_t rows = dray_batch_rows(batch), group = rules->group;
    int64_t of = dray__partition_step(DRAY__PARTITION_STEP, dray_batch_partition(batch));
    int rc = DRAY_OK;
    if (rows % group)
        return dray__fail(error, DRAY_EINTERNAL, "%u samples came, expected whole groups of %u",
                          rows, group);
    for (uint32_t i = 0; i < rows && !rc; i += group)
        rc = dray__feed_trained(feed, of, dray_batch_row(batch, i)->group, error);
    return rc;
}

int dray_steps_take(dray_steps *self, const dray_batch *batch, dray_error *error)
{
    uint32_t rows = dray_batch_rows(batch), left = self->rules.rows - self->taken;
    if (rows > left)
        return dray__fail(error, DRAY_EINTERNAL,
                          "%u samples came, expected at most the %u that step %lld still takes",
                          rows, left, (long long)self->number);
    int rc = dray__rules_check(&self->rules, self->number, batch, error);
    if (!rc && self->feed)
        rc = dray__feed_take(self->feed, &self->rules, batch, error);
    if (rc)
        return rc;
    self->taken += rows;
    self->old += dray__rules_count_old(self->number, batch);
    return DRAY_OK;
}

int dray_steps_feed(const dray_steps *self, char **out, dray_error *error)
{
    json_t *card = self->feed ? dray__feed_card(self->feed) : NULL;
    char *text = card ? json_dumps(card, JSON_COMPACT) : NULL;
    json_decref(card);
    if (self->feed && !text)
        return dray__nomem(error);
    *out = text;
    return DRAY_OK;
}

/* ---- engines --------------------------------------------------------------------------------- */

/* Returns true when the batch must not be of the older version: in a step that may have two
 * versions, the last samples are of the newer one. */
static bool must_be_fresh(const dray_steps_rules *rules, const dray_batch *batch)
{
    for (uint32_t i = 0; rules->in_turns && i < dray_batch_rows(batch); i++)
        if (dray_batch_row(batch, i)->slot >= rules->rows - rules->fresh)
            return true;
    return false;
}

int dray_steps_versions(const dray_steps_rules *given, const dray_batch *batch, uint64_t *oldest,
                        uint64_t *newest, dray_error *error)
{
    dray_steps_rules rules;
    double step = 0;
    int rc = read_rules(given, &rules, error);
    if (!rc)
        rc = dray_batch_tag(batch, 0, TAG_STEP, &step, error);
    if (rc)
        return rc;
    *newest = (uint64_t)dray__rules_newest(&rules, (int64_t)step);
    *oldest = must_be_fresh(&rules, batch) ? *newest
                                           : (uint64_t)dray__rules_oldest(&rules, (int64_t)step);
    return DRAY_OK;
}
