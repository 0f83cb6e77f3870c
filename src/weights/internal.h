/* What the files of src/weights share. */
#ifndef DRAY_WEIGHTS_INTERNAL_H
#define DRAY_WEIGHTS_INTERNAL_H

#include "base/options.h"
#include "control/channel.h"
#include "control/sums.h"
#include "weights/hook.h"

#include <dray/weights.h>
#include <stdbool.h>

struct dray__delta_view; /* weights/delta.h */
struct dray__arena;      /* weights/arena.h */

/* Copies and checksums go in pieces that stay in a core's own cache between the two. */
#define DRAY__SLICE_BYTES ((uint64_t)256 << 10)
#define DRAY__FILE_SLICE_BYTES ((uint64_t)1 << 20)

/* ---- local.c: what members of this process hold, for readers here and for its data server -----
 */
typedef struct dray__local dray__local;
struct dray__shares; /* shares.h */
struct dray_event;
/* Layout, regions, delta and arena (NULL: there is none) are borrowed until dray__local_remove.
 * count: the layout's regions come first, others may follow. */
int dray__local_add(uint64_t token, const dray_layout *layout, dray_region *const *regions,
                    uint32_t count, const struct dray__delta_view *delta, struct dray__arena *arena,
                    dray_error *error);
/* What is published is there when the event is complete; borrowed as well. NULL: at once. */
void dray__local_set_mark(uint64_t token, struct dray_event *mark);
struct dray_event *dray__local_mark(const dray__local *local);
/* Waits until nobody holds it. */
void dray__local_remove(uint64_t token);
/* While it is held the publisher cannot close. NULL: not (or no longer) of this process. */
dray__local *dray__local_hold(uint64_t token);
void dray__local_release(dray__local *local);
dray_region *dray__local_region(const dray__local *local, uint32_t index);
const struct dray__delta_view *dray__local_delta(const dray__local *local);
struct dray__arena *dray__local_arena(const dray__local *local);
const dray_layout *dray__local_layout(const dray__local *local);
/* What an update that goes on has brought: from here on the member is read through it, by those of
 * its cohort alone. NULL: the update's memory is about to change, nobody may read it; waits until
 * nobody does. Takes the shares over. */
void dray__local_share(uint64_t token, struct dray__shares *shares);
/* This run is under way or over: who asks for what it brings need not wait for it to begin. */
void dray__local_began(uint64_t token, uint64_t run);
bool dray__local_has_begun(const dray__local *local, uint64_t run);
struct dray__shares *dray__local_shares(const dray__local *local); /* NULL: none */
/* Updates older than `attempt` must not read any more: the memory may change. */
void dray__local_revoke(uint64_t token, uint64_t attempt);
/* DRAY_ESTALE: revoked. */
int dray__local_check(const dray__local *local, uint64_t attempt, dray_error *error);
/* Who reads the member's memory also while no call of his is under way (a GPU copies). stop, called
 * from another thread once the memory is taken back from this attempt, ends that and returns when
 * nothing is read any more; it must not use this file. */
typedef struct dray__guest {
    struct dray__guest *next;
    dray__local *of; /* NULL: not, or no longer, in */
    uint64_t attempt;
    void (*stop)(void *user);
    void *user;
} dray__guest;
/* While it is held. */
void dray__local_enter(dray__local *local, dray__guest *guest);
void dray__local_depart(dray__guest *guest); /* one that was seen off is fine */
uint64_t dray__local_token(void);            /* a new one */

/* ---- pieces.c: which elements of a member's blocks count ------------------------------------- */
typedef struct dray__rect {
    int64_t start[DRAY_MAX_DIMS], extent[DRAY_MAX_DIMS]; /* 0 and 1 beyond the tensor's dims */
} dray__rect;

typedef struct dray__piece {
    dray__rect rect;
    uint32_t block;
    bool owned; /* no earlier member, and no earlier block of this one, holds it */
} dray__piece;

typedef struct dray__pieces {
    dray__piece *items; /* block by block; together they are exactly the blocks */
    uint32_t *first;    /* of each block; one more entry than blocks */
    uint32_t count, capacity;
} dray__pieces;

typedef struct dray__holder {
    const dray_layout *layout;
    const char *const *names; /* a name for each tensor, equal names meaning the same; NULL: own */
} dray__holder;

/* The pieces of members[self], given all members in rank order. */
int dray__pieces_make(const dray__holder *members, uint32_t self, dray__pieces *out,
                      dray_error *error);
void dray__pieces_free(dray__pieces *pieces);
dray__rect dray__rect_of(const dray_layout *layout, uint32_t block);
bool dray__rect_cross(const dray__rect *a, const dray__rect *b, dray__rect *out);

/* ---- slices.c: a rectangle in slices of bounded size */
typedef struct dray__slicer {
    dray__rect whole;
    int64_t tile[DRAY_MAX_DIMS], at[DRAY_MAX_DIMS];
    bool done;
} dray__slicer;

/* Slices have at most `limit` bytes, but at least one element. */
void dray__slicer_start(dray__slicer *slicer, const dray__rect *whole, uint64_t element_bytes,
                        uint64_t limit);
/* Of a copy: slices that suit its mover. */
void dray__slicer_start_copy(dray__slicer *slicer, const dray_copy *copy, uint64_t limit);
bool dray__slicer_peek(const dray__slicer *slicer, dray__rect *out);
void dray__slicer_next(dray__slicer *slicer);
dray__rect dray__copy_rect(const dray_copy *copy);
/* The part of a copy that lies in rect, which lies in the copy. */
dray_copy dray__copy_cut(const dray_copy *copy, const dray__rect *rect);
/* The way on from where `in`, the copy's way to a dense place, leads. */
dray_copy dray__copy_onwards(const dray_copy *copy, const dray_copy *in);
/* Makes the destination dense, C order, at `offset` of region 0. Returns its bytes. */
uint64_t dray__copy_to_dense(dray_copy *copy, int32_t dtype, uint64_t offset);

/* ---- checksums.c */
struct dray_checksums {
    dray__sums sums;
};
/* Sum of a rectangle of a block. scratch: for files; made when first needed, the caller's. */
int dray__sum_rect(const dray_layout *layout, dray_region *const *regions, uint32_t block,
                   const dray__rect *rect, dray_region **scratch, uint64_t *sum, dray_error *error);
/* Adds the owned pieces' sums by tensor name. */
int dray__sum_pieces(const dray_layout *layout, dray_region *const *regions,
                     const dray__pieces *pieces, dray__sums *out, dray_error *error);
uint64_t dray__rect_elements(const dray__rect *rect);

/* ---- checkpoint.c: plans between two layouts of this process, and carries the plan out */
int dray__copy_all(const dray_layout *from, dray_region *const *sources, const char *name,
                   const dray_layout *to, dray_region *const *destinations, dray_error *error);

/* ---- manifest.c: sums that a checkpoint's files carry of their own tensors, in their metadata. */
#define DRAY__SUMS_KEY "dray.sums"
/* Adds those of all files of a layout; files without any add nothing. DRAY_EFORMAT: malformed, or
 * not of exactly the file's tensors. */
int dray__stored_sums(const dray_layout *files, dray__sums *out, dray_error *error);
/* DRAY_ECHECKSUM names the first file and tensor whose sum is not what the file says. */
int dray__stored_compare(const dray_layout *files, const dray__sums *stored,
                         const dray__sums *found, dray_error *error);
/* For each tensor its sum as the files carry it; NULL: out of memory. */
char **dray__values_of(const dray_layout *layout, const dray__sums *sums);
/* The same with zeros, for all tensors that have elements: sums that are known only when the bytes
 * are written. */
char **dray__values_later(const dray_layout *layout);
/* Puts the sums into the headers of the files, over such zeros. */
int dray__values_set(const dray_layout *files, const dray__sums *sums, dray_error *error);
void dray__values_free(char **values, const dray_layout *layout);

/* ---- regions.c */
/* Of a kind that other processes of this host can map. */
bool dray__region_offered(const dray_region *region);
/* Offers a region to other processes, by its entry's key. DRAY_EUNSUPPORTED: not one to be offered,
 * or memory that its GPU's driver does not export. */
int dray__region_put(dray__channel *channel, const dray_context *context, uint64_t key,
                     uint32_t index, const dray_region *region, const uint8_t *event,
                     int64_t deadline_ns, dray_error *error);
/* How another process names it, packed. DRAY_EUNSUPPORTED: as above. */
enum { DRAY__HANDLE_PACKED = 1024 };
int dray__region_handle(const dray_region *region, uint64_t member, uint64_t epoch,
                        const uint8_t *event, uint8_t out[DRAY__HANDLE_PACKED], dray_error *error);
/* Block `index` of a layout, from one memory of it to another. */
dray_copy dray__block_copy(const dray_layout *layout, uint32_t index);
/* The same layout, in regions of another kind. */
int dray__layout_in(const dray_layout *layout, dray_region_kind kind, dray_layout **out,
                    dray_error *error);
/* Are these the regions that the layout speaks of? */
int dray__regions_check(const dray_layout *layout, dray_region *const *regions, dray_error *error);

/* A copy of the caller's, with the GPUs that its regions lie on (regions may be NULL); packed form
 * appended to `packed` as a blob (may be NULL). */
int dray__layout_copy(const dray_layout *layout, dray_region *const *regions, dray_layout **out,
                      dray__writer *packed, dray_error *error);
/* The GPU of a member with this layout, for the planner; 0: none. */
uint64_t dray__layout_device(const dray_layout *layout);
dray_region **dray__regions_copy(const dray_layout *layout, dray_region *const *regions);

/* ---- sources.c: what an update reads, kept until it changes ---------------------------------- */
typedef struct dray__op {
    dray_copy copy;
    uint32_t block; /* of the destination */
    bool owned;     /* counts in the group's sums */
    bool scales;    /* reads the scales of a transform */
    bool wired;     /* of a transform: whole cells, which the source can quantise (wired.h) */
    /* 1 + which of the plan's: then the copy is one of its reads, and has no destination. 0: none
     */
    uint32_t transform;
} dray__op;

typedef struct dray__source {
    uint64_t member, host, token;
    int64_t pid;
    char *name, *endpoint; /* of its data server; "": none */
    dray_layout *layout;
    dray_region **regions;   /* imported ones; NULL where not, or where `local` has them */
    bool local, mapped;      /* mapped: its shared regions can be */
    bool staged;             /* what is not shared comes through its arena */
    uint64_t slot_bytes;     /* of that arena; 0: it has none */
    struct dray__peer *peer; /* the remote lane's connection, kept from one update to the next */
    struct dray__nccl_link *nccl;   /* kept as well; NULL: not needed yet (nccl.h) */
    bool has_delta;                 /* behind the layout's regions it has one that holds a delta */
    struct dray__delta_view *delta; /* that region, imported; NULL: not */
    struct dray_event *mark;        /* says when what it published is there; NULL: it is */
    bool has_board;                 /* so has an engine's rank on a GPU, of a board (fan.h) */
    struct dray__overlay *overlay;  /* of a checkpoint that is a delta; NULL: it is whole */
    const dray_region *arena;       /* the last of `regions`; NULL: not imported */
} dray__source;

typedef struct dray__sources {
    uint64_t source_set;              /* 0: a checkpoint on disk */
    uint64_t group_set, host;         /* host: the destination's */
    struct dray__cuda_device *device; /* so is the GPU; NULL: none */
    char *path;
    void *disk; /* its packed layout: to see a changed one */
    size_t disk_size;
    dray__source *sources;
    uint32_t count;
    dray_plan *plan;
    dray__op *ops; /* in the plan's order */
    uint64_t op_count;
    uint64_t *transform_ops; /* where those of each transform begin, and the end */
    uint32_t *write_blocks;  /* the destination block of each of the plan's writes */
    const char **names;      /* for each destination tensor: the source's name of it */
    bool casts, files;
    struct dray__programs *programs; /* what GPUs carry out (program.h), compiled */
    struct dray__vote_table *table;  /* of the last vote (vote_table.h) */
    dray__sums stored;               /* what a checkpoint says of its tensors; none: nothing */
    bool imported;
    /* Who updates to the same version at the same time, this rank too; may change without the plan.
     */
    uint64_t cohort_set;
    dray__source *cohort;
    uint32_t cohort_wanted, cohort_count;
    struct dray__fan *fan; /* what its members upload for each other (fan.h); NULL: nothing */
    bool fan_sought;
    /* while it is being made */
    uint32_t wanted;     /* sources; `count` are there */
    dray__source *group; /* the group's other ranks, until the plan is made */
    uint32_t group_count;
    uint16_t asked;                      /* the request whose answer is awaited; 0: none */
    uint64_t next_op;                    /* whose region is imported next */
    uint32_t next_extra;                 /* then: the source whose delta and arena are */
    uint32_t next_member;                /* then: whose regions of the cohort are */
    uint32_t asked_source, asked_region; /* of the REGION_GET */
    bool asked_member;                   /* the source is one of the cohort */
} dray__sources;

typedef struct dray__destination {
    dray_layout *layout;
    dray_region **regions;
    uint64_t member, host, token;
    uint32_t rank, world;
    dray_region *board; /* where others see what it has uploaded (fan.h); NULL: it has none */
} dray__destination;

/* Publishers' memory as the source: set and ranks as the coordinator said. */
int dray__sources_live(uint64_t source_set, uint32_t source_count, uint64_t group_set,
                       const dray__destination *destination, dray__sources **out,
                       dray_error *error);
/* A checkpoint as the source. */
int dray__sources_disk(const char *path, uint64_t group_set, const dray__destination *destination,
                       dray__sources **out, dray_error *error);
/* Fetches what is missing of the layouts of both sets, then plans. Does not wait: DRAY_EAGAIN until
 * the channel's started request is answered. Nothing to do once the plan is there. */
int dray__sources_plan(dray__sources *sources, dray__channel *channel, uint64_t key,
                       const dray__destination *destination, dray_error *error);
/* ops.c: plans, and makes the ops, once the layouts of both sets are there. */
int dray__sources_prepare(dray__sources *sources, const dray__destination *destination,
                          dray_error *error);
/* Makes the regions that the plan reads reachable, in the same way. */
int dray__sources_import(dray__sources *sources, dray__channel *channel, uint64_t key,
                         dray_error *error);
/* Reads what the checkpoint's files say of their tensors now. */
int dray__sources_disk_sums(dray__sources *sources, dray_error *error);
/* Is the checkpoint still the one that was planned for? */
bool dray__sources_disk_same(const dray__sources *sources, const char *path);
/* Is this region reached through its member's data server, rather than mapped? */
bool dray__source_remote(const dray__source *source, uint32_t region, uint64_t host);
/* Who updates together with this rank, to be fetched with the plan. set 0: nobody. */
int dray__sources_cohort(dray__sources *sources, uint64_t set, uint32_t count, dray_error *error);
/* Forgets the imported regions: the next import makes them anew. */
void dray__sources_close(dray__sources *sources);
void dray__sources_free(dray__sources *sources);

/* The first `count` members of a set, waiting for them; on failure those that have a layout are
 * there. */
int dray__members_fetch(dray__channel *channel, uint64_t key, uint64_t set, dray__source *sources,
                        uint32_t count, int64_t deadline_ns, dray_error *error);
void dray__source_clear(dray__source *source);

/* ---- haul.c: carries out the copies, in lanes (haul.h), and sums what it moved --------------- */
typedef struct dray__haul dray__haul;

typedef struct dray__haul_options {
    struct dray__load *load; /* NULL: into the destination's own memory. Borrowed until close. */
    int32_t strategy;
    uint64_t bucket_bytes;
    bool verify;
    uint32_t ctas;        /* of kernels, at once; 0: as many as pay */
    int32_t copy_engines; /* they move what they can */
    uint64_t attempt;     /* what data servers are told */
    uint64_t run;         /* and those of its cohort's members; 0: there is no cohort */
    dray_region *board;   /* where they see what is here; NULL: nobody looks for it */
    const struct dray__stream_keys
        *keys; /* of the connections to them; borrowed, also after close */
    /* For each destination tensor: will the coordinator compare it as a whole with what publishers
     * announced? NULL: none. Borrowed until close. */
    const bool *compared;
    /* What this rank holds as a whole, of the incarnation that it reads: what deltas build on. */
    bool has_base;
    uint64_t incarnation, base, version;
    /* This rank holds what the checkpoint that it reads is a delta on. */
    bool has_disk_base;
} dray__haul_options;

#define DRAY__LEASE_DEFAULT (5 * DRAY__SECOND)
#define DRAY__BUCKET_MIN ((uint64_t)128 << 10)
#define DRAY__LOAD_MIN ((uint64_t)512 << 10)
#define DRAY__BUCKET_DEFAULT ((uint64_t)64 << 20)

/* Sources and destination are borrowed until close. */
int dray__haul_open(const dray__sources *sources, const dray__destination *destination,
                    const dray__haul_options *options, dray__haul **out, dray_error *error);
/* Moves for about budget_ns. DRAY_EAGAIN: more is left. */
int dray__haul_step(dray__haul *haul, int64_t budget_ns, dray_error *error);
/* After a step: nothing can be done until dray__haul_fd is readable. */
bool dray__haul_waits(const dray__haul *haul);
/* Adds to an error at the deadline what the update was waiting for. */
void dray__haul_explain(const dray__haul *haul, dray_error *error);
/* Does it upload for others what they want, too (fan.h)? */
bool dray__haul_fans(const dray__haul *haul);
int dray__haul_fd(const dray__haul *haul); /* level-triggered; -1: never waits */
/* Compares what was meant with what is there. DRAY_ECHECKSUM. */
int dray__haul_check(const dray__haul *haul, dray_error *error);
/* Sums of the source bits that this rank owns within its group. */
int dray__haul_sums(const dray__haul *haul, dray__sums *out, dray_error *error);
/* Sums of what lies in the destination, of the blocks that this rank owns, by its own names and
 * dtypes; none when those are the sums that it read (*as_read). DRAY_EUNSUPPORTED: that cannot be
 * said, because a block is owned in part or nothing was verified. */
int dray__haul_lies(const dray__haul *haul, bool *as_read, dray__sums *out, dray_error *error);
/* One sum a destination block; the caller's from here. NULL without verification. */
uint64_t *dray__haul_take_blocks(dray__haul *haul);
#define DRAY__REPORT_FIRST dray__end_of(dray_update_report, planned)
void dray__haul_report(const dray__haul *haul, dray_update_report *report);
void dray__haul_close(dray__haul *haul);

#endif
