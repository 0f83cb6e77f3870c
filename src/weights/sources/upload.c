/* Pinned memory that ranks on several GPUs need, as a source (upload.h): the division of the
 * uploads, and the route. It uploads this rank's share in rounds, and copies the shares of others
 * from their GPUs once they are uploaded. It never blocks. When another process ends, is silent or
 * refuses, this rank uploads the rest of its share itself. */
#include "weights/sources/upload.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/words.h"
#include "memory/cuda_memory.h"
#include "weights/program/compile.h"
#include "weights/transfer/cohort.h"

#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Smaller stripes are uploaded by every rank, because sharing costs more. */
#define SHARED_MIN ((uint64_t)32 << 10)
enum { PAGE = 4096, ROUNDS = 4, LAST = ROUNDS - 1 };

/* ---- progress -------------------------------------------------------------------------------- */

struct progress {
    _Atomic uint64_t run, rounds, given_up;
};

static struct progress *progress_of(const dray_region *region)
{
    return (struct progress *)(uintptr_t)dray_region_base(region);
}

int dray__progress_new(dray_region **out, dray_error *error)
{
    return dray_region_alloc(DRAY_REGION_SHARED, PAGE, "progress", out, error);
}

bool dray__progress_is(const dray_region *region)
{
    return dray_region_get_kind(region) == DRAY_REGION_SHARED &&
           dray_region_bytes(region) >= sizeof(struct progress);
}

static void begin_run(dray_region *region, uint64_t run)
{
    struct progress *b = progress_of(region);
    atomic_store(&b->rounds, 0);
    atomic_store(&b->run, run);
}

static void enter_round(dray_region *region, uint32_t round)
{
    atomic_fetch_or(&progress_of(region)->rounds, (uint64_t)1 << round);
}

void dray__progress_end(dray_region *region, uint64_t run)
{
    struct progress *b = region ? progress_of(region) : NULL;
    const uint64_t all = ((uint64_t)1 << ROUNDS) - 1;
    if (b && (atomic_load(&b->run) != run || atomic_load(&b->rounds) != all))
        atomic_store(&b->given_up, run);
}

enum news { NOT_YET, HERE, GIVEN_UP };

static enum news look_for(const dray_region *region, uint64_t run, uint32_t round)
{
    struct progress *b = progress_of(region);
    uint64_t begun = atomic_load(&b->run), rounds = atomic_load(&b->rounds);
    if (begun == run && rounds >> round & 1 && atomic_load(&b->run) == run)
        return HERE;
    return atomic_load(&b->given_up) == run ? GIVEN_UP : NOT_YET;
}

/* ---- the division ---------------------------------------------------------------------------- */

/* The bytes that are read from one member in one round. */
struct upload_turn {
    uint32_t member, round, step; /* step: of the program */
    uint64_t bytes;
};

/* Steps 0 to ROUNDS - 1 upload this rank's share; the last of them has the unshared bytes, too.
 * Each turn has a step of its own. */
struct shared_program {
    dray__program *program;
    struct upload_turn *turns;
    uint32_t turn_count;
    bool covers; /* it uploads all that others expect from this rank */
};

static uint32_t turn_of(uint32_t member, uint32_t round)
{
    return member * ROUNDS + round;
}

struct dray__upload {
    const dray__sources *sources;
    const dray__destination *destination;
    dray__cohort *cohort;
    bool *wanted; /* by member */
    struct shared_program made;
};

/* A stripe of a block, and the rank that uploads it. */
struct stripe {
    dray__rect rect;
    uint32_t member, block, round;
    bool shared;
};

static bool on_this_host(const dray__source *member, const dray__destination *destination)
{
    return member->host == destination->host && member->mapped && member->has_progress;
}

/* Returns a stripe of a block. It is shared only if both ranks use the same name for the tensor, so
 * that both decide in the same way; a tensor that is an alias on one side is not shared. */
static struct stripe stripe_of(const dray__upload *f, uint32_t block, uint32_t number)
{
    const dray_layout *own = f->destination->layout;
    const dray_tensor_info *tensor = dray_layout_tensor(own, dray_layout_block(own, block)->tensor);
    struct stripe s = {.rect = dray__cohort_stripe(f->cohort, block, number)};
    uint32_t holders;
    s.member = dray__cohort_turn(f->cohort, block, number, ROUNDS, &s.block, &s.round, &holders);
    const dray_layout *theirs = f->sources->cohort[s.member].layout;
    uint64_t bytes = dray__rect_elements(&s.rect) * dray_dtype_size((dray_dtype)tensor->dtype);
    s.shared =
        holders > 1 && bytes >= SHARED_MIN &&
        strcmp(tensor->name,
               dray_layout_tensor(theirs, dray_layout_block(theirs, s.block)->tensor)->name) == 0;
    return s;
}

static bool any_pinned(const dray__sources *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        for (uint32_t r = 0; r < dray_layout_region_count(s->sources[i].layout); r++)
            if (dray_layout_region(s->sources[i].layout, r)->kind == DRAY_REGION_PINNED &&
                s->sources[i].host == s->host)
                return true;
    return false;
}

/* Finds the members that this rank reads from. Returns false when nothing is shared. */
static bool find_wanted(dray__upload *f)
{
    uint32_t self = dray__cohort_self(f->cohort);
    bool any = false;
    for (uint32_t b = 0; b < dray_layout_block_count(f->destination->layout); b++)
        for (uint32_t i = 0;
             dray__cohort_shared(f->cohort, b) && i < dray__cohort_stripes(f->cohort, b); i++) {
            struct stripe s = stripe_of(f, b, i);
            any |= s.shared;
            f->wanted[s.member] |= s.shared && s.member != self;
        }
    return any;
}

static void forget_program(dray__upload *f)
{
    dray__program_free(f->made.program);
    free(f->made.turns);
    f->made = (struct shared_program){0};
}

void dray__upload_forget(void *upload)
{
    dray__upload *f = upload;
    forget_program(f);
    dray__cohort_free(f->cohort);
    free(f->wanted);
    free(f);
}

int dray__upload_find(dray__sources *s, const dray__destination *destination, dray_error *error)
{
    if (!any_pinned(s))
        return DRAY_OK;
    dray__upload *f = calloc(1, sizeof *f);
    if (!f)
        return dray__nomem(error);
    f->sources = s;
    f->destination = destination;
    f->wanted = calloc((size_t)s->cohort_count + 1, sizeof *f->wanted);
    int rc = f->wanted ? dray__cohort_new(s, destination, on_this_host, &f->cohort, error)
                       : dray__nomem(error);
    if (rc || !find_wanted(f)) {
        dray__upload_forget(f);
        return rc == DRAY_ENOENT ? DRAY_OK : rc;
    }
    for (uint32_t i = 0; i < s->cohort_count; i++)
        if (s->cohort[i].local) /* it may take its memory back at any time */
            f->wanted[i] = false;
    return dray__kept_add(&s->kept, dray__upload_forget, f, error);
}

bool dray__upload_wants(const dray__upload *f, uint32_t member)
{
    return f->wanted[member];
}

void dray__upload_lose(dray__upload *f, uint32_t member)
{
    f->wanted[member] = false;
    forget_program(f);
}

/* Returns true for pinned memory, of which uploads can be shared. */
static bool reaches(const dray__transfer *h, const dray__op *op, const dray__placement *placement)
{
    (void)placement;
    const dray__source *source = &h->sources->sources[op->copy.source];
    return dray__upload_of(h->sources) && h->options.progress && h->options.run &&
           h->options.strategy == DRAY_STRATEGY_DIRECT && !op->transform && !source->local &&
           dray_layout_region(source->layout, op->copy.source_region)->kind == DRAY_REGION_PINNED &&
           dray__program_takes(h, op);
}

/* ---- compiling ------------------------------------------------------------------------------- */

struct upload_making {
    dray__compiler c;
    dray__upload *uploads;
    const bool *instead; /* NULL for everything */
    uint64_t *turn_bytes;
    uint64_t covered; /* elements that others may read from this rank */
};

static int upload(struct upload_making *m, const dray__op *op, const dray_copy *copy, uint32_t step,
                  dray_error *error)
{
    const dray_region *to = m->c.transfer->destination->regions[copy->destination_region];
    dray__ends ends;
    int rc = dray__ends_of(&m->c, copy, to, &ends, error);
    if (rc)
        return rc;
    return dray__draft_move(&m->c, &ends, copy, op, step, 0) ? DRAY_OK : dray__nomem(error);
}

/* Returns the member's region, and makes the copy read from its block; NULL when it cannot be
 * reached. */
static const dray_region *out_of_member(const struct upload_making *m, const struct stripe *s,
                                        dray_copy *copy)
{
    const dray__source *member = &m->uploads->sources->cohort[s->member];
    dray__copy_from_block(copy, member->layout, s->block);
    return member->regions ? member->regions[copy->source_region] : NULL;
}

static int take(struct upload_making *m, const dray__op *op, const struct stripe *s,
                const dray_copy *part, dray_error *error)
{
    const dray_region *to = m->c.transfer->destination->regions[part->destination_region];
    uint32_t turn = turn_of(s->member, s->round);
    dray_copy copy = *part;
    const dray_region *from = out_of_member(m, s, &copy);
    dray__ends ends = {.from = from, .to = to, .device = to->device, .lane = s->member};
    if (!from || !from->device_address || dray__region_reach(from, to->device, NULL))
        return upload(m, op, part, LAST, error);
    m->turn_bytes[turn] += dray__copy_bytes(part);
    return dray__draft_move(&m->c, &ends, &copy, op, ROUNDS + turn, 0) ? DRAY_OK
                                                                       : dray__nomem(error);
}

static int compile_stripe(struct upload_making *m, const dray__op *op, const struct stripe *s,
                          const dray__rect *cross, dray_error *error)
{
    dray_copy part = dray__copy_cut(&op->copy, cross);
    bool mine = s->member == dray__cohort_self(m->uploads->cohort);
    bool taken = s->shared && !mine && m->uploads->wanted[s->member];
    if (m->instead)
        return taken && m->instead[turn_of(s->member, s->round)] ? upload(m, op, &part, 0, error)
                                                                 : DRAY_OK;
    if (taken)
        return take(m, op, s, &part, error);
    if (s->shared && mine)
        m->covered += dray__rect_elements(cross);
    return upload(m, op, &part, s->shared && mine ? s->round : LAST, error);
}

static bool is_plain(const dray__op *op)
{
    return op->copy.source_dtype == op->copy.destination_dtype;
}

static int compile_op(struct upload_making *m, const dray__op *op, dray_error *error)
{
    const dray__cohort *cohort = m->uploads->cohort;
    dray__rect whole = dray__copy_rect(&op->copy), cross;
    int rc = DRAY_OK;
    if (!is_plain(op) || !dray__cohort_shared(cohort, op->block))
        return m->instead ? DRAY_OK : upload(m, op, &op->copy, LAST, error);
    for (uint32_t i = 0; i < dray__cohort_stripes(cohort, op->block) && rc == DRAY_OK; i++) {
        struct stripe s = stripe_of(m->uploads, op->block, i);
        if (dray__rect_cross(&whole, &s.rect, &cross))
            rc = compile_stripe(m, op, &s, &cross, error);
    }
    return rc;
}

static int compile(struct upload_making *m, const uint64_t *ops, uint64_t count,
                   dray__program **out, dray_error *error)
{
    const dray__transfer *h = m->c.transfer;
    dray__program *p = dray__program_new(h, ops, count, 0);
    int rc = p ? DRAY_OK : dray__nomem(error);
    m->c.program = p;
    for (uint64_t i = 0; i < count && rc == DRAY_OK; i++)
        rc = compile_op(m, &h->sources->ops[ops[i]], error);
    if (rc == DRAY_OK)
        rc = dray__program_finish(&m->c, error);
    dray__drafts_free(&m->c);
    if (rc)
        dray__program_free(p);
    else
        *out = p;
    return rc;
}

/* Returns the number of shared elements that others may read from this rank. */
static uint64_t expected(const dray__upload *f, const dray__transfer *h)
{
    uint32_t blocks = dray_layout_block_count(f->destination->layout);
    bool *odd = calloc((size_t)blocks + 1, sizeof *odd);
    uint64_t elements = 0;
    for (uint64_t i = 0; odd && i < h->sources->op_count; i++)
        odd[h->sources->ops[i].block] |=
            h->sources->ops[i].transform || !is_plain(&h->sources->ops[i]);
    for (uint32_t b = 0; odd && b < blocks; b++)
        for (uint32_t i = 0;
             !odd[b] && dray__cohort_shared(f->cohort, b) && i < dray__cohort_stripes(f->cohort, b);
             i++) {
            struct stripe s = stripe_of(f, b, i);
            if (s.shared && s.member == dray__cohort_self(f->cohort))
                elements += dray__rect_elements(&s.rect);
        }
    bool known = odd != NULL;
    free(odd);
    return known ? elements : UINT64_MAX;
}

/* Returns the program of an earlier update, or compiles one. The upload owns it. */
static int find_program(dray__upload *f, const dray__transfer *h, const uint64_t *ops,
                        uint64_t count, const struct shared_program **out, dray_error *error)
{
    uint32_t most = f->sources->cohort_count * ROUNDS;
    if (f->made.program && dray__program_fits(f->made.program, h, ops, count, 0)) {
        *out = &f->made;
        return DRAY_OK;
    }
    forget_program(f);
    struct upload_making m = {
        .c.transfer = h, .uploads = f, .turn_bytes = calloc(most, sizeof *m.turn_bytes)};
    f->made.turns = calloc(most, sizeof *f->made.turns);
    int rc = m.turn_bytes && f->made.turns ? compile(&m, ops, count, &f->made.program, error)
                                           : dray__nomem(error);
    for (uint32_t t = 0; rc == DRAY_OK && t < most; t++)
        if (m.turn_bytes[t])
            f->made.turns[f->made.turn_count++] =
                (struct upload_turn){t / ROUNDS, t % ROUNDS, ROUNDS + t, m.turn_bytes[t]};
    f->made.covers = m.covered == expected(f, h);
    free(m.turn_bytes);
    if (rc)
        forget_program(f);
    else
        *out = &f->made;
    return rc;
}

/* Compiles one step that uploads the bytes of the turns in `instead`. The caller frees *out
 * (dray__program_free). */
static int upload_instead(dray__upload *f, const dray__transfer *h, const uint64_t *ops,
                          uint64_t count, const bool *instead, dray__program **out,
                          dray_error *error)
{
    struct upload_making m = {.c.transfer = h, .uploads = f, .instead = instead};
    return compile(&m, ops, count, out, error);
}

#define SILENT_NS (3 * DRAY__SECOND) /* the longest time without progress of a member */
#define LOOK_NS 100000               /* between checks of others' progress */

enum turn_state { WAITING, TAKING, INSTEAD, DONE };

/* A member of the cohort, as the route sees it. */
struct member {
    int pidfd; /* -1 when its end cannot be noticed */
    int64_t brought_ns, held_ns;
};

struct upload_route {
    dray__transfer *transfer;
    dray__upload *uploads;
    const struct shared_program *made;
    const uint64_t *ops;
    uint64_t count;
    uint8_t *states; /* of turns */
    struct member *members;
    dray__program **instead; /* one for each member that failed */
    uint32_t instead_count, instead_done;
    uint32_t round, turns_done;
    bool uploading;
    dray__waker waker;
    uint64_t taken_bytes;
    int64_t began_ns, held_ns, held_since_ns; /* held: time spent only waiting for others */
    uint32_t held_by;
};

/* ---- the route: ends ------------------------------------------------------------------------- */

static const dray__source *member_of(const struct upload_route *l, uint32_t member)
{
    return &l->transfer->sources->cohort[member];
}

static void route_close(void *state)
{
    struct upload_route *l = state;
    dray__progress_end(l->transfer->options.progress, l->transfer->options.run);
    if (l->made)
        dray__program_stop(l->made->program);
    for (uint32_t i = 0; i < l->instead_count; i++) {
        dray__program_stop(l->instead[i]);
        dray__program_free(l->instead[i]);
    }
    for (uint32_t i = 0; l->members && i < l->transfer->sources->cohort_count; i++)
        if (l->members[i].pidfd >= 0)
            close(l->members[i].pidfd);
    dray__waker_close(&l->waker);
    free(l->instead);
    free(l->members);
    free(l->states);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Opens a member's pidfd, which shows its end; that works only in the same namespace of processes.
 */
static void open_member(struct upload_route *l, uint32_t index)
{
    struct member *m = &l->members[index];
    if (m->pidfd < 0)
        m->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)member_of(l, index)->pid, 0);
    if (m->pidfd >= 0)
        dray__waker_add(&l->waker, m->pidfd, NULL);
}

static int route_init(struct upload_route *l, dray_error *error)
{
    uint32_t members = l->transfer->sources->cohort_count;
    l->members = calloc(members, sizeof *l->members);
    l->instead = calloc(members, sizeof(dray__program *));
    if (!l->members || !l->instead)
        return dray__nomem(error);
    for (uint32_t i = 0; i < members; i++)
        l->members[i] = (struct member){.pidfd = -1, .brought_ns = dray__now()};
    int rc = find_program(l->uploads, l->transfer, l->ops, l->count, &l->made, error);
    if (rc)
        return rc;
    l->states = calloc((size_t)l->made->turn_count + 1, sizeof *l->states);
    if (!l->states)
        return dray__nomem(error);
    rc = dray__waker_open(&l->waker, true, error);
    if (rc == DRAY_OK)
        rc = dray__waker_add(&l->waker, l->made->program->waker.fd, error);
    for (uint32_t i = 0; i < l->made->turn_count; i++)
        open_member(l, l->made->turns[i].member);
    return rc;
}

static int route_open(dray__route *route, dray_error *error)
{
    struct upload_route *l = route->state;
    const dray__transfer_options *o = &route->transfer->options;
    *l = (struct upload_route){.transfer = route->transfer,
                               .uploads = dray__upload_of(route->transfer->sources),
                               .ops = route->ops,
                               .count = route->count,
                               .waker = DRAY__WAKER_CLOSED,
                               .began_ns = dray__now()};
    int rc = route_init(l, error);
    if (rc)
        return rc;
    route->fd = l->waker.fd;
    if (l->made->covers)
        begin_run(o->progress, o->run);
    else
        dray__progress_end(o->progress, o->run);
    return DRAY_OK;
}

/* ---- this rank's share ----------------------------------------------------------------------- */

static void enter(const struct upload_route *l, const dray__program *program, uint32_t step)
{
    if (l->transfer->options.verify)
        dray__program_enter(l->transfer, program, step);
}

/* Starts the rounds one behind the other: if all ran at once, all would end at the same time. The
 * GPU goes from one to the next by itself, and reads each one back during the next. */
static int start_rounds(struct upload_route *l, dray_error *error)
{
    int rc = dray__program_start(l->made->program, 0, error);
    for (uint32_t r = 1; r < ROUNDS && rc == DRAY_OK; r++)
        rc = dray__program_follow(l->made->program, r, r - 1, error);
    l->uploading = true;
    return rc;
}

static int upload_rounds(struct upload_route *l, dray_error *error)
{
    const dray__program *p = l->made->program;
    int rc = l->uploading ? DRAY_OK : start_rounds(l, error);
    if (rc)
        return rc;
    while (l->round < ROUNDS) {
        rc = dray__program_poll(p, l->round, error);
        if (rc)
            return rc == DRAY_EAGAIN ? DRAY_OK : rc;
        enter(l, p, l->round);
        if (l->made->covers)
            enter_round(l->transfer->options.progress, l->round);
        l->round++;
    }
    return DRAY_OK;
}

/* ---- others' shares ---------------------------------------------------------------------------
 */

static const dray_region *progress_in(const dray__source *member)
{
    return member->regions[dray_layout_region_count(member->layout)];
}

static bool has_ended(const struct member *m)
{
    struct pollfd p = {.fd = m->pidfd, .events = POLLIN};
    return m->pidfd >= 0 && poll(&p, 1, 0) > 0;
}

/* Uploads the bytes that were not read from a member yet. */
static int give_up(struct upload_route *l, uint32_t member, dray_error *error)
{
    uint32_t most = l->transfer->sources->cohort_count * ROUNDS;
    bool *instead = calloc(most, sizeof *instead);
    dray__program *p = NULL;
    int rc = instead ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < l->made->turn_count && rc == DRAY_OK; i++) {
        const struct upload_turn *turn = &l->made->turns[i];
        if (turn->member != member || l->states[i] != WAITING)
            continue;
        instead[turn_of(turn->member, turn->round)] = true;
        l->states[i] = INSTEAD;
        l->turns_done++;
    }
    if (rc == DRAY_OK)
        rc = upload_instead(l->uploads, l->transfer, l->ops, l->count, instead, &p, error);
    free(instead);
    if (rc)
        return rc;
    l->instead[l->instead_count++] = p;
    rc = dray__waker_add(&l->waker, p->waker.fd, error);
    return rc ? rc : dray__program_start(p, 0, error);
}

/* Members are late only while this rank has no work of its own left. */
static bool is_late(const struct upload_route *l, const struct member *m, int64_t now)
{
    return l->round == ROUNDS && now - m->brought_ns > SILENT_NS;
}

static int look_at(struct upload_route *l, uint32_t index, int64_t now, dray_error *error)
{
    const struct upload_turn *turn = &l->made->turns[index];
    struct member *m = &l->members[turn->member];
    if (l->states[index] == TAKING) {
        int rc = dray__program_poll(l->made->program, turn->step, error);
        if (rc)
            return rc == DRAY_EAGAIN ? DRAY_OK : rc;
        enter(l, l->made->program, turn->step);
        l->states[index] = DONE;
        l->turns_done++;
        l->taken_bytes += turn->bytes;
        return DRAY_OK;
    }
    enum news news =
        look_for(progress_in(member_of(l, turn->member)), l->transfer->options.run, turn->round);
    if (news == HERE) {
        m->brought_ns = now;
        l->states[index] = TAKING;
        return dray__program_start(l->made->program, turn->step, error);
    }
    if (l->round < ROUNDS)
        m->brought_ns = now;
    return news == GIVEN_UP || is_late(l, m, now) || has_ended(m) ? give_up(l, turn->member, error)
                                                                  : DRAY_OK;
}

static int take_turns(struct upload_route *l, int64_t now, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < l->made->turn_count && rc == DRAY_OK; i++)
        if (l->states[i] == WAITING || l->states[i] == TAKING)
            rc = look_at(l, i, now, error);
    for (uint32_t i = l->instead_done; i < l->instead_count && rc == DRAY_OK; i++) {
        rc = dray__program_poll(l->instead[i], 0, error);
        if (rc)
            return rc == DRAY_EAGAIN ? DRAY_OK : rc;
        enter(l, l->instead[i], 0);
        l->instead_done++;
    }
    return rc;
}

/* ---- stepping -------------------------------------------------------------------------------- */

/* Counts the time in which only the work of others is outstanding. */
static void note_waiting(struct upload_route *l, int64_t now)
{
    bool waits = l->round == ROUNDS && l->instead_done == l->instead_count;
    uint32_t whom = UINT32_MAX;
    for (uint32_t i = 0; i < l->made->turn_count && waits; i++) {
        waits = l->states[i] != TAKING;
        if (l->states[i] == WAITING)
            whom = l->made->turns[i].member;
    }
    waits = waits && whom != UINT32_MAX;
    if (l->held_since_ns) {
        l->held_ns += now - l->held_since_ns;
        l->members[l->held_by].held_ns += now - l->held_since_ns;
    }
    l->held_since_ns = waits ? now : 0;
    if (waits)
        l->held_by = whom;
}

static int route_step(dray__route *route, int64_t until_ns, dray_error *error)
{
    struct upload_route *l = route->state;
    (void)until_ns;
    int rc = upload_rounds(l, error);
    if (rc == DRAY_OK)
        rc = take_turns(l, dray__now(), error);
    if (rc) {
        dray__progress_end(l->transfer->options.progress, l->transfer->options.run);
        return rc;
    }
    note_waiting(l, dray__now());
    if (l->round < ROUNDS || l->turns_done < l->made->turn_count ||
        l->instead_done < l->instead_count) {
        dray__waker_after(&l->waker, LOOK_NS);
        route->waits = true;
        return DRAY_EAGAIN;
    }
    l->transfer->move_ns += dray__now() - l->began_ns;
    l->transfer->bytes += l->made->program->bytes;
    return DRAY_OK;
}

static void route_report(const void *state, dray_update_report *report)
{
    const struct upload_route *l = state;
    uint32_t longest = 0;
    report->fanned_bytes += l->taken_bytes;
    if (l->held_ns <= report->held_ns)
        return;
    for (uint32_t i = 1; i < l->transfer->sources->cohort_count; i++)
        if (l->members[i].held_ns > l->members[longest].held_ns)
            longest = i;
    report->held_ns = l->held_ns;
    dray__take_line(report->held_by, 101, member_of(l, longest)->name);
}

static void route_explain(const void *state, dray_error *error)
{
    const struct upload_route *l = state;
    for (uint32_t i = 0; i < l->made->turn_count; i++)
        if (l->states[i] == WAITING) {
            dray__fail_prefix(error, error->code, "%s has not uploaded its share: ",
                              member_of(l, l->made->turns[i].member)->name);
            return;
        }
}

const dray__source_type dray__source_upload = {.name = "shared upload",
                                               .bytes = sizeof(struct upload_route),
                                               .reaches = reaches,
                                               .open = route_open,
                                               .step = route_step,
                                               .report = route_report,
                                               .explain = route_explain,
                                               .close = route_close};
