/* The loop as discrete events. Servers (each is an instance of a role) take batches of rows for
 * their tasks as the built-in programs do: in order, or complete groups first. The schedule's rules
 * decide on versions, numbers of rows and prompts. */
#include "base/array.h"
#include "base/error.h"
#include "base/random.h"
#include "queue/client/training.h"
#include "run/job/schedule.h"
#include "run/job/tasks.h"
#include "run/simulate/simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROLES = 16, SERVERS_MOST = 2048, WARMUP = 4 };
#define NEVER INFINITY

typedef struct row {
    uint32_t length;
    int32_t version;       /* version of its oldest token; -1 before it is begun */
    uint8_t claimed, done; /* bits of tasks */
} row;

typedef struct partition {
    row *rows;
    uint32_t next[DRAY__SIM_TASKS]; /* when claimed in order: all rows before it are claimed */
    uint32_t trained;
} partition;

typedef struct place {
    uint32_t partition, row;
} place;

typedef struct server {
    uint32_t role;
    uint8_t tasks; /* bits */
    int busy;      /* a task, IDLE, or TAKING (weights) */
    double until, began;
    place *claimed;
    uint32_t count;
    int cause; /* while it is idle */
    /* The fields below are for engines. */
    int32_t held; /* version; -1 for none */
    double *left; /* tokens left of each row under way, with batching `continuous` */
    double last;  /* the time for which `left` is right */
    bool drains;
} server;

enum { IDLE = -1, TAKING = -2 };

typedef struct sim {
    const dray__job *job;
    const dray__services *services;
    dray__schedule schedule;
    dray_steps_rules rules;
    uint32_t batch, micro[DRAY__SIM_TASKS];
    uint8_t needs[DRAY__SIM_TASKS];
    bool continuous;
    dray__cost costs[DRAY__SIM_TASKS];
    double token_fixed, token_row;
    int64_t steps, total; /* simulated steps; steps with prompts */
    uint64_t seed;
    partition *partitions; /* of step i + 1 */
    uint32_t made, low;    /* partitions that were inserted; those before `low` are trained */
    double insert_at;
    server *servers;
    uint32_t server_count, role_servers[ROLES];
    double now;
    double *published; /* when each version was published */
    int32_t version;   /* the newest */
    uint64_t begun;    /* rows */
    /* The fields below are the trainer's. */
    int64_t step;
    uint32_t taken, old;
    bool reopened;   /* rows must be generated again; engines may begin them */
    double deferred; /* seconds of gradients that wait for the last rows */
    double stale_sum, stale_tokens, stale_max, anew;
    double idle[ROLES][DRAY__SIM_CAUSES], transfer[ROLES];
    int64_t first, last; /* the steps that are measured */
} sim;

static uint8_t bit(int task)
{
    return (uint8_t)(1U << task);
}

/* Returns whether the present step is measured. The first steps are not, nor is the last one, in
 * which engines have less to do. */
static bool counts(const sim *s)
{
    return s->step >= s->first && s->step <= s->last;
}

static double cost_of(const dray__cost *c, double rows, double tokens)
{
    return c->fixed + c->row * rows + c->token * tokens;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static bool ready(const sim *s, const row *r, int task)
{
    return (r->done & s->needs[task]) == s->needs[task] && !(r->claimed & bit(task));
}

static void insert(sim *s)
{
    s->insert_at = NEVER;
    uint32_t open = 0;
    for (uint32_t p = s->low; p < s->made; p++)
        open += s->partitions[p].trained < s->batch;
    const dray__services *of = s->services;
    for (; open < (uint32_t)s->rules.open && s->made < (uint64_t)s->total; s->made++, open++) {
        partition *p = &s->partitions[s->made];
        for (uint32_t i = 0; i < s->batch; i++) {
            uint32_t group = i / s->rules.group;
            double draw = dray__random_unit(s->seed, s->made, group);
            uint32_t from = (uint32_t)(draw * of->groups);
            from = from < of->groups ? from : of->groups - 1;
            p->rows[i] =
                (row){.length = of->lengths[from * of->group + i % of->group], .version = -1};
        }
    }
}

/* Returns whether the group that begins at row `first`, a multiple of the group's size, is
 * ready. */
static bool group_ready(const sim *s, const partition *p, uint32_t first, int task)
{
    for (uint32_t i = first; i < first + s->rules.group; i++)
        if (!ready(s, &p->rows[i], task))
            return false;
    return true;
}

static void claim(server *v, uint32_t p, uint32_t i)
{
    v->claimed[v->count++] = (place){p, i};
}

/* Claims the next `most` rows in order if all of them are ready; at the end of a step they may be
 * fewer. */
static void claim_in_order(const sim *s, server *v, int task, uint32_t p, uint32_t most)
{
    partition *of = &s->partitions[p];
    uint32_t from = of->next[task], left = s->batch - from, want = most < left ? most : left;
    uint32_t look = !s->job->stream && task != DRAY__SIM_ROLLOUT && !from ? left : want;
    for (uint32_t i = from; i < from + look; i++)
        if (!ready(s, &of->rows[i], task))
            return;
    for (uint32_t i = from; i < from + want; i++)
        claim(v, p, i);
}

/* Claims at most `most` ready rows, in whole groups when the task needs that. */
static void claim_what_is_there(const sim *s, server *v, int task, uint32_t most)
{
    bool groups = task == DRAY__SIM_ADVANTAGE;
    uint32_t unit = groups ? s->rules.group : 1;
    for (uint32_t p = s->low; p < s->made && v->count + unit <= most; p++) {
        if (s->partitions[p].trained == s->batch)
            continue;
        for (uint32_t i = 0; i < s->batch && v->count + unit <= most; i += unit)
            if (groups ? group_ready(s, &s->partitions[p], i, task)
                       : ready(s, &s->partitions[p].rows[i], task))
                for (uint32_t k = 0; k < unit; k++)
                    claim(v, p, i + k);
    }
}

/* `first` is the first of the new rows; those before it are under way. */
static void mark_claimed(sim *s, const server *v, uint32_t first, int task)
{
    for (uint32_t i = first; i < v->count; i++) {
        partition *p = &s->partitions[v->claimed[i].partition];
        p->rows[v->claimed[i].row].claimed |= bit(task);
        if (v->claimed[i].row >= p->next[task])
            p->next[task] = v->claimed[i].row + 1;
    }
}

static double tokens_of(const sim *s, const server *v, uint32_t *most)
{
    double tokens = 0;
    *most = 0;
    for (uint32_t i = 0; i < v->count; i++) {
        uint32_t length = s->partitions[v->claimed[i].partition].rows[v->claimed[i].row].length;
        tokens += length;
        *most = length > *most ? length : *most;
    }
    return tokens;
}

static void begin(sim *s, server *v, int task, double seconds)
{
    v->busy = task;
    v->began = s->now;
    v->until = s->now + seconds;
}

/* ---- the trainer ----------------------------------------------------------------------------- */

/* Returns rows that are too old for the step to their prompt, to be generated again. */
static void make_anew(sim *s, partition *p, uint32_t first)
{
    for (uint32_t i = first; i < first + s->rules.group; i++) {
        p->rows[i].claimed = p->rows[i].done = 0;
        p->rows[i].version = -1;
        s->begun--;
        s->anew += counts(s);
    }
    for (int task = 0; task < DRAY__SIM_TASKS; task++)
        p->next[task] = first < p->next[task] ? first : p->next[task];
    s->reopened = true;
}

static int32_t oldest_of(const sim *s, const partition *p, uint32_t first)
{
    int32_t version = INT32_MAX;
    for (uint32_t i = first; i < first + s->rules.group; i++)
        version = p->rows[i].version < version ? p->rows[i].version : version;
    return version;
}

static void claim_late(sim *s, server *v)
{
    uint32_t want = dray__rules_bind(&s->rules, s->step, s->old, s->micro[DRAY__SIM_ACTOR],
                                     s->batch - s->taken);
    bool newest = dray__rules_newest_only(&s->rules, s->step, s->old);
    for (uint32_t p = s->low; p < s->made; p++)
        for (uint32_t i = 0; i < s->batch && v->count + s->rules.group <= want;
             i += s->rules.group) {
            partition *of = &s->partitions[p];
            if (!group_ready(s, of, i, DRAY__SIM_ACTOR))
                continue;
            int32_t version = oldest_of(s, of, i);
            if (version < dray__rules_oldest(&s->rules, s->step)) {
                make_anew(s, of, i);
                continue;
            }
            if (newest && version < dray__rules_newest(&s->rules, s->step))
                continue;
            for (uint32_t k = 0; k < s->rules.group; k++)
                claim(v, p, i + k);
            s->old += version < dray__rules_newest(&s->rules, s->step) ? s->rules.group : 0;
        }
}

/* Claims the rows of the first optimiser step as they come, and the others when all of the step are
 * ready. */
static void claim_own(const sim *s, server *v)
{
    uint32_t p = (uint32_t)s->step - 1, part = s->batch / (uint32_t)s->job->actor.optimiser_steps;
    if (p >= s->made)
        return;
    partition *of = &s->partitions[p];
    for (uint32_t i = of->next[DRAY__SIM_ACTOR]; s->taken >= part && i < s->batch; i++)
        if (!ready(s, &of->rows[i], DRAY__SIM_ACTOR))
            return;
    claim_in_order(s, v, DRAY__SIM_ACTOR, p, s->micro[DRAY__SIM_ACTOR]);
}

static bool begin_actor(sim *s, server *v)
{
    if (s->step > s->steps)
        return false;
    if (s->schedule.first_complete)
        claim_late(s, v);
    else
        claim_own(s, v);
    if (!v->count)
        return false;
    uint32_t most, rows = v->count, part = s->batch / (uint32_t)s->job->actor.optimiser_steps;
    double tokens = tokens_of(s, v, &most), seconds = s->costs[DRAY__SIM_ACTOR].fixed;
    bool late = s->schedule.first_complete;
    double now = !late ? rows : s->taken < part ? fmin(rows, part - s->taken) : 0;
    const dray__cost *c = &s->costs[DRAY__SIM_ACTOR];
    double gradients = c->row * rows + c->token * tokens;
    seconds += gradients * now / rows;
    s->deferred += gradients * (1 - now / rows);
    if (late && s->job->actor.old_log_prob == DRAY__OLD_TRAINER)
        seconds += s->costs[DRAY__SIM_OLD].row * rows + s->costs[DRAY__SIM_OLD].token * tokens;
    for (uint32_t i = 0; i < rows; i++) {
        const row *r = &s->partitions[v->claimed[i].partition].rows[v->claimed[i].row];
        double stale = (double)(s->step - 1 - r->version);
        if (counts(s)) {
            s->stale_sum += stale * r->length;
            s->stale_tokens += r->length;
            s->stale_max = fmax(s->stale_max, stale);
        }
    }
    s->taken += rows;
    if (s->taken == s->batch) {
        seconds += s->deferred + s->services->step_end;
        seconds += (double)(s->job->actor.epochs - 1) *
                   (c->row * s->batch + c->token * tokens / rows * s->batch);
        s->deferred = 0;
    }
    mark_claimed(s, v, 0, DRAY__SIM_ACTOR);
    begin(s, v, DRAY__SIM_ACTOR, seconds);
    return true;
}

static void end_step(sim *s)
{
    s->version = (int32_t)s->step;
    s->published[s->step] = s->now;
    s->insert_at = s->now + s->services->insert;
    while (s->low < s->made && s->partitions[s->low].trained == s->batch)
        s->low++;
    s->step++;
    s->taken = s->old = 0;
}

/* ---- engines --------------------------------------------------------------------------------- */

/* Returns the newest version that the engine could take now. */
static int32_t newest_ready(const sim *s)
{
    double way = s->schedule.open > 1 ? s->services->prefetch : 0;
    int32_t version = s->version;
    while (version > 0 && s->published[version] + way > s->now)
        version--;
    return version;
}

/* Returns when the engine could take the next one. */
static double next_ready(const sim *s)
{
    double way = s->schedule.open > 1 ? s->services->prefetch : 0, at = NEVER;
    for (int32_t v = s->version; v > 0 && s->published[v] + way > s->now; v--)
        at = fmin(at, s->published[v] + way);
    return at;
}

static bool may_take(const sim *s)
{
    uint32_t out = 0;
    for (uint32_t i = 0; s->schedule.in_turns && i < s->server_count; i++)
        out += s->servers[i].busy == TAKING;
    return out == 0;
}

static void take(sim *s, server *v, int32_t version)
{
    double from = fmax(v->last, s->now); /* finished rows may keep the engine until then */
    v->held = version;
    v->drains = false;
    if (s->continuous && v->count && s->job->update == DRAY__UPDATE_ANEW)
        for (uint32_t i = 0; i < v->count; i++) {
            row *r = &s->partitions[v->claimed[i].partition].rows[v->claimed[i].row];
            v->left[i] = r->length;
            r->version = version;
        }
    if (s->continuous && v->count) { /* rows under way make no progress meanwhile */
        v->last = from + s->services->take;
        return;
    }
    begin(s, v, TAKING, from - s->now + s->services->take);
    v->began = from;
}

static uint64_t admitted(const sim *s)
{
    if (s->schedule.exact)
        return UINT64_MAX;
    uint64_t most = (uint64_t)(s->rules.oldest - 1 + s->version + 1) * s->batch;
    return most > s->begun ? most - s->begun : 0;
}

static uint32_t first_open(const sim *s)
{
    for (uint32_t p = s->low; p < s->made; p++)
        for (uint32_t i = s->partitions[p].next[DRAY__SIM_ROLLOUT]; i < s->batch; i++)
            if (ready(s, &s->partitions[p].rows[i], DRAY__SIM_ROLLOUT))
                return p;
    return UINT32_MAX;
}

/* Finds rows that the engine may begin now, and adds them to v->claimed. Returns false when it
 * takes weights instead, or waits for v->cause. */
static bool find_rows(sim *s, server *v, uint32_t room, bool *takes)
{
    uint32_t p = first_open(s), had = v->count;
    int32_t ready_version = newest_ready(s);
    *takes = false;
    v->cause = DRAY_CAUSE_SAMPLES;
    if (p == UINT32_MAX)
        return false;
    int64_t step = (int64_t)p + 1;
    int32_t newest = (int32_t)dray__rules_newest(&s->rules, step),
            least = (int32_t)dray__rules_oldest(&s->rules, step);
    /* Replacements of lost rows may be in earlier steps. */
    if (s->schedule.first_complete && least > s->version)
        least = s->version;
    int32_t want = s->schedule.exact ? newest : ready_version;
    if (s->schedule.exact ? ready_version < newest : ready_version < least) {
        v->cause = DRAY_CAUSE_WEIGHTS;
        return false;
    }
    if (want != v->held && (v->held < least || s->schedule.exact || may_take(s))) {
        *takes = true;
        take(s, v, want);
        return false;
    }
    uint64_t most = admitted(s);
    bool up_to = s->continuous || s->schedule.first_complete;
    if (most < (up_to ? 1 : room)) {
        v->cause = DRAY_CAUSE_ADMISSION;
        return false;
    }
    room = most < room ? (uint32_t)most : room;
    if (!up_to) {
        claim_in_order(s, v, DRAY__SIM_ROLLOUT, p, room);
    } else {
        for (; p < s->made && v->count - had < room; p++)
            for (uint32_t i = s->partitions[p].next[DRAY__SIM_ROLLOUT];
                 i < s->batch && v->count - had < room; i++)
                if (ready(s, &s->partitions[p].rows[i], DRAY__SIM_ROLLOUT))
                    claim(v, p, i);
    }
    return v->count > had;
}

static bool begin_closed(sim *s, server *v)
{
    bool takes;
    uint32_t longest;
    if (!find_rows(s, v, s->micro[DRAY__SIM_ROLLOUT], &takes))
        return takes;
    double tokens = tokens_of(s, v, &longest);
    for (uint32_t i = 0; i < v->count; i++)
        s->partitions[v->claimed[i].partition].rows[v->claimed[i].row].version = v->held;
    s->begun += v->count;
    mark_claimed(s, v, 0, DRAY__SIM_ROLLOUT);
    begin(s, v, DRAY__SIM_ROLLOUT,
          s->costs[DRAY__SIM_ROLLOUT].fixed + s->token_fixed * longest + s->token_row * tokens);
    return true;
}

static double token_seconds(const sim *s, const server *v)
{
    return s->token_fixed + s->token_row * v->count;
}

static void advance(const sim *s, server *v)
{
    if (s->now <= v->last)
        return;
    for (uint32_t i = 0; i < v->count; i++)
        v->left[i] -= (s->now - v->last) / token_seconds(s, v);
    v->last = s->now;
}

static double next_finish(const sim *s, const server *v)
{
    double least = NEVER;
    for (uint32_t i = 0; i < v->count; i++)
        least = fmin(least, v->left[i]);
    return v->count ? v->last + fmax(least, 0) * token_seconds(s, v) : NEVER;
}

/* Removes finished rows and begins others. */
static bool go_on(sim *s, server *v)
{
    bool any = false, takes = false;
    if (v->busy == TAKING)
        return false;
    advance(s, v);
    /* What is left of a row may be too short to change the time. */
    double each = token_seconds(s, v);
    for (uint32_t i = 0; i < v->count;) {
        if (v->left[i] > 1e-9 && v->last + v->left[i] * each > s->now) {
            i++;
            continue;
        }
        s->partitions[v->claimed[i].partition].rows[v->claimed[i].row].done |=
            bit(DRAY__SIM_ROLLOUT);
        v->claimed[i] = v->claimed[v->count - 1];
        v->left[i] = v->left[v->count - 1];
        v->count--;
        v->last += s->costs[DRAY__SIM_ROLLOUT].fixed;
        any = true;
    }
    int32_t there = newest_ready(s);
    if (!s->schedule.exact && there > v->held && v->count) {
        if (s->job->update != DRAY__UPDATE_BOUNDARY)
            take(s, v, there);
        else
            v->drains = may_take(s);
    }
    if (v->drains && v->count)
        return any;
    uint32_t had = v->count, slots = s->micro[DRAY__SIM_ROLLOUT];
    if (had < slots && find_rows(s, v, slots - had, &takes)) {
        for (uint32_t i = had; i < v->count; i++) {
            row *r = &s->partitions[v->claimed[i].partition].rows[v->claimed[i].row];
            r->version = v->held;
            v->left[i] = r->length;
        }
        s->begun += v->count - had;
        mark_claimed(s, v, had, DRAY__SIM_ROLLOUT);
        if (!had) /* the last rows may keep the engine for a time yet */
            v->last = fmax(v->last, s->now);
        any = true;
    }
    return any || takes;
}

/* ---- servers --------------------------------------------------------------------------------- */

static bool begin_task(sim *s, server *v, int task)
{
    uint32_t most;
    v->count = 0;
    if (task == DRAY__SIM_ACTOR)
        return begin_actor(s, v);
    if (s->schedule.first_complete)
        claim_what_is_there(s, v, task, s->micro[task]);
    for (uint32_t p = s->low; !s->schedule.first_complete && p < s->made && !v->count; p++)
        if (s->partitions[p].next[task] < s->batch &&
            (task != DRAY__SIM_OLD || (int64_t)p + 1 == s->step))
            claim_in_order(s, v, task, p, s->micro[task]);
    if (!v->count)
        return false;
    double tokens = tokens_of(s, v, &most);
    mark_claimed(s, v, 0, task);
    begin(s, v, task, cost_of(&s->costs[task], v->count, tokens));
    return true;
}

static bool try_to_begin(sim *s, server *v)
{
    v->cause = DRAY_CAUSE_SAMPLES;
    if (v->tasks & bit(DRAY__SIM_ROLLOUT)) {
        if (s->continuous)
            return go_on(s, v);
        v->count = 0;
        return begin_closed(s, v);
    }
    for (int task = 0; task < DRAY__SIM_TASKS; task++)
        if (v->tasks & bit(task) && begin_task(s, v, task))
            return true;
    return false;
}

static void complete(sim *s, server *v)
{
    int task = v->busy;
    double took = v->until - v->began;
    v->busy = IDLE;
    if (task == TAKING) {
        s->transfer[v->role] += counts(s) ? took : 0;
        v->last = s->now;
        return;
    }
    for (int c = 0; c < DRAY__SIM_CAUSES && counts(s); c++)
        s->idle[v->role][c] += took * s->costs[task].wait[c];
    for (uint32_t i = 0; i < v->count; i++) {
        partition *p = &s->partitions[v->claimed[i].partition];
        p->rows[v->claimed[i].row].done |= bit(task);
        p->trained += task == DRAY__SIM_ACTOR;
    }
    v->count = 0;
    if (task == DRAY__SIM_ACTOR && s->taken == s->batch)
        end_step(s);
}

static bool works(const sim *s, const server *v)
{
    return v->busy != IDLE || (s->continuous && v->tasks & bit(DRAY__SIM_ROLLOUT) && v->count);
}

static double next_event(const sim *s)
{
    double at = fmin(s->insert_at, next_ready(s));
    for (uint32_t i = 0; i < s->server_count; i++) {
        const server *v = &s->servers[i];
        if (v->busy != IDLE)
            at = fmin(at, v->until);
        else if (s->continuous && v->tasks & bit(DRAY__SIM_ROLLOUT))
            at = fmin(at, next_finish(s, v));
    }
    return at;
}

static int run(sim *s, dray_error *error)
{
    while (s->step <= s->steps) {
        for (bool changed = true; changed;) {
            changed = false;
            for (uint32_t i = 0; i < s->server_count; i++)
                if (s->servers[i].busy == IDLE)
                    changed = try_to_begin(s, &s->servers[i]) || changed;
            changed = changed || s->reopened;
            s->reopened = false;
        }
        double next = next_event(s);
        if (next == NEVER)
            return dray__fail(error, DRAY_EINVALID,
                              "the job stands still in step %lld: no task has rows that it may "
                              "take",
                              (long long)s->step);
        for (uint32_t i = 0; i < s->server_count && counts(s); i++)
            if (!works(s, &s->servers[i]))
                s->idle[s->servers[i].role][s->servers[i].cause] += next - s->now;
        s->now = next;
        if (s->insert_at <= s->now)
            insert(s);
        for (uint32_t i = 0; i < s->server_count; i++)
            if (s->servers[i].busy != IDLE && s->servers[i].until <= s->now)
                complete(s, &s->servers[i]);
    }
    return DRAY_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

static double by_ranks(const sim *s, int64_t had, int64_t has)
{
    return s->services->by_ranks && has > 0 ? (double)had / (double)has : 1;
}

static void set_costs(sim *s)
{
    const dray__job *job = s->job;
    const dray__job_role *trainer = dray__job_role_of(job, "actor"),
                         *engine = dray__job_role_of(job, "rollout");
    double train = by_ranks(s, s->services->trainer_ranks, trainer->ranks),
           made = by_ranks(s, s->services->engine_ranks, engine->ranks);
    memcpy(s->costs, s->services->tasks, sizeof(s->costs));
    s->costs[DRAY__SIM_ACTOR].row *= train;
    s->costs[DRAY__SIM_ACTOR].token *= train;
    s->costs[DRAY__SIM_OLD].row *= train;
    s->costs[DRAY__SIM_OLD].token *= train;
    s->token_fixed = s->services->token_fixed * made;
    s->token_row = s->services->token_row * made;
    const int64_t micro[DRAY__SIM_TASKS] = {
        job->rollout.micro_batch,      job->reward.micro_batch,    job->reference.micro_batch,
        job->old_log_prob.micro_batch, job->advantage.micro_batch, job->actor.micro_batch};
    for (int i = 0; i < DRAY__SIM_TASKS; i++)
        s->micro[i] = (uint32_t)(micro[i] < s->batch ? micro[i] : s->batch);
    uint32_t group = s->rules.group, *advantage = &s->micro[DRAY__SIM_ADVANTAGE];
    *advantage = (*advantage + group - 1) / group * group;
}

/* Fills in the tasks that each task needs, among the tasks of the job. */
static uint8_t add_needs(sim *s)
{
    const dray__job *job = s->job;
    uint8_t has = bit(DRAY__SIM_ROLLOUT) | bit(DRAY__SIM_REWARD) | bit(DRAY__SIM_ACTOR);
    has |= dray__job_has(job, "reference") ? bit(DRAY__SIM_REFERENCE) : 0;
    has |= dray__job_has(job, "old_log_prob") ? bit(DRAY__SIM_OLD) : 0;
    has |= dray__job_has(job, "advantage") ? bit(DRAY__SIM_ADVANTAGE) : 0;
    s->needs[DRAY__SIM_REWARD] = s->needs[DRAY__SIM_REFERENCE] = s->needs[DRAY__SIM_OLD] =
        bit(DRAY__SIM_ROLLOUT);
    s->needs[DRAY__SIM_ADVANTAGE] = has & (bit(DRAY__SIM_ROLLOUT) | bit(DRAY__SIM_REWARD) |
                                           bit(DRAY__SIM_REFERENCE) | bit(DRAY__SIM_OLD));
    s->needs[DRAY__SIM_ACTOR] = has & (uint8_t)~bit(DRAY__SIM_ACTOR);
    return has;
}

static int add_servers(sim *s, uint8_t has, dray_error *error)
{
    uint8_t seen = 0;
    uint64_t count = 0;
    for (uint32_t i = 0; i < s->job->role_count; i++)
        count += (uint64_t)s->job->roles[i].instances;
    if (s->job->role_count > ROLES || count > SERVERS_MOST)
        return dray__fail(error, DRAY_EINVALID,
                          "expected at most %d roles with %d instances to simulate", ROLES,
                          SERVERS_MOST);
    s->servers = calloc(count + 1, sizeof(*s->servers));
    for (uint32_t i = 0; s->servers && i < s->job->role_count; i++) {
        const dray__job_role *role = &s->job->roles[i];
        uint8_t tasks = 0;
        for (int t = 0; t < DRAY__SIM_TASKS; t++)
            tasks |= has & bit(t) && dray__role_has(role, dray__sim_names[t]) ? bit(t) : 0;
        seen |= tasks;
        for (int64_t k = 0; tasks && k < role->instances; k++) {
            server *v = &s->servers[s->server_count++];
            *v = (server){.role = i, .tasks = tasks, .busy = IDLE, .held = 0};
            v->claimed = calloc(s->batch, sizeof(*v->claimed));
            v->left = calloc(s->batch, sizeof(*v->left));
            if (!v->claimed || !v->left)
                return dray__nomem(error);
            s->role_servers[i]++;
        }
    }
    if (!s->servers)
        return dray__nomem(error);
    return seen == has ? DRAY_OK
                       : dray__fail(error, DRAY_EINVALID,
                                    "expected a role for each task from rollout to actor to "
                                    "simulate");
}

static int refuse(const dray__job *job, dray_error *error)
{
    if (dray__job_has(job, "critic"))
        return dray__fail(error, DRAY_EINVALID,
                          "advantage.method: a job with a value model is not simulated");
    if (job->actor.optimiser_steps < 1 || dray__job_batch(job) > 1 << 20)
        return dray__fail(error, DRAY_EINVALID,
                          "rollout.prompts: expected at most %d samples a step to simulate",
                          1 << 20);
    return DRAY_OK;
}

static int open_sim(sim *s, dray_error *error)
{
    const dray__job *job = s->job;
    s->schedule = dray__schedule_of(job);
    s->rules = dray__schedule_rules(job);
    /* Engines may work on prompts after the last simulated step, if the job has more steps. */
    s->total = s->steps + (int64_t)s->rules.open;
    s->total = s->total < job->steps ? s->total : job->steps;
    s->total = s->total > s->steps ? s->total : s->steps;
    s->batch = (uint32_t)dray__job_batch(job);
    s->continuous = job->rollout.batching == DRAY__BATCHING_CONTINUOUS;
    s->step = 1;
    s->first = 1 + (s->steps > 2 * WARMUP ? WARMUP : s->steps / 2);
    s->last = s->steps > s->first ? s->steps - 1 : s->steps;
    s->partitions = calloc((size_t)s->total + 1, sizeof(*s->partitions));
    s->published = calloc((size_t)s->steps + 2, sizeof(*s->published));
    if (!s->partitions || !s->published)
        return dray__nomem(error);
    for (int64_t i = 0; i < s->total; i++)
        if (!(s->partitions[i].rows = calloc(s->batch, sizeof(row))))
            return dray__nomem(error);
    int rc = add_servers(s, add_needs(s), error);
    if (rc)
        return rc;
    set_costs(s);
    insert(s);
    return DRAY_OK;
}

static void close_sim(sim *s)
{
    for (int64_t i = 0; s->partitions && i < s->total; i++)
        free(s->partitions[i].rows);
    for (uint32_t i = 0; i < s->server_count; i++) {
        free(s->servers[i].claimed);
        free(s->servers[i].left);
    }
    free(s->servers);
    free(s->partitions);
    free(s->published);
}

static void add_up(const sim *s, dray__simulated *out)
{
    double whole = s->published[s->last] - s->published[s->first - 1],
           counted = (double)(s->last - s->first + 1);
    *out = (dray__simulated){.first = s->first, .last = s->last, .roles = s->job->role_count};
    out->step_seconds = whole / counted;
    out->samples_per_s = s->batch / out->step_seconds;
    out->staleness_mean = s->stale_tokens > 0 ? s->stale_sum / s->stale_tokens : 0;
    out->staleness_max = s->stale_max;
    out->made_anew = s->anew / counted;
    for (uint32_t i = 0; i < s->job->role_count; i++) {
        double all = whole * s->role_servers[i];
        for (int c = 0; c < DRAY__SIM_CAUSES && all > 0; c++)
            out->idle[i][c] = s->idle[i][c] / all;
        out->transfer[i] = all > 0 ? s->transfer[i] / all : 0;
    }
}

int dray__simulate_once(const dray__job *job, const dray__services *services, int64_t steps,
                        uint64_t seed, dray__simulated *out, dray_error *error)
{
    sim s = {.job = job, .services = services, .steps = steps, .seed = seed, .insert_at = NEVER};
    int rc = refuse(job, error);
    if (!rc)
        rc = open_sim(&s, error);
    if (!rc)
        rc = run(&s, error);
    if (!rc)
        add_up(&s, out);
    close_sim(&s);
    return rc;
}
