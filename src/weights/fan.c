/* Who uploads what, and the board (fan.h). */
#include "weights/fan.h"

#include "base/error.h"
#include "memory/cuda_memory.h"
#include "weights/compile.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Less than this is uploaded by everyone: what it takes to take turns is not worth it. */
#define SHARED_MIN ((uint64_t)32 << 10)
enum { PAGE = 4096, LAST = DRAY__FAN_ROUNDS - 1 };

/* ---- the board ------------------------------------------------------------------------------- */

struct board {
    _Atomic uint64_t run, rounds, given_up;
};

static struct board *board_of(const dray_region *region)
{
    return (struct board *)(uintptr_t)dray_region_base(region);
}

int dray__fan_board_new(dray_region **out, dray_error *error)
{
    return dray_region_alloc(DRAY_REGION_SHARED, PAGE, "board", out, error);
}

void dray__fan_board_begin(dray_region *region, uint64_t run)
{
    struct board *b = board_of(region);
    atomic_store(&b->rounds, 0);
    atomic_store(&b->run, run);
}

void dray__fan_board_enter(dray_region *region, uint32_t round)
{
    atomic_fetch_or(&board_of(region)->rounds, (uint64_t)1 << round);
}

void dray__fan_board_end(dray_region *region, uint64_t run)
{
    struct board *b = region ? board_of(region) : NULL;
    const uint64_t all = ((uint64_t)1 << DRAY__FAN_ROUNDS) - 1;
    if (b && (atomic_load(&b->run) != run || atomic_load(&b->rounds) != all))
        atomic_store(&b->given_up, run);
}

enum dray__fan_news dray__fan_look(const dray_region *region, uint64_t run, uint32_t round)
{
    struct board *b = board_of(region);
    uint64_t begun = atomic_load(&b->run), rounds = atomic_load(&b->rounds);
    if (begun == run && rounds >> round & 1 && atomic_load(&b->run) == run)
        return DRAY__FAN_HERE;
    return atomic_load(&b->given_up) == run ? DRAY__FAN_GIVEN_UP : DRAY__FAN_NOT_YET;
}

/* ---- sharing out ----------------------------------------------------------------------------- */

struct dray__fan {
    const dray__sources *sources;
    const dray__destination *destination;
    dray__cohort *cohort;
    bool *wanted; /* by member */
    dray__fan_program made;
};

/* A stripe of a block: whose turn it is. */
struct stripe {
    dray__rect rect;
    uint32_t member, block, round;
    bool shared;
};

static bool on_this_host(const dray__source *member, const dray__destination *destination)
{
    return member->host == destination->host && member->mapped && member->has_board;
}

/* Both sides must see it in the same way: a tensor that is another one's alias there is left out.
 */
static struct stripe stripe_of(const dray__fan *f, uint32_t block, uint32_t number)
{
    const dray_layout *own = f->destination->layout;
    const dray_tensor_info *tensor = dray_layout_tensor(own, dray_layout_block(own, block)->tensor);
    struct stripe s = {.rect = dray__cohort_stripe(f->cohort, block, number)};
    uint32_t holders;
    s.member =
        dray__cohort_turn(f->cohort, block, number, DRAY__FAN_ROUNDS, &s.block, &s.round, &holders);
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

/* Whom something is taken from. false: nothing is shared. */
static bool find_wanted(dray__fan *f)
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

int dray__fan_new(const dray__sources *sources, const dray__destination *destination,
                  dray__fan **out, dray_error *error)
{
    *out = NULL;
    if (sources->cohort_count < 2 || !sources->device || !any_pinned(sources))
        return DRAY_OK;
    dray__fan *f = calloc(1, sizeof *f);
    if (!f)
        return dray__nomem(error);
    f->sources = sources;
    f->destination = destination;
    f->wanted = calloc(sources->cohort_count, sizeof *f->wanted);
    int rc = f->wanted ? dray__cohort_new(sources, destination, on_this_host, &f->cohort, error)
                       : dray__nomem(error);
    if (rc || !find_wanted(f)) {
        dray__fan_free(f);
        return rc == DRAY_ENOENT ? DRAY_OK : rc;
    }
    for (uint32_t i = 0; i < sources->cohort_count; i++)
        if (sources->cohort[i].local) /* it may take its memory back at any moment */
            f->wanted[i] = false;
    *out = f;
    return DRAY_OK;
}

static void forget_program(dray__fan *f)
{
    dray__program_free(f->made.program);
    free(f->made.turns);
    f->made = (dray__fan_program){0};
}

void dray__fan_free(dray__fan *f)
{
    if (!f)
        return;
    forget_program(f);
    dray__cohort_free(f->cohort);
    free(f->wanted);
    free(f);
}

bool dray__fan_wants(const dray__fan *f, uint32_t member)
{
    return f->wanted[member];
}

void dray__fan_lose(dray__fan *f, uint32_t member)
{
    f->wanted[member] = false;
    forget_program(f);
}

bool dray__fan_takes(const dray__haul *h, const dray__op *op)
{
    const dray__source *source = &h->sources->sources[op->copy.source];
    return h->sources->fan && h->options.board && h->options.run && !h->options.load &&
           h->options.strategy == DRAY_STRATEGY_DIRECT && !op->transform && !source->local &&
           dray_layout_region(source->layout, op->copy.source_region)->kind == DRAY_REGION_PINNED &&
           dray__program_takes(h, op);
}

/* ---- compiling ------------------------------------------------------------------------------- */

struct making {
    dray__compiler c;
    dray__fan *fan;
    const bool *instead; /* NULL: everything */
    uint64_t *turn_bytes;
    uint64_t covered; /* elements that others may take from here */
};

static int upload(struct making *m, const dray__op *op, const dray_copy *copy, uint32_t step,
                  dray_error *error)
{
    const dray_region *to = m->c.haul->destination->regions[copy->destination_region];
    dray__ends ends;
    int rc = dray__ends_of(&m->c, copy, to, &ends, error);
    if (rc)
        return rc;
    return dray__draft_move(&m->c, &ends, copy, op, step, 0) ? DRAY_OK : dray__nomem(error);
}

/* The member's memory, from where its block has the rectangle. NULL: it cannot be reached. */
static const dray_region *out_of_member(const struct making *m, const struct stripe *s,
                                        dray_copy *copy)
{
    const dray__source *member = &m->fan->sources->cohort[s->member];
    const dray_block *block = dray_layout_block(member->layout, s->block);
    const dray_region *from = member->regions ? member->regions[block->region] : NULL;
    copy->source_region = block->region;
    copy->source_offset = block->offset;
    memset(copy->source_stride, 0, sizeof copy->source_stride);
    for (uint32_t d = 0; d < copy->ndim; d++) {
        copy->source_stride[d] = block->stride[d];
        copy->source_offset +=
            (uint64_t)(copy->start[d] - block->start[d]) * (uint64_t)block->stride[d];
    }
    return from;
}

static int take(struct making *m, const dray__op *op, const struct stripe *s, const dray_copy *part,
                dray_error *error)
{
    const dray_region *to = m->c.haul->destination->regions[part->destination_region];
    uint32_t turn = dray__fan_turn_of(s->member, s->round);
    dray_copy copy = *part;
    const dray_region *from = out_of_member(m, s, &copy);
    dray__ends ends = {.from = from, .to = to, .device = to->device, .lane = s->member};
    if (!from || !from->device_address || dray__region_reach(from, to->device, NULL))
        return upload(m, op, part, LAST, error);
    m->turn_bytes[turn] += dray__copy_bytes(part);
    return dray__draft_move(&m->c, &ends, &copy, op, DRAY__FAN_ROUNDS + turn, 0)
               ? DRAY_OK
               : dray__nomem(error);
}

static int compile_stripe(struct making *m, const dray__op *op, const struct stripe *s,
                          const dray__rect *cross, dray_error *error)
{
    dray_copy part = dray__copy_cut(&op->copy, cross);
    bool mine = s->member == dray__cohort_self(m->fan->cohort);
    bool taken = s->shared && !mine && m->fan->wanted[s->member];
    if (m->instead)
        return taken && m->instead[dray__fan_turn_of(s->member, s->round)]
                   ? upload(m, op, &part, 0, error)
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

static int compile_op(struct making *m, const dray__op *op, dray_error *error)
{
    const dray__cohort *cohort = m->fan->cohort;
    dray__rect whole = dray__copy_rect(&op->copy), cross;
    int rc = DRAY_OK;
    if (!is_plain(op) || !dray__cohort_shared(cohort, op->block))
        return m->instead ? DRAY_OK : upload(m, op, &op->copy, LAST, error);
    for (uint32_t i = 0; i < dray__cohort_stripes(cohort, op->block) && rc == DRAY_OK; i++) {
        struct stripe s = stripe_of(m->fan, op->block, i);
        if (dray__rect_cross(&whole, &s.rect, &cross))
            rc = compile_stripe(m, op, &s, &cross, error);
    }
    return rc;
}

static int compile(struct making *m, const uint64_t *ops, uint64_t count, dray__program **out,
                   dray_error *error)
{
    const dray__haul *h = m->c.haul;
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

/* Elements that others will look for here: of what may be shared at all. */
static uint64_t expected(const dray__fan *f, const dray__haul *h)
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

int dray__fan_find(dray__fan *f, const dray__haul *h, const uint64_t *ops, uint64_t count,
                   const dray__fan_program **out, dray_error *error)
{
    uint32_t most = f->sources->cohort_count * DRAY__FAN_ROUNDS;
    if (f->made.program && dray__program_fits(f->made.program, h, ops, count, 0)) {
        *out = &f->made;
        return DRAY_OK;
    }
    forget_program(f);
    struct making m = {.c.haul = h, .fan = f, .turn_bytes = calloc(most, sizeof *m.turn_bytes)};
    f->made.turns = calloc(most, sizeof *f->made.turns);
    int rc = m.turn_bytes && f->made.turns ? compile(&m, ops, count, &f->made.program, error)
                                           : dray__nomem(error);
    for (uint32_t t = 0; rc == DRAY_OK && t < most; t++)
        if (m.turn_bytes[t])
            f->made.turns[f->made.turn_count++] = (dray__fan_turn){
                t / DRAY__FAN_ROUNDS, t % DRAY__FAN_ROUNDS, DRAY__FAN_ROUNDS + t, m.turn_bytes[t]};
    f->made.covers = m.covered == expected(f, h);
    free(m.turn_bytes);
    if (rc)
        forget_program(f);
    else
        *out = &f->made;
    return rc;
}

int dray__fan_instead(dray__fan *f, const dray__haul *h, const uint64_t *ops, uint64_t count,
                      const bool *instead, dray__program **out, dray_error *error)
{
    struct making m = {.c.haul = h, .fan = f, .instead = instead};
    return compile(&m, ops, count, out, error);
}
